package etcdfeed

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

const root = "/registry/"

// feedOf returns a server that answers from a mirror of the store, in which the resources are
// claimed. It has no client of etcd.
func feedOf(tb testing.TB, store *memory.Store, resources ...string) (*Server, *mirror.Mirror) {
	tb.Helper()
	s := New(Options{Logger: slog.New(slog.DiscardHandler)})
	tap := s.Tap(store, root)
	m, err := mirror.New(mirror.Options{Prefix: root, Source: tap.Source(), Logger: slog.New(slog.DiscardHandler)})
	testcheck.NoError(tb, err)
	tb.Cleanup(m.Close)
	testcheck.NoError(tb, tap.Attach(m, nil))
	for _, prefix := range resources {
		r, err := m.Claim(prefix)
		if err == nil {
			err = r.WaitReady(context.Background())
		}
		if err == nil {
			err = r.WaitHistory(context.Background(), 1)
		}
		testcheck.NoError(tb, err)
	}
	return s, m
}

// claimedPrefixes returns n prefixes of resources.
func claimedPrefixes(n int) (prefixes []string) {
	for i := range n {
		prefixes = append(prefixes, fmt.Sprintf("%sr%03d/", root, i))
	}
	return prefixes
}

// prefixRange is the range of all keys with the prefix.
func prefixRange(prefix string) *pb.RangeRequest {
	return &pb.RangeRequest{Key: []byte(prefix), RangeEnd: []byte(prefix[:len(prefix)-1] + "0")}
}

// TestRange_OfOneResourceInPast_MaterializesThatResource: a page, a key and a transaction of keys
// of one resource at an old revision make no old version of another resource, or of the keys
// without a claim. A range of all keys needs all of them.
func TestRange_OfOneResourceInPast_MaterializesThatResource(t *testing.T) {
	ctx := t.Context()
	store, prefixes := memory.New(), claimedPrefixes(10)
	s, m := feedOf(t, store, prefixes...)
	revs := []mirror.Revision{}
	for i := range 20 {
		for _, prefix := range append(prefixes, root+"unclaimed/") {
			store.Put(prefix+"a", fmt.Sprint(i))
			revs = append(revs, store.Put(prefix+"b", fmt.Sprint(i)))
		}
	}
	testcheck.NoError(t, m.Wait(ctx, store.Revision()))
	request := func(rev mirror.Revision, r *pb.RangeRequest) *pb.RangeRequest {
		r.Revision = rev
		return r
	}
	read := func(r *pb.RangeRequest) (int, error) {
		resp, err := s.Range(ctx, r)
		return len(resp.GetKvs()), err
	}
	for i, tt := range []struct {
		name           string
		read           func(rev mirror.Revision) (keys int, err error)
		keys, versions int
	}{
		{"page", func(rev mirror.Revision) (int, error) { return read(request(rev, prefixRange(prefixes[3]))) }, 2, 1},
		{"page within the resource", func(rev mirror.Revision) (int, error) {
			return read(request(rev, &pb.RangeRequest{Key: []byte(prefixes[3] + "b"), RangeEnd: []byte(prefixes[3] + "c")}))
		}, 1, 1},
		{"key", func(rev mirror.Revision) (int, error) {
			return read(request(rev, &pb.RangeRequest{Key: []byte(prefixes[3] + "b")}))
		}, 1, 1},
		{"transaction", func(rev mirror.Revision) (keys int, err error) {
			txn := &pb.TxnRequest{}
			for _, key := range []string{"b", "a"} {
				r := request(rev, &pb.RangeRequest{Key: []byte(prefixes[3] + key)})
				txn.Success = append(txn.Success, &pb.RequestOp{Request: &pb.RequestOp_RequestRange{RequestRange: r}})
			}
			resp, err := s.Txn(ctx, txn)
			for _, op := range resp.GetResponses() {
				keys += len(op.GetResponseRange().Kvs)
			}
			return keys, err
		}, 2, 1},
		{"two resources", func(rev mirror.Revision) (int, error) {
			return read(request(rev, &pb.RangeRequest{Key: []byte(prefixes[3]), RangeEnd: []byte(prefixes[4] + "b")}))
		}, 3, 3},
		{"all", func(rev mirror.Revision) (int, error) { return read(request(rev, prefixRange(root))) }, 22, 11},
	} {
		before := m.Stats().Versions
		keys, err := tt.read(revs[150-11*i])
		if err != nil || keys != tt.keys {
			t.Errorf("%s: %d keys, %v; want %d", tt.name, keys, err, tt.keys)
		}
		if made := m.Stats().Versions - before; made != tt.versions {
			t.Errorf("%s: %d versions were made, want %d", tt.name, made, tt.versions)
		}
	}
}
