package feed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// The value of an object, or its name, if it was written after the backup and before the restore,
// and is therefore lost.
const lost = "lost"

// restoredInPlace restores the same cluster at an older revision, by its files.
func (s *single) restoredInPlace(t *testing.T, ctx context.Context) {
	s.restored(t, ctx, func() func() {
		backup := filepath.Join(s.env.Dir("backup"), "data")
		s.etcd.Stop()
		harness.Check(t, os.CopyFS(backup, os.DirFS(s.etcd.Dir)))
		s.etcd.Start()
		return func() {
			s.etcd.Stop()
			harness.Check(t, os.RemoveAll(s.etcd.Dir))
			harness.Check(t, os.CopyFS(s.etcd.Dir, os.DirFS(backup)))
			s.etcd.Start()
		}
	})
}

// restoredElsewhere restores a snapshot in a new cluster, with writes before the server connects to
// it: its revision is higher than that of the lost cluster, so only the cluster ID differs.
func (s *single) restoredElsewhere(t *testing.T, ctx context.Context) {
	s.restored(t, ctx, func() func() {
		backup := snapshot(t, ctx, s.env, s.client)
		return func() {
			s.link.Refuse(true)
			lostAt := commit(t, ctx, s.client, leases.put(lost, lost))
			s.etcd.Stop()
			s.etcd = etcdcluster.Start(t, s.env, 1).Members[0]
			s.etcd.Stop()
			restoreSnapshot(t, backup, s.etcd.Dir)
			s.etcd.Start()
			s.client = s.etcd.Client()
			for commit(t, ctx, s.client, leases.put("one", "restored")) < lostAt+100 {
			}
			harness.Check(t, s.link.Lead(s.etcd.URL))
			s.link.Refuse(false)
		}
	})
}

// restored calls backUp, then the function that it returns, which restores etcd to the earlier
// state under the running server. The server has to detect that. It then serves the restored state,
// and nothing written between backup and restore.
func (s *single) restored(t *testing.T, ctx context.Context, backUp func() (restore func())) {
	kinds := []kind{maps, secrets, things}
	for _, k := range kinds {
		commit(t, ctx, s.client, clientv3.OpDelete(k.prefix, clientv3.WithPrefix()))
		for i := range 10 {
			commit(t, ctx, s.client, k.put(fmt.Sprintf("kept-%d", i), "kept"))
		}
	}
	restores, logged := s.restores(t, ctx), len(s.server.Output())
	restore := backUp()

	// The changes that are lost: a creation, an update and a deletion.
	var began, lostAt int64
	tokens := map[kind]string{}
	shown := map[kind]string{} // the state after the restore
	for _, k := range kinds {
		list := harness.AwaitList(t, ctx, s.api, k.path)
		if len(list.Items) != 10 {
			t.Fatalf("%s has %d objects: %s", k.path, len(list.Items), items(list))
		}
		shown[k] = items(list)
		began = harness.Revision(t, list.Metadata.ResourceVersion)
	}
	var recordings []*recording
	for _, k := range kinds {
		for _, query := range []string{"", "allowWatchBookmarks=true&labelSelector=value", "fieldSelector=metadata.name%3Dkept-3"} {
			recordings = append(recordings, record(t, ctx, s.api, k.path, query, began))
		}
	}
	for i := range 30 {
		for _, k := range kinds {
			lostAt = commit(t, ctx, s.client, k.put(fmt.Sprintf("%s-%d", lost, i), lost), k.put("kept-3", lost), clientv3.OpDelete(fmt.Sprintf("%skept-%d", k.prefix, 4+i%6)))
		}
	}
	for _, k := range kinds {
		list, err := s.api.List(ctx, k.path, "limit=3")
		harness.Check(t, err)
		tokens[k] = list.Metadata.Continue
		at := harness.Revision(t, list.Metadata.ResourceVersion)
		if at < lostAt {
			t.Fatalf("a list of the latest state is of %d, want %d or later", at, lostAt)
		}
		// Fill the server's caches of encodings too, in each form.
		for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf", "application/json;as=Table;v=v1;g=meta.k8s.io"} {
			_, err := s.api.DoAs(ctx, http.MethodGet, k.path, "", "", accept, nil)
			harness.Check(t, err)
		}
	}

	// After the first answer with the restored state, no later request may return lost objects.
	var known atomic.Bool
	background, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	for _, k := range kinds {
		for _, request := range []struct{ path, query string }{
			{k.path, ""}, {k.path, "resourceVersion=0"}, {k.path, "limit=500"},
			{k.path + "/kept-3", ""}, {k.path + "/kept-3", "resourceVersion=0"}, {k.path + "/lost-3", "resourceVersion=0"},
			{k.path, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", lostAt)},
			{k.path, "limit=3&continue=" + url.QueryEscape(tokens[k])},
		} {
			group.Go(func() {
				for background.Err() == nil {
					detected := known.Load()
					r, err := s.api.Do(background, http.MethodGet, request.path, request.query, nil)
					if err == nil && detected && showsLost(r) {
						t.Errorf("get %s?%s contains lost revisions: %.300s", request.path, request.query, r.Body)
						return
					}
				}
			})
		}
	}
	restore()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := s.api.List(ctx, maps.path, "")
		if err == nil && items(list) != shown[maps] {
			err = fmt.Errorf("%s is shown, want %s", items(list), shown[maps])
		}
		return err == nil, err
	}))
	known.Store(true)

	// No watch continues.
	for _, r := range recordings {
		r.requireExpired(t, ctx)
	}
	var after []*recording
	for _, k := range kinds {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			list, err := s.api.List(ctx, k.path, "")
			if err == nil && items(list) != shown[k] {
				t.Fatalf("after the restore %s shows %s, want %s", k.path, items(list), shown[k])
			}
			return err == nil, err
		}))
		for _, query := range []string{"resourceVersion=0", "resourceVersion=0&resourceVersionMatch=NotOlderThan"} {
			list, err := s.api.List(ctx, k.path, query)
			if err != nil || items(list) != shown[k] {
				t.Errorf("after the restore %s?%s: %+v, %v, want %s", k.path, query, list, err, shown[k])
			}
		}
		for name, code := range map[string]int{"kept-3": http.StatusOK, "kept-4": http.StatusOK, "lost-3": http.StatusNotFound} {
			for _, query := range []string{"", "resourceVersion=0"} {
				r, err := s.api.Do(ctx, http.MethodGet, k.path+"/"+name, query, nil)
				if err != nil || r.Code != code || showsLost(r) {
					t.Errorf("after the restore, get %s/%s?%s: %+v, %v, want %d", k.path, name, query, r, err, code)
				}
			}
		}
		// Requests at lost revisions: the server answers with the restored state, or with 410.
		for at := lostAt - 3; at <= lostAt+1; at++ {
			after = append(after, record(t, ctx, s.api, k.path, "", at))
		}
		r, _, err := retried(ctx, func() (*harness.Response, error) { return listAt(ctx, s.api, k.path, lostAt) })
		harness.Check(t, err)
		requireNotLost(t, "a list at a lost revision", r)
		r, err = s.api.Read(ctx, k.path, "limit=3&continue="+url.QueryEscape(tokens[k]), "")
		harness.Check(t, err)
		requireNotLost(t, "a token of a lost revision", r)
	}
	stop()
	group.Wait()

	// Writes continue, at the numbers of the lost revisions too.
	var last int64
	for n := 0; n < 60 || last <= lostAt; n++ {
		last = commit(t, ctx, s.client, maps.put("new", fmt.Sprint(n)), secrets.put("new", fmt.Sprint(n)), things.put("new", fmt.Sprint(n)))
	}
	for _, k := range kinds {
		list := harness.AwaitList(t, ctx, s.api, k.path)
		at := harness.Revision(t, list.Metadata.ResourceVersion)
		r := record(t, ctx, s.api, k.path, "", at)
		next := commit(t, ctx, s.client, k.put("new", "newest"))
		r.requireEvents(t, ctx, history(t, ctx, s.client, k.prefix, at, next))
		if got := harness.AwaitList(t, ctx, s.api, k.path); strings.Contains(items(got), lost) || len(got.Items) != 11 {
			t.Errorf("%s shows %s", k.path, items(got))
		}
		if got, _, err := retried(ctx, func() (*harness.Response, error) { return listAt(ctx, s.api, k.path, lostAt) }); err == nil {
			requireNotLost(t, "a list at a revision that etcd reached twice", got)
		}
	}
	for _, r := range after {
		r.requireNothingLost(t)
	}
	if n := s.restores(t, ctx); n <= restores {
		t.Errorf("strata_mirror_etcd_restores_total is %v, and was %v before", n, restores)
	}
	if !strings.Contains(s.server.Output()[logged:], "Etcd was restored or replaced") {
		t.Error("the log has no line on a restore")
	}
}

func (s *single) restores(t *testing.T, ctx context.Context) float64 {
	t.Helper()
	return harness.Must[float64](t)(s.api.Sum(ctx, "strata_mirror_etcd_restores_total"))
}

// showsLost reports whether an answer contains lost objects.
func showsLost(r *harness.Response) bool {
	return r.Code == http.StatusOK && (strings.Contains(string(r.Body), `"value":"`+lost) || strings.Contains(string(r.Body), `"name":"`+lost))
}

// requireNotLost fails the test unless an answer is a permitted one for a request at a lost
// revision.
func requireNotLost(t *testing.T, what string, r *harness.Response) {
	t.Helper()
	switch r.Code {
	case http.StatusOK, http.StatusGone, http.StatusGatewayTimeout:
		if showsLost(r) {
			t.Errorf("%s contains lost revisions: %.300s", what, r.Body)
		}
	default:
		t.Errorf("%s: %v", what, r.Err())
	}
}

// requireNothingLost fails the test if a watch at a lost revision has delivered lost objects, or
// ended with an error other than 410.
func (r *recording) requireNothingLost(t *testing.T) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.err != nil && (r.mu.status == nil || r.mu.status.Code != http.StatusGone) {
		t.Errorf("watch %s ended: %+v, %v", r.what, r.mu.status, r.mu.err)
	}
	for _, c := range r.mu.changes {
		if strings.HasPrefix(c.name, lost) {
			t.Errorf("watch %s shows %v", r.what, c)
		}
	}
}

// snapshot saves a snapshot of an etcd and returns the file.
func snapshot(t *testing.T, ctx context.Context, e *harness.Env, client *clientv3.Client) string {
	t.Helper()
	r, err := client.Snapshot(ctx)
	harness.Check(t, err)
	defer r.Close()
	data, err := io.ReadAll(r)
	harness.Check(t, err)
	const sum = 32 // of the data, appended to it
	return e.WriteFile("snapshot.db", data[:len(data)-sum])
}

// restoreSnapshot restores a snapshot into the data directory of another etcd, which is stopped:
// its keys with all their revisions, without its membership.
func restoreSnapshot(t *testing.T, file, dir string) {
	t.Helper()
	from, err := bbolt.Open(file, 0o600, &bbolt.Options{ReadOnly: true})
	harness.Check(t, err)
	defer from.Close()
	to, err := bbolt.Open(filepath.Join(dir, "member", "snap", "db"), 0o600, nil)
	harness.Check(t, err)
	defer func() { harness.Check(t, to.Close()) }()
	harness.Check(t, from.View(func(src *bbolt.Tx) error {
		return to.Update(func(dst *bbolt.Tx) error {
			for _, name := range []string{"key", "lease"} {
				if err := dst.DeleteBucket([]byte(name)); err != nil && !errors.Is(err, bbolterrors.ErrBucketNotFound) {
					return err
				}
				b, err := dst.CreateBucket([]byte(name))
				if err != nil {
					return err
				}
				if err := src.Bucket([]byte(name)).ForEach(b.Put); err != nil {
					return err
				}
			}
			for _, key := range []string{"scheduledCompactRev", "finishedCompactRev"} {
				if v := src.Bucket([]byte("meta")).Get([]byte(key)); v != nil {
					if err := dst.Bucket([]byte("meta")).Put([]byte(key), v); err != nil {
						return err
					}
				}
			}
			return nil
		})
	}))
}
