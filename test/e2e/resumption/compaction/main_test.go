// Package compaction tests servers on an etcd that is compacted: by one of them, by all, by a stock
// kube-apiserver's engine, and by hand. Every server refuses compacted revisions with 410 and
// serves all others, and invalid values of the key that announces compactions have no effect.
package compaction

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

const (
	key  = "compact_rev_key"
	maps = "/api/v1/namespaces/default/configmaps"
)

// every returns the flag for the compaction interval.
func every(interval time.Duration) string { return "--etcd-compaction-interval=" + interval.String() }

// create writes a ConfigMap and returns its revision.
func create(t *testing.T, ctx context.Context, api *harness.API, name string) int64 {
	t.Helper()
	var o harness.Object
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// the namespace may not exist yet
		var err error
		o, err = api.Create(ctx, maps, map[string]any{"metadata": map[string]any{"name": name}})
		return err == nil, err
	}))
	rev, err := strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	harness.Check(t, err)
	return rev
}

// listAt lists exactly at a revision.
func listAt(t *testing.T, ctx context.Context, api *harness.API, rev int64) *harness.Response {
	t.Helper()
	r, err := api.Read(ctx, maps, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", rev), "")
	harness.Check(t, err)
	return r
}

// gone reports whether the response refuses a compacted revision.
func gone(r *harness.Response) bool {
	return r.Code == http.StatusGone && r.Status().Reason == metav1.StatusReasonExpired
}

// awaitGone returns when a list at the revision is refused.
func awaitGone(t *testing.T, ctx context.Context, api *harness.API, rev int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r := listAt(t, ctx, api, rev)
		return gone(r), fmt.Errorf("a list at %d, which was compacted: code %d", rev, r.Code)
	}))
}

// announcement is a write of the key.
type announcement struct {
	rev int64
	at  time.Time // time of arrival
}

// announcements returns the revisions announced from now on, without 0.
func announcements(t *testing.T, ctx context.Context, client *clientv3.Client) <-chan announcement {
	t.Helper()
	now, err := client.Get(ctx, key)
	harness.Check(t, err)
	out := make(chan announcement, 1000)
	watch := client.Watch(ctx, key, clientv3.WithRev(now.Header.Revision+1))
	go func() {
		defer close(out)
		for resp := range watch {
			for _, e := range resp.Events {
				if rev, err := strconv.ParseInt(string(e.Kv.Value), 10, 64); err == nil && rev > 0 && e.Type == mvccpb.PUT {
					out <- announcement{rev, time.Now()}
				}
			}
		}
	}()
	return out
}

// next returns the next announcement above a revision.
func next(t *testing.T, ctx context.Context, from <-chan announcement, above int64) announcement {
	t.Helper()
	for {
		select {
		case a, ok := <-from:
			if !ok {
				t.Fatal("the watch of the key has ended")
			}
			if a.rev > above {
				return a
			}
		case <-ctx.Done():
			t.Fatalf("no compaction above %d: %v", above, context.Cause(ctx))
		}
	}
}

// requireCompacted returns when etcd is compacted to the revision or beyond.
func requireCompacted(t *testing.T, ctx context.Context, client *clientv3.Client, rev int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, err := client.Get(ctx, key, clientv3.WithRev(rev-1))
		return errors.Is(err, rpctypes.ErrCompacted), fmt.Errorf("etcd still has %d: %v", rev-1, err)
	}))
}

// overtaken reports whether a later compaction than that of the revision was announced meanwhile:
// then the revision itself may be refused.
func overtaken(t *testing.T, ctx context.Context, client *clientv3.Client, rev int64) bool {
	t.Helper()
	now, err := client.Get(ctx, key)
	harness.Check(t, err)
	if len(now.Kvs) == 0 {
		return false
	}
	announced, err := strconv.ParseInt(string(now.Kvs[0].Value), 10, 64)
	return err == nil && announced > rev
}

// requireInconsistentContinue fails unless the answer to the token, whose revision is compacted,
// has a token that continues at the current revision.
func requireInconsistentContinue(t *testing.T, ctx context.Context, api *harness.API, token string, want []string) {
	t.Helper()
	r, err := api.Read(ctx, maps, "limit=2&continue="+url.QueryEscape(token), "")
	harness.Check(t, err)
	if !gone(r) || r.Status().Continue == "" {
		t.Errorf("the token of a compacted revision: %d %s", r.Code, r.Body)
		return
	}
	names, overtaken := rest(t, ctx, api, r.Status().Continue)
	for n := 0; n < 10 && overtaken; n++ {
		names, overtaken = rest(t, ctx, api, r.Status().Continue)
	}
	if fmt.Sprint(names) != fmt.Sprint(want) {
		t.Errorf("the rest is %v, want %v", names, want)
	}
}

// rest returns the names on the pages from a token on, which are all of one revision. overtaken: a
// compaction has overtaken that revision, on a busy machine.
func rest(t *testing.T, ctx context.Context, api *harness.API, token string) (names []string, overtaken bool) {
	t.Helper()
	for version := ""; token != ""; {
		r, err := api.Read(ctx, maps, "limit=2&continue="+url.QueryEscape(token), "")
		harness.Check(t, err)
		if version != "" && gone(r) {
			return nil, true
		}
		page, err := r.List()
		harness.Check(t, err)
		if version != "" && page.Metadata.ResourceVersion != version {
			t.Errorf("a page at %s after one at %s", page.Metadata.ResourceVersion, version)
		}
		version, token = page.Metadata.ResourceVersion, page.Metadata.Continue
		names = append(names, page.Names()...)
	}
	return names, false
}
