package skew

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// compactKey is the key with which the compactors of API servers coordinate their turns.
const compactKey = "compact_rev_key"

// TestCompactors_OfStrataAndPeer_AreFollowed makes the compactors of Strata and of a peer share an
// etcd: both, either alone, and the peer's with a Strata that compacts nothing. (A kube-apiserver
// that compacts nothing does not follow other compactors: it continues to answer from its watch
// cache.) Both servers refuse compacted revisions of either compactor and return a token to
// continue.
func TestCompactors_OfStrataAndPeer_AreFollowed(t *testing.T) {
	t.Parallel()
	forEach(t, stockCombinations, func(t *testing.T, ctx context.Context, c combination) {
		p := c.start(t, ctx, "--etcd-compaction-interval=1s")
		begin, err := p.client.Get(ctx, compactKey)
		harness.Check(t, err)
		turns := p.client.Watch(ctx, compactKey, clientv3.WithRev(begin.Header.Revision+1))
		p.requireCompaction(t, ctx, "both", p.strata, p.peer)
		harness.Check(t, p.peer.Stop())
		p.requireCompaction(t, ctx, "strata", p.strata)
		p.peer.Restart()
		p.requireCompaction(t, ctx, "both again", p.strata, p.peer)
		harness.Check(t, p.strata.Stop())
		p.requireCompaction(t, ctx, "peer", p.peer)
		p.strata.Restart("--etcd-compaction-interval=0")
		p.requireCompaction(t, ctx, "peer, which strata follows", p.strata, p.peer)
		requireTurns(t, ctx, p.client, begin, turns)
	})
}

// requireCompaction waits until the current revision is compacted, and checks the servers' answers
// at it.
func (p *pair) requireCompaction(t *testing.T, ctx context.Context, who string, servers ...*harness.Server) {
	t.Helper()
	const limit = 2
	api := servers[0].API()
	for i := range 3 * limit {
		r, err := api.Do(ctx, http.MethodPost, defaultMaps, "", configMap(fmt.Sprintf("compacted-%d", i)))
		harness.Check(t, err)
		if r.Code != http.StatusCreated && r.Code != http.StatusConflict {
			t.Fatal(r.Err())
		}
	}
	tokens := make([]string, len(servers))
	version := ""
	for i, s := range servers {
		page := list(t, ctx, s.API(), defaultMaps, fmt.Sprintf("limit=%d", limit))
		tokens[i], version = page.Metadata.Continue, page.Metadata.ResourceVersion
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// A compactor compacts to the revision of its last turn: without writes there is nothing to
		// compact.
		_, err := api.Patch(ctx, defaultMaps+"/compacted-0", fmt.Sprintf(`{"data":{"revision":"%d"}}`, etcdRevision(t, ctx, p.client)))
		if err != nil {
			return false, err
		}
		_, err = p.client.Get(ctx, "elsewhere", clientv3.WithRev(harness.Revision(t, version)))
		if errors.Is(err, rpctypes.ErrCompacted) {
			return true, nil
		}
		return false, fmt.Errorf("%s: revision %s is not compacted: %v", who, version, err)
	}))
	for i, s := range servers {
		api := s.API()
		awaitCode(t, ctx, api, defaultMaps, exact(version), http.StatusGone)
		for j, token := range tokens { // its own token, and the other server's
			expired := awaitCode(t, ctx, api, defaultMaps, continued(token, limit), http.StatusGone)
			var status metav1.Status
			harness.Check(t, json.Unmarshal(expired.Body, &status))
			if status.Reason != metav1.StatusReasonExpired || status.Continue == "" {
				t.Errorf("%s: server %d answers the expired token of server %d with %s", who, i, j, expired.Body)
				continue
			}
			// Both servers continue after the last name of the expired list, at the current
			// revision.
			for k, s := range servers {
				page, err := s.API().List(ctx, defaultMaps, continued(status.Continue, limit))
				if err != nil || len(page.Items) != limit || page.Items[0].Metadata.Name != fmt.Sprintf("compacted-%d", limit) {
					t.Errorf("%s: server %d continues the token of server %d: %+v, %v", who, k, i, page, err)
				}
			}
		}
	}
}

// requireTurns reads all writes of compactKey between begin and now. Each is a transaction on the
// previous version, so that two compactors never take the same turn, and no revision is compacted
// before it was written.
func requireTurns(t *testing.T, ctx context.Context, client *clientv3.Client, begin *clientv3.GetResponse, turns clientv3.WatchChan) {
	t.Helper()
	const atLeast = 5
	last := etcdRevision(t, ctx, client)
	version, compacted := int64(0), int64(-1)
	for _, kv := range begin.Kvs {
		version = kv.Version
	}
	first := version
	harness.Check(t, client.RequestProgress(ctx))
	for {
		var resp clientv3.WatchResponse
		select {
		case resp = <-turns:
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
		harness.Check(t, resp.Err())
		for _, e := range resp.Events {
			to, err := strconv.ParseInt(string(e.Kv.Value), 10, 64)
			if e.Type != clientv3.EventTypePut || e.Kv.Version != version+1 || err != nil || to < compacted || to > e.Kv.ModRevision {
				t.Errorf("turn %d, to revision %d, is followed by %s of turn %d at revision %d, to revision %q", version, compacted,
					e.Type, e.Kv.Version, e.Kv.ModRevision, e.Kv.Value)
			}
			version, compacted = e.Kv.Version, to
		}
		if resp.Header.Revision >= last {
			break
		}
	}
	if version < first+atLeast {
		t.Errorf("%d turns of compaction, want at least %d", version-first, atLeast)
	}
}
