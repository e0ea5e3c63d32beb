package contracttest

import (
	"context"
	"errors"
	"fmt"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/etcdsource"
)

// linearizableRevision is E1: a read by another client, after a write was acknowledged, has the
// revision of the write or a later one.
func linearizableRevision(ctx context.Context, s *Store) (Answer, error) {
	key, missing := s.key("revision"), s.key("missing")
	last := int64(0)
	for i := range 50 {
		rev, err := s.put(ctx, key, fmt.Sprint(i), last)
		if err != nil {
			return No, err
		}
		if rev <= last {
			return No, fmt.Errorf("a write has revision %d, the one before it %d", rev, last)
		}
		last = rev
		read, err := revision(ctx, s.Other, missing)
		if err != nil {
			return No, err
		}
		if read < rev {
			return No, fmt.Errorf("a read has revision %d, after a write at %d", read, rev)
		}
	}
	return Yes, nil
}

// keepsMore is the answer to E6 of a store that serves revisions for some time after their
// compaction.
const keepsMore Answer = "later"

// compaction is E6: after a compaction to R, R is readable, an older revision is not, and a watch
// from below is canceled with R.
func compaction(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	key := s.key("compaction")
	first, err := s.put(ctx, key, "old", 0)
	if err != nil {
		return No, err
	}
	second, err := s.put(ctx, key, "new", first)
	if err != nil {
		return No, err
	}
	if _, err := s.Client.Compact(ctx, second, clientv3.WithCompactPhysical()); err != nil {
		return No, fmt.Errorf("compact to %d: %w", second, err)
	}
	resp, err := s.Client.Get(ctx, key, clientv3.WithRev(second))
	if err != nil || len(resp.Kvs) != 1 || string(resp.Kvs[0].Value) != "new" {
		return No, fmt.Errorf("read at the revision of the compaction: %v, %v", resp, err)
	}
	_, err = s.Client.Get(ctx, key, clientv3.WithRev(first))
	if err == nil {
		return keepsMore, nil
	}
	if !errors.Is(err, rpctypes.ErrCompacted) {
		return No, fmt.Errorf("read below the compaction: %w, want %w", err, rpctypes.ErrCompacted)
	}
	watched, err := next(ctx, s.Client.Watch(ctx, key, clientv3.WithRev(first)))
	if watched.CompactRevision != second {
		return No, fmt.Errorf("a watch below the compaction to %d: floor %d, %v", second, watched.CompactRevision, err)
	}
	return Yes, nil
}

// versions is E10: Version counts the writes to a key since its creation, from 1.
func versions(ctx context.Context, s *Store) (Answer, error) {
	key := s.key("versions")
	last, err := int64(0), error(nil)
	var counted []int64
	for range 3 {
		if last, err = s.put(ctx, key, "x", last); err != nil {
			return No, err
		}
		resp, err := s.Client.Get(ctx, key)
		if err != nil || len(resp.Kvs) != 1 {
			return No, fmt.Errorf("read %s: %v, %v", key, resp, err)
		}
		counted = append(counted, resp.Kvs[0].Version)
	}
	if _, err := s.remove(ctx, key, last); err != nil {
		return No, err
	}
	if _, err := s.put(ctx, key, "x", 0); err != nil {
		return No, err
	}
	resp, err := s.Client.Get(ctx, key)
	if err != nil || len(resp.Kvs) != 1 {
		return No, fmt.Errorf("read %s: %v, %v", key, resp, err)
	}
	counted = append(counted, resp.Kvs[0].Version)
	switch got := fmt.Sprint(counted); got {
	case "[1 2 3 1]":
		return Yes, nil
	case "[0 0 0 0]":
		return No, nil
	default:
		return No, fmt.Errorf("the versions of a key that is written three times, deleted and created: %s", got)
	}
}

// keysOnly is E11: a range without values has the keys and their revisions.
func keysOnly(ctx context.Context, s *Store) (Answer, error) {
	dir := s.dir("keysonly")
	keys, revisions, err := s.fill(ctx, dir, 10, "value")
	if err != nil {
		return No, err
	}
	resp, err := s.Client.Get(ctx, dir, clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return No, err
	}
	answer := Yes
	for i, kv := range resp.Kvs {
		if string(kv.Key) != keys[i] || kv.ModRevision != revisions[i] {
			return No, fmt.Errorf("key %d is %s at %d, want %s at %d", i, kv.Key, kv.ModRevision, keys[i], revisions[i])
		}
		if len(kv.Value) > 0 {
			answer = No
		}
	}
	if len(resp.Kvs) != len(keys) {
		return No, fmt.Errorf("%d keys, want %d", len(resp.Kvs), len(keys))
	}
	return answer, nil
}

// clusterID is E12: every response has the same cluster ID, which is not 0.
func clusterID(ctx context.Context, s *Store) (Answer, error) {
	ids := map[uint64]bool{}
	for _, client := range []*clientv3.Client{s.Client, s.Other, s.Client} {
		resp, err := client.Get(ctx, s.key("id"))
		if err != nil {
			return No, err
		}
		ids[resp.Header.ClusterId] = true
	}
	switch {
	case len(ids) != 1:
		return No, fmt.Errorf("responses have the cluster IDs %v", ids)
	case ids[0]:
		return No, nil
	}
	return Yes, nil
}

// compareAndPut is E13: the transaction of the compactor's protocol, on its key. Of two writers
// that have seen one version, one succeeds, and the other one gets the key.
func compareAndPut(ctx context.Context, s *Store) (Answer, error) {
	turn := func(client *clientv3.Client, version int64) (*clientv3.TxnResponse, error) {
		return client.Txn(ctx).If(clientv3.Compare(clientv3.Version(etcdsource.CompactionKey), "=", version)).
			Then(clientv3.OpPut(etcdsource.CompactionKey, "1")).Else(clientv3.OpGet(etcdsource.CompactionKey)).Commit()
	}
	start, err := turn(s.Client, 0)
	if err != nil {
		if _, err := revision(ctx, s.Client, s.key("answers")); err != nil {
			return No, err
		}
		return No, nil
	}
	version := int64(1)
	if !start.Succeeded {
		if version, err = versionIn(start); err != nil {
			return No, err
		}
	}
	for range 3 {
		first, err := turn(s.Client, version)
		if err != nil {
			return No, err
		}
		second, err := turn(s.Other, version)
		if err != nil {
			return No, err
		}
		if !first.Succeeded || second.Succeeded {
			return No, fmt.Errorf("two writers that have seen version %d: %t and %t", version, first.Succeeded, second.Succeeded)
		}
		got, err := versionIn(second)
		if err != nil || got != version+1 {
			return No, fmt.Errorf("the second writer got version %d, %v; want %d", got, err, version+1)
		}
		version = got
	}
	return Yes, nil
}

// versionIn returns the version of the one key that the Else part of a transaction has read.
func versionIn(resp *clientv3.TxnResponse) (int64, error) {
	if len(resp.Responses) != 1 || len(resp.Responses[0].GetResponseRange().GetKvs()) != 1 {
		return 0, fmt.Errorf("a failed comparison returns %v, want one key", resp.Responses)
	}
	return resp.Responses[0].GetResponseRange().GetKvs()[0].Version, nil
}

// pages is E14: the pages of a range at one revision are of that revision, also if keys are
// written, created and deleted meanwhile.
func pages(ctx context.Context, s *Store) (Answer, error) {
	dir := s.dir("pages")
	const n, limit = 30, 7
	keys, revisions, err := s.fill(ctx, dir, n, "before")
	if err != nil {
		return No, err
	}
	at := revisions[n-1]
	from, got := dir, 0
	for {
		resp, err := s.Client.Get(ctx, from, clientv3.WithRange(clientv3.GetPrefixRangeEnd(dir)), clientv3.WithRev(at), clientv3.WithLimit(limit))
		if err != nil {
			return No, fmt.Errorf("read a page at revision %d: %w", at, err)
		}
		for _, kv := range resp.Kvs {
			if got >= n || string(kv.Key) != keys[got] || string(kv.Value) != "before" || kv.ModRevision != revisions[got] {
				return No, fmt.Errorf("object %d of the pages is %s=%s at revision %d", got, kv.Key, kv.Value, kv.ModRevision)
			}
			got++
		}
		if !resp.More {
			break
		}
		from = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
		if got+1 < n { // write, delete and create behind the page
			if _, err := s.put(ctx, keys[got], "after", revisions[got]); err != nil {
				return No, err
			}
			if _, err := s.remove(ctx, keys[got+1], revisions[got+1]); err != nil {
				return No, err
			}
			if _, err := s.put(ctx, keys[got]+"-new", "after", 0); err != nil {
				return No, err
			}
		}
	}
	if got != n {
		return No, fmt.Errorf("the pages have %d objects, want %d", got, n)
	}
	return Yes, nil
}

// rangeStream is E15: the store implements RangeStream.
func rangeStream(ctx context.Context, s *Store) (Answer, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dir := s.dir("stream")
	const n = 10
	if _, _, err := s.fill(ctx, dir, n, "x"); err != nil {
		return No, err
	}
	parts, err := s.Client.GetStream(ctx, dir, clientv3.WithPrefix())
	if err != nil {
		return No, err
	}
	got := 0
	for part := range parts {
		if err := part.Err(); status.Code(err) == codes.Unimplemented {
			return No, nil
		} else if err != nil {
			return No, err
		}
		got += len(part.Kvs)
	}
	if got != n {
		return No, fmt.Errorf("the stream has %d keys, want %d", got, n)
	}
	return Yes, nil
}

// manyKeys is E16: a transaction reads several keys at one old revision.
func manyKeys(ctx context.Context, s *Store) (Answer, error) {
	dir := s.dir("many")
	keys, revisions, err := s.fill(ctx, dir, 5, "before")
	if err != nil {
		return No, err
	}
	at := revisions[len(revisions)-1]
	if _, err := s.put(ctx, keys[0], "after", revisions[0]); err != nil {
		return No, err
	}
	var ops []clientv3.Op
	for _, key := range keys {
		ops = append(ops, clientv3.OpGet(key, clientv3.WithRev(at)))
	}
	resp, err := s.Client.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		if _, err := s.Client.Get(ctx, keys[0], clientv3.WithRev(at)); err != nil {
			return No, err
		}
		return oneKey, nil
	}
	for i, r := range resp.Responses {
		kvs := r.Response.(*pb.ResponseOp_ResponseRange).ResponseRange.Kvs
		if len(kvs) != 1 || string(kvs[0].Value) != "before" || kvs[0].ModRevision != revisions[i] {
			return No, fmt.Errorf("%s at revision %d: %v", keys[i], at, kvs)
		}
	}
	return Yes, nil
}
