package feed

import (
	"context"
	"fmt"
	"net/http"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// TestFeed_ClusterDisturbed_WatchesContinue: faults after which the server still has its memory. It
// ends no watch, none loses or repeats an event, and the server relists nothing.
//
// The long form moves the leader for 30 s beside 1,000 watches, and stops the server for 60 s. The
// client ends a watch after 45 s of silence, and resumes it.
func TestFeed_ClusterDisturbed_WatchesContinue(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 2*testTimeout)
	s := newMembers(t, ctx)
	relists := metric(t, ctx, s.api, "relists_total")
	listed := metric(t, ctx, s.api, "listed_keys_total")
	t.Run("the server sees one member, in a minority", func(t *testing.T) { s.requireNoStaleReads(t, ctx, s.Cut) })
	t.Run("the server sees one member, which its peers do not hear", func(t *testing.T) { s.requireNoStaleReads(t, ctx, s.Mute) })
	t.Run("the server is paused", func(own *testing.T) { s.requireWakes(own, ctx, t) })
	t.Run("the leader moves", func(t *testing.T) { s.requireMoves(t, ctx) })
	if after := metric(t, ctx, s.api, "relists_total"); after != relists {
		t.Errorf("the server has relisted everything %d times", after-relists)
	}
	if after := metric(t, ctx, s.api, "listed_keys_total"); after != listed {
		t.Errorf("the server has listed %d keys again", after-listed)
	}
}

// requireNoStaleReads: the server reaches one member only, which is partitioned from its peers. A
// read of the latest state is refused, or shows the write that the other members have acknowledged:
// a member that only its peers do not hear still receives it. Refused lists and watches have
// Retry-After. Reads at any revision are answered.
func (s *members) requireNoStaleReads(t *testing.T, ctx context.Context, partition func(*etcdcluster.Member, bool)) {
	const seen = 2
	for i, l := range s.links {
		l.Refuse(i != seen)
	}
	harness.AwaitList(t, ctx, s.api, maps.path)
	partition(s.Members[seen], true)
	client := harness.Endpoints(s.Members[0].Etcd, s.Members[1].Etcd).Client()
	var written int64
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second) // they may have to elect a leader
		defer cancel()
		r, err := client.Txn(ctx).Then(maps.put("one", t.Name()), secrets.put("one", t.Name())).Commit()
		if err == nil {
			written = r.Header.Revision
		}
		return err == nil, err
	}))
	for _, read := range []struct{ path, query string }{
		{maps.path, ""}, {maps.path, "limit=1"}, {maps.path, "labelSelector=value"}, {maps.path, fmt.Sprintf("resourceVersion=%d", written)},
		{maps.path, "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=1"},
		{maps.path + "/one", "timeout=1s"}, // from etcd, which has no answer
	} {
		r, err := s.api.Do(ctx, http.MethodGet, read.path, read.query, nil)
		if err != nil && read.path != maps.path {
			continue // a GET from etcd: its stream may end at the timeout
		}
		harness.Check(t, err)
		if r.Code == http.StatusOK {
			list, err := r.List()
			harness.Check(t, err)
			if at := harness.Revision(t, list.Metadata.ResourceVersion); at < written {
				t.Errorf("%s?%s: the answer is of revision %d, and %d was acknowledged", read.path, read.query, at, written)
			}
		} else if r.Header.Get("Retry-After") == "" && (read.path == maps.path || r.Code != http.StatusGatewayTimeout) {
			t.Errorf("%s?%s: the refusal has no Retry-After: %v", read.path, read.query, r.Err())
		}
	}
	if _, err := s.api.List(ctx, maps.path, "resourceVersion=0"); err != nil {
		t.Errorf("list at any revision: %v", err)
	}
	partition(s.Members[seen], false)
	list := harness.AwaitList(t, ctx, s.api, maps.path)
	if at := harness.Revision(t, list.Metadata.ResourceVersion); at < written {
		t.Errorf("after the partition a list is of revision %d, want %d or later", at, written)
	}
	for _, l := range s.links {
		l.Refuse(false)
	}
	s.requireHistory(t, ctx)
}

// requireWakes: the server's process is stopped while etcd's clients write, and continues. A lease
// that was renewed through the server is renewed again, and its watches show everything. Watches
// that are resumed last as long as those of parent.
func (s *members) requireWakes(t *testing.T, ctx context.Context, parent *testing.T) {
	harness.Check(t, s.api.Ensure(ctx, leases.path, object{"metadata": object{"name": "leader"}, "spec": object{"holderIdentity": "one"}}))
	var taken, renewed harness.Object
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		taken, err = s.api.Get(ctx, leases.path+"/leader", "")
		return err == nil, err
	}))
	harness.Check(t, s.server.Signal(syscall.SIGSTOP))
	for began, n := time.Now(), 0; n < 20 || time.Since(began) < harness.Pick(0, time.Minute); n++ {
		commit(t, ctx, s.client, maps.put("one", fmt.Sprint(n)), secrets.put("one", fmt.Sprint(n)))
		<-time.After(harness.Pick(50*time.Millisecond, time.Second))
	}
	harness.Check(t, s.server.Signal(syscall.SIGCONT))
	// The members may elect a leader again: a failed request may be applied or not.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		renewed, err = s.api.Update(ctx, leases.path+"/leader", object{
			"metadata": object{"name": "leader", "resourceVersion": taken.Metadata.ResourceVersion}, "spec": object{"holderIdentity": "two"}})
		if err == nil {
			return true, nil
		}
		var read error
		renewed, read = s.api.Get(ctx, leases.path+"/leader", "")
		return read == nil && renewed.Metadata.ResourceVersion != taken.Metadata.ResourceVersion, err
	}))
	list := harness.AwaitList(t, ctx, s.api, maps.path)
	if at, least := harness.Revision(t, list.Metadata.ResourceVersion), harness.Revision(t, renewed.Metadata.ResourceVersion); at < least {
		t.Errorf("a list after the renewal at %d is of revision %d", least, at)
	}
	// A client ends its connection after 45 s of silence, and resumes.
	for r, k := range s.recordings {
		r.mu.Lock()
		lost, last := r.mu.err != nil && r.mu.status == nil, max(r.after, r.mu.revision)
		r.mu.Unlock()
		if lost && harness.Long() {
			delete(s.recordings, r)
			s.recordings[record(parent, ctx, s.api, k.path, "allowWatchBookmarks=true", last)] = k
		}
	}
	s.requireHistory(t, ctx)
}

// requireMoves: the leader of etcd is moved again and again, while a client writes.
func (s *members) requireMoves(t *testing.T, ctx context.Context) {
	for range harness.Pick(100, 1000) {
		s.recordings[record(t, ctx, s.api, maps.path, "allowWatchBookmarks=true", s.start)] = maps
	}
	var clients []*clientv3.Client
	for _, m := range s.Members {
		clients = append(clients, m.Client())
	}
	moves, next := harness.Pick(50, 150), time.NewTicker(200*time.Millisecond)
	defer next.Stop()
	rounds := 0
	for moved := 0; moved < moves; rounds++ {
		for i, client := range clients { // only the leader accepts it
			if _, err := client.MoveLeader(ctx, s.Members[(i+1)%len(clients)].ID); err == nil {
				moved++
				break
			}
		}
		// It may fail, or happen without an acknowledgement: etcd's history has it then.
		_, _ = s.client.Txn(ctx).Then(maps.put("one", fmt.Sprint(rounds)), secrets.put("one", fmt.Sprint(rounds))).Commit()
		select {
		case <-next.C:
		case <-ctx.Done():
			t.Fatalf("the leader has moved %d times, want %d", moved, moves)
		}
	}
	t.Logf("the leader has moved %d times in %d rounds beside %d watches", moves, rounds, len(s.recordings))
	harness.AwaitList(t, ctx, s.api, maps.path)
	s.requireHistory(t, ctx)
}
