package enginetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// singleKeys is an etcd that accepts no transactions of reads, like kine.
type singleKeys struct{ clientv3.KV }

func (s singleKeys) Txn(ctx context.Context) clientv3.Txn { return refusedTxn{s.KV.Txn(ctx)} }

type refusedTxn struct{ clientv3.Txn }

func (t refusedTxn) Then(...clientv3.Op) clientv3.Txn { return t }

func (refusedTxn) Commit() (*clientv3.TxnResponse, error) {
	return nil, status.Error(codes.Unimplemented, "unsupported transaction")
}

// TestGetAll_AtRevision_ReturnsExistingKeys: the keys that exist at a revision are returned as of
// it, in the order of the request, also by a store that answers for single keys only.
func TestGetAll_AtRevision_ReturnsExistingKeys(t *testing.T) {
	client, prefix := open(t)
	const n = 300 // several requests
	var keys, want []string
	var rev mirror.Revision
	for i := range n {
		key := fmt.Sprintf("%s%03d", prefix, (i*7)%n)
		keys = append(keys, key)
		if i%3 != 0 {
			rev = put(t, client, key, fmt.Sprint("old", i))
			want = append(want, fmt.Sprintf("%s=old%d", key, i))
		}
	}
	for _, key := range keys {
		put(t, client, key, "new")
	}
	single := clientv3.NewCtxClient(contextFor(t))
	single.KV = singleKeys{client.KV}
	for name, client := range map[string]*clientv3.Client{"transactions": client, "single keys": single} {
		s := etcdsource.New(client, "feed", prefix+"probe")
		var got []string
		err := s.GetAll(contextFor(t), keys, rev, func(kv driver.KV) error {
			got = append(got, fmt.Sprintf("%s=%s", kv.Key, kv.Value))
			return nil
		})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %d keys %.200q, want %d %.200q", name, err, len(got), got, len(want), want)
		}
		mine := errors.New("mine")
		if err := s.GetAll(contextFor(t), keys, rev, func(driver.KV) error { return mine }); !errors.Is(err, mine) {
			t.Errorf("%s: %v, want the callback's error", name, err)
		}
		if err := s.GetAll(contextFor(t), keys, rev+1<<40, func(driver.KV) error { return nil }); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("%s: %v, want ErrRestored", name, err)
		}
	}
}

// TestGetAll_CompactedRevision_ReturnsErrCompacted runs on an etcd of its own.
func TestGetAll_CompactedRevision_ReturnsErrCompacted(t *testing.T) {
	client := startEtcds(t, 1)[0].client
	rev := put(t, client, "/a", "1")
	compacted := put(t, client, "/a", "2")
	if _, err := client.Compact(contextFor(t), compacted); err != nil {
		t.Fatal(err)
	}
	s := etcdsource.New(client, "feed", "/probe")
	for _, keys := range [][]string{{"/a"}, {"/a", "/b"}} {
		if err := s.GetAll(contextFor(t), keys, rev, func(driver.KV) error { return nil }); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("%d keys: %v, want ErrCompacted", len(keys), err)
		}
	}
}
