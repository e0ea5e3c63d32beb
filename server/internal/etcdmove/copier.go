package etcdmove

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/progress"
)

const (
	// pageKeys is the number of keys of one read, and keysOnlyPage that of one without values.
	pageKeys, keysOnlyPage = 500, 10_000
	// A transaction has at most etcd's default of 128 operations, and with a value of the largest size it stays below the default of
	// 1.5 MiB for a request.
	txnOps, txnBytes = 100, 512 << 10
	// compactedRestarts is how many times a scan may start again because its revision was compacted meanwhile.
	compactedRestarts = 3
	// leaseAttempts bounds the transactions whose leases expire before etcd applies them. A new lease lasts for a second at least.
	leaseAttempts = 10
)

// copier makes the keys of a resource in target equal to those in source. It is used by one goroutine.
type copier struct {
	source   *clientv3.Client
	target   end
	prefixes []string // absolute
	shown    *progress.Steps

	copied map[string]version // of source, by key
	stale  map[string]bool    // keys of target from an earlier copy that source may not have
	leases map[int64]clientv3.LeaseID
}

// version is a state of a key of source that target has.
type version struct {
	revision int64
	leased   bool
}

// changes counts the keys of a pass. An expired key is one that had a lease and is gone.
type changes struct{ written, deleted, expired int }

func (c changes) none() bool { return c.written == 0 && c.deleted == 0 }

// scan calls f for the keys below the prefixes at one revision of client, which it returns. On an error of compaction the
// caller may start again.
func scan(ctx context.Context, client *clientv3.Client, prefixes []string, page int64, f func([]*mvccpb.KeyValue) error, opts ...clientv3.OpOption) (revision int64, err error) {
	for _, prefix := range prefixes {
		key, end := prefix, clientv3.GetPrefixRangeEnd(prefix)
		for {
			all := append([]clientv3.OpOption{clientv3.WithRange(end), clientv3.WithLimit(page), clientv3.WithRev(revision)}, opts...)
			r, err := client.Get(ctx, key, all...)
			if err != nil {
				return 0, err
			}
			if revision == 0 {
				revision = r.Header.Revision
			}
			if err := f(r.Kvs); err != nil {
				return 0, err
			}
			if !r.More {
				break
			}
			key = string(r.Kvs[len(r.Kvs)-1].Key) + "\x00"
		}
	}
	return revision, nil
}

// first copies all keys.
func (c *copier) first(ctx context.Context) error {
	c.copied, c.stale, c.leases = map[string]version{}, map[string]bool{}, map[int64]clientv3.LeaseID{}
	if _, err := scan(ctx, c.target.Client, c.prefixes, keysOnlyPage, func(kvs []*mvccpb.KeyValue) error {
		for _, kv := range kvs {
			c.stale[string(kv.Key)] = true
		}
		return nil
	}, clientv3.WithKeysOnly()); err != nil {
		return err
	}
	_, err := scan(ctx, c.source, c.prefixes, pageKeys, func(kvs []*mvccpb.KeyValue) error { return c.write(ctx, kvs) })
	return err
}

// pass copies the changes since the earlier passes, and deletes the keys that source does not have.
func (c *copier) pass(ctx context.Context) (done changes, err error) {
	var changed []string
	present := make(map[string]bool, len(c.copied))
	if _, err := scan(ctx, c.source, c.prefixes, keysOnlyPage, func(kvs []*mvccpb.KeyValue) error {
		for _, kv := range kvs {
			key := string(kv.Key)
			present[key] = true
			if c.copied[key].revision != kv.ModRevision {
				changed = append(changed, key)
			}
		}
		return nil
	}, clientv3.WithKeysOnly()); err != nil {
		return done, err
	}
	for len(changed) > 0 {
		n := min(len(changed), txnOps)
		kvs, err := c.read(ctx, changed[:n])
		if err != nil {
			return done, err
		}
		if err := c.write(ctx, kvs); err != nil {
			return done, err
		}
		done.written += len(kvs)
		changed = changed[n:]
	}
	var gone []string
	for key, v := range c.copied {
		if !present[key] {
			gone = append(gone, key)
			if v.leased {
				done.expired++
			} else {
				done.deleted++
			}
		}
	}
	for key := range c.stale {
		if _, ok := c.copied[key]; !ok && !present[key] {
			gone = append(gone, key)
		}
	}
	return done, c.remove(ctx, gone)
}

// read returns the keys that still exist in source.
func (c *copier) read(ctx context.Context, keys []string) (kvs []*mvccpb.KeyValue, err error) {
	var ops []clientv3.Op
	for _, key := range keys {
		ops = append(ops, clientv3.OpGet(key))
	}
	r, err := c.source.Txn(ctx).Then(ops...).Commit()
	if err != nil {
		return nil, err
	}
	for _, response := range r.Responses {
		kvs = append(kvs, response.GetResponseRange().Kvs...)
	}
	return kvs, nil
}

// write writes keys to target, with leases of the same remaining time.
func (c *copier) write(ctx context.Context, kvs []*mvccpb.KeyValue) error {
	for len(kvs) > 0 {
		n, size := 0, 0
		for n < min(len(kvs), txnOps) {
			size += len(kvs[n].Key) + len(kvs[n].Value)
			if n > 0 && size > txnBytes {
				break
			}
			n++
		}
		if err := c.writeOnce(ctx, kvs[:n]); err != nil {
			return fmt.Errorf("write %d keys: %w", n, err)
		}
		kvs = kvs[n:]
	}
	return nil
}

// writeOnce writes keys to target in one transaction. Many keys share a lease, which may expire between its grant and the transaction:
// etcd then rejects all of them, and the leases are granted again, except for those that have expired in source, too.
func (c *copier) writeOnce(ctx context.Context, kvs []*mvccpb.KeyValue) (err error) {
	for range leaseAttempts {
		var ops []clientv3.Op
		var written []*mvccpb.KeyValue
		for _, kv := range kvs {
			var opts []clientv3.OpOption
			if kv.Lease != 0 {
				lease, err := c.lease(ctx, kv.Lease)
				if err != nil {
					return err
				}
				if lease == 0 {
					continue // it has expired, and its keys are about to be deleted
				}
				opts = append(opts, clientv3.WithLease(lease))
			}
			ops, written = append(ops, clientv3.OpPut(string(kv.Key), string(kv.Value), opts...)), append(written, kv)
		}
		if len(ops) == 0 {
			return nil
		}
		if err = c.target.write(ctx, ops...); errors.Is(err, rpctypes.ErrLeaseNotFound) {
			clear(c.leases)
			continue
		}
		if err != nil {
			return err
		}
		for _, kv := range written {
			c.copied[string(kv.Key)] = version{kv.ModRevision, kv.Lease != 0}
			delete(c.stale, string(kv.Key))
		}
		c.shown.Add(len(written))
		return nil
	}
	return err
}

// lease returns the lease of target with the remaining time of a lease of source, and a second more, so that keys do not expire in target
// before they do in source; 0 if it has expired.
func (c *copier) lease(ctx context.Context, source int64) (clientv3.LeaseID, error) {
	if id, ok := c.leases[source]; ok {
		return id, nil
	}
	left, err := c.source.TimeToLive(ctx, clientv3.LeaseID(source))
	if err != nil {
		return 0, fmt.Errorf("remaining time of a lease: %w", err)
	}
	if left.TTL < 0 {
		return 0, nil
	}
	granted, err := c.target.Grant(ctx, left.TTL+1)
	if err != nil {
		return 0, fmt.Errorf("grant a lease: %w", err)
	}
	c.leases[source] = granted.ID
	return granted.ID, nil
}

// remove deletes keys from target.
func (c *copier) remove(ctx context.Context, keys []string) error {
	for len(keys) > 0 {
		var ops []clientv3.Op
		n := min(len(keys), txnOps)
		for _, key := range keys[:n] {
			ops = append(ops, clientv3.OpDelete(key))
		}
		if err := c.target.write(ctx, ops...); err != nil {
			return fmt.Errorf("delete %d keys: %w", n, err)
		}
		for _, key := range keys[:n] {
			delete(c.copied, key)
			delete(c.stale, key)
		}
		keys = keys[n:]
	}
	return nil
}

// digest is the content of the keys of a resource.
type digest struct {
	keys, bytes int64
	sum         string // SHA-256 of all keys and values, in hexadecimal
	revision    int64  // at which it was read
}

func (d digest) same(other digest) bool { return d.keys == other.keys && d.sum == other.sum }

// hash reads the keys below the prefixes at one revision.
func hash(ctx context.Context, client *clientv3.Client, prefixes []string, shown *progress.Steps) (d digest, err error) {
	h := sha256.New()
	var length [8]byte
	put := func(data []byte) {
		binary.BigEndian.PutUint64(length[:], uint64(len(data)))
		h.Write(length[:])
		h.Write(data)
	}
	d.revision, err = scan(ctx, client, prefixes, pageKeys, func(kvs []*mvccpb.KeyValue) error {
		for _, kv := range kvs {
			put(kv.Key)
			put(kv.Value)
			d.keys++
			d.bytes += int64(len(kv.Value))
		}
		shown.Add(len(kvs))
		return nil
	})
	d.sum = hex.EncodeToString(h.Sum(nil))
	return d, err
}
