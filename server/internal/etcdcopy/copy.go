package etcdcopy

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"iter"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/internal/statusline"
)

const (
	// identityRenewal is longer than the time between two renewals of an API server's identity
	// lease: 10 s, and 4 % at most.
	identityRenewal = 12 * time.Second
	// pageKeys is the number of keys of one read.
	pageKeys = 500
	// A transaction has at most etcd's default of 128 operations, and with a value of the largest
	// size it stays below the default of 1.5 MiB for a request.
	txnOps, txnBytes = 100, 512 << 10
	// leaseAttempts bounds the transactions whose leases expire before etcd applies them.
	leaseAttempts = 10
	// raiseWriters is the number of empty writes in flight: etcd commits those that wait for one
	// fsync together.
	raiseWriters = 256
	// compactEvery is the number of empty writes after which they are compacted, so that the
	// database stays small.
	compactEvery = 100_000
)

// end is one of the two etcds.
type end struct {
	*clientv3.Client
	servers []string
}

func (e end) String() string { return strings.Join(e.servers, ",") }

// copier copies one resource. It is used once, by one goroutine.
type copier struct {
	source, target end
	prefix         string // of all keys, with slashes at both ends
	resource       resource
	quiet          time.Duration // without a write before the copy begins
	out            io.Writer
	shown          *statusline.Steps

	leases map[int64]clientv3.LeaseID // of target, by that of source; 0 if it has expired
}

func (c *copier) say(format string, args ...any) { fmt.Fprintf(c.out, format+"\n", args...) }

// survey counts the keys of the resource, and returns the revision of an etcd.
func (c *copier) survey(ctx context.Context, e end) (keys, revision int64, err error) {
	for _, prefix := range c.prefixes() {
		r, err := e.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			return 0, 0, fmt.Errorf("etcd at %s: %w", e, err)
		}
		keys, revision = keys+r.Count, r.Header.Revision
	}
	return keys, revision, nil
}

func (c *copier) prefixes() (all []string) {
	for _, p := range c.resource.paths {
		all = append(all, c.prefix+p)
	}
	return all
}

// run copies the resource; with dry it prints the numbers only. After an error the source is
// unchanged, and the copy in target may be incomplete.
func (c *copier) run(ctx context.Context, replace, dry bool) error {
	keys, at, err := c.survey(ctx, c.source)
	if err != nil {
		return err
	}
	old, revision, err := c.survey(ctx, c.target)
	switch {
	case err != nil:
		return err
	case keys == 0:
		return fmt.Errorf("%s has no keys of %s below %s; check the name, --from and --etcd-prefix (a resource without objects needs no copy)",
			c.source, c.resource.name, strings.Join(c.prefixes(), " and "))
	case old > 0 && !replace:
		return fmt.Errorf("%s already has %d keys of %s; nothing was copied. If they are an old copy, delete them with --replace",
			c.target, old, c.resource.name)
	}
	c.say("%s: %d keys in %s (revision %d) to %s (revision %d)", c.resource.name, keys, c.source, at, c.target, revision)
	if old > 0 {
		c.say("%d keys in %s will be deleted first (--replace)", old, c.target)
	}
	if at > revision {
		c.say("%d empty writes will raise the revision of %s to that of %s", at-revision, c.target, c.source)
	}
	if dry {
		c.say("nothing was changed (--dry-run)")
		return nil
	}
	if err := c.awaitQuiet(ctx); err != nil {
		return err
	}
	if err := c.different(ctx); err != nil {
		return err
	}
	if err := c.copy(ctx); err != nil {
		return fmt.Errorf("copy %s: %w; %s is unchanged, and the command can be run again with --replace", c.resource.name, err, c.source)
	}
	return nil
}

// awaitQuiet returns when neither etcd had a write for c.quiet. Keys may expire. Error: a key
// below the prefix was written, so that an API server runs.
func (c *copier) awaitQuiet(ctx context.Context) error {
	c.shown.Next("watching both etcds for writes, for %s", c.quiet)
	quiet, cancel := context.WithTimeout(ctx, c.quiet)
	defer cancel()
	group, quiet := errgroup.WithContext(quiet)
	for _, e := range []end{c.source, c.target} {
		group.Go(func() error {
			for r := range e.Watch(clientv3.WithRequireLeader(quiet), c.prefix, clientv3.WithPrefix(), clientv3.WithFilterDelete()) {
				if err := r.Err(); err != nil && quiet.Err() == nil {
					return fmt.Errorf("watch %s: %w", e, err)
				}
				if len(r.Events) > 0 {
					return c.written(e, r.Events[0].Kv)
				}
			}
			return nil
		})
	}
	return cmp.Or(group.Wait(), ctx.Err())
}

// written is the error of a key that another program has written.
func (c *copier) written(e end, kv *mvccpb.KeyValue) error {
	if name, ok := strings.CutPrefix(string(kv.Key), c.prefix+"leases/kube-system/apiserver-"); ok {
		return fmt.Errorf("an API server uses %s: it has renewed its identity lease apiserver-%s; stop all API servers", e, name)
	}
	return fmt.Errorf("%s is in use: %s was written; stop all API servers, and all other programs that write to it", e, kv.Key)
}

// key is a key of target that the copy writes and deletes.
func (c *copier) key() string { return c.prefix + "strata/copy" }

// different returns an error if source and target are the same etcd: a key of one is in the other.
// Identities of clusters and members are no proof, since etcd derives them from URLs of peers.
func (c *copier) different(ctx context.Context) error {
	if _, err := c.target.Put(ctx, c.key(), ""); err != nil {
		return err
	}
	r, err := c.source.Get(ctx, c.key(), clientv3.WithCountOnly())
	if err != nil {
		return err
	}
	if _, err := c.target.Delete(ctx, c.key()); err != nil || r.Count == 0 {
		return err
	}
	return fmt.Errorf("%s and %s are the same etcd; name another one with --to", c.source, c.target)
}

// copy raises the revision of target, copies the keys, and compares both copies.
func (c *copier) copy(ctx context.Context) error {
	began := time.Now()
	for _, prefix := range c.prefixes() {
		if _, err := c.target.Delete(ctx, prefix, clientv3.WithPrefix()); err != nil {
			return err
		}
	}
	_, at, err := c.survey(ctx, c.source)
	if err != nil {
		return err
	}
	if err := c.raise(ctx, at); err != nil {
		return fmt.Errorf("raise the revision of %s: %w", c.target, err)
	}
	c.shown.Next("copying %s", c.resource.name)
	c.leases = map[int64]clientv3.LeaseID{}
	var batch []*mvccpb.KeyValue
	size := 0
	for kv, err := range scan(ctx, c.source, c.prefixes(), at) {
		if err != nil {
			return err
		}
		if n := len(kv.Key) + len(kv.Value); len(batch) == txnOps || len(batch) > 0 && size+n > txnBytes {
			if err := c.write(ctx, batch); err != nil {
				return err
			}
			batch, size = batch[:0], 0
		}
		batch, size = append(batch, kv), size+len(kv.Key)+len(kv.Value)
	}
	if err := c.write(ctx, batch); err != nil {
		return err
	}
	same, err := c.compare(ctx, at)
	if err != nil {
		return err
	}
	if err := c.unchanged(ctx, at); err != nil {
		return err
	}
	_, last, err := c.survey(ctx, c.target)
	if err != nil {
		return err
	}
	// so that clients with a revision of source list
	if _, err := c.target.Compact(ctx, last); err != nil {
		return fmt.Errorf("compact %s: %w", c.target, err)
	}
	c.shown.Stop()
	c.say("copied %d keys, %d bytes, in %s; SHA-256 %s on both sides", same.keys, same.bytes, time.Since(began).Round(100*time.Millisecond), same.sum)
	if same.expired > 0 {
		c.say("%d keys have expired meanwhile", same.expired)
	}
	override := fmt.Sprintf("--etcd-servers-overrides=%s#%s", c.resource.override(), strings.Join(c.target.servers, ";"))
	c.say("Start all API servers with\n\n  %s\n\nin addition to their other overrides. The old keys remain in %s.", override, c.source)
	return nil
}

// scan returns the keys below the prefixes at a revision, 0 for the newest of the first read.
func scan(ctx context.Context, client end, prefixes []string, revision int64) iter.Seq2[*mvccpb.KeyValue, error] {
	return func(yield func(*mvccpb.KeyValue, error) bool) {
		for _, prefix := range prefixes {
			key, after := prefix, clientv3.GetPrefixRangeEnd(prefix)
			for more := true; more; {
				r, err := client.Get(ctx, key, clientv3.WithRange(after), clientv3.WithLimit(pageKeys), clientv3.WithRev(revision))
				if err != nil {
					yield(nil, fmt.Errorf("read %s: %w", client, err))
					return
				}
				if revision == 0 {
					revision = r.Header.Revision
				}
				for _, kv := range r.Kvs {
					if !yield(kv, nil) {
						return
					}
					key = string(kv.Key) + "\x00"
				}
				more = r.More
			}
		}
	}
}

// write writes keys to target in one transaction, with leases of the same remaining time. Many keys
// share a lease, which may expire between its grant and the transaction: etcd then rejects all of
// them, and the leases are granted again, except for those that have expired in source, too.
func (c *copier) write(ctx context.Context, kvs []*mvccpb.KeyValue) (err error) {
	for range leaseAttempts {
		var ops []clientv3.Op
		for _, kv := range kvs {
			var opts []clientv3.OpOption
			if kv.Lease != 0 {
				lease, err := c.lease(ctx, kv.Lease)
				if err != nil {
					return err
				}
				if lease == 0 {
					continue // its keys are about to be deleted in source
				}
				opts = append(opts, clientv3.WithLease(lease))
			}
			ops = append(ops, clientv3.OpPut(string(kv.Key), string(kv.Value), opts...))
		}
		if len(ops) == 0 {
			return nil
		}
		if _, err = c.target.Txn(ctx).Then(ops...).Commit(); !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			c.shown.Add(len(kvs))
			return err
		}
		clear(c.leases)
	}
	return err
}

// lease returns the lease of target with the remaining time of a lease of source, and a second
// more, so that keys do not expire in target before they do in source; 0 if it has expired.
func (c *copier) lease(ctx context.Context, source int64) (clientv3.LeaseID, error) {
	if id, ok := c.leases[source]; ok {
		return id, nil
	}
	left, err := c.source.TimeToLive(ctx, clientv3.LeaseID(source))
	if err != nil {
		return 0, fmt.Errorf("remaining time of a lease: %w", err)
	}
	if left.TTL < 0 {
		c.leases[source] = 0
		return 0, nil
	}
	granted, err := c.target.Grant(ctx, left.TTL+1)
	if err != nil {
		return 0, fmt.Errorf("grant a lease: %w", err)
	}
	c.leases[source] = granted.ID
	return granted.ID, nil
}

// common are the keys that both etcds have.
type common struct {
	keys, bytes int64
	sum         string // SHA-256 of all keys and values, in hexadecimal
	expired     int64  // keys with a lease that only source has
}

// compare compares the keys of source at a revision with those of target. Keys with a lease may
// have expired in target.
func (c *copier) compare(ctx context.Context, at int64) (same common, err error) {
	c.shown.Next("comparing both copies")
	next, stop := iter.Pull2(scan(ctx, c.target, c.prefixes(), 0))
	defer stop()
	got, err, ok := next()
	h := sha256.New()
	for kv, sourceErr := range scan(ctx, c.source, c.prefixes(), at) {
		switch {
		case sourceErr != nil:
			return same, sourceErr
		case err != nil:
			return same, err
		case ok && bytes.Equal(got.Key, kv.Key) && bytes.Equal(got.Value, kv.Value) && (got.Lease != 0) == (kv.Lease != 0):
			for _, field := range [...][]byte{kv.Key, kv.Value} {
				h.Write(binary.BigEndian.AppendUint64(nil, uint64(len(field))))
				h.Write(field)
			}
			same.keys, same.bytes = same.keys+1, same.bytes+int64(len(kv.Value))
			c.shown.Add(1)
			got, err, ok = next()
		case kv.Lease != 0 && !(ok && bytes.Equal(got.Key, kv.Key)):
			same.expired++
		default:
			return same, fmt.Errorf("the copies differ at %s; check that no other program writes to %s", kv.Key, c.target)
		}
	}
	if ok || err != nil {
		return same, errors.Join(err, fmt.Errorf("%s has more keys than %s; check that no other program writes to it", c.target, c.source))
	}
	same.sum = hex.EncodeToString(h.Sum(nil))
	return same, nil
}

// unchanged returns an error if a key below the prefix was written or deleted in source after a
// revision, except for keys that have expired.
func (c *copier) unchanged(ctx context.Context, at int64) error {
	c.shown.Next("checking that %s was not written", c.source)
	_, now, err := c.survey(ctx, c.source)
	if err != nil || now == at {
		return err
	}
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	defer cancel()
	// The watch is of all keys, so that it has an event at the newest revision.
	for r := range c.source.Watch(ctx, "\x00", clientv3.WithFromKey(), clientv3.WithRev(at+1), clientv3.WithPrevKV()) {
		if err := r.Err(); err != nil {
			return fmt.Errorf("read the changes of %s: %w", c.source, err)
		}
		for _, ev := range r.Events {
			if !strings.HasPrefix(string(ev.Kv.Key), c.prefix) || ev.Type == clientv3.EventTypeDelete && ev.PrevKv != nil && ev.PrevKv.Lease != 0 {
				continue
			}
			return c.written(c.source, ev.Kv)
		}
		if r.Header.Revision >= now {
			return nil
		}
	}
	return context.Cause(ctx)
}

// raise writes to a key of target until its revision is at least goal. Cost is one small write for
// each revision.
func (c *copier) raise(ctx context.Context, goal int64) error {
	_, at, err := c.survey(ctx, c.target)
	if err != nil || at >= goal {
		return err
	}
	c.shown.Next("raising the revision of %s", c.target)
	c.shown.Of(int(goal - at))
	for at < goal {
		next := min(goal, at+compactEvery)
		group, writing := errgroup.WithContext(ctx)
		group.SetLimit(raiseWriters)
		for ; at < next; at++ {
			group.Go(func() error {
				c.shown.Add(1)
				_, err := c.target.Put(writing, c.key(), "")
				return err
			})
		}
		if err := group.Wait(); err != nil {
			return err
		}
		if _, err := c.target.Compact(ctx, at); err != nil {
			return err
		}
	}
	_, err = c.target.Delete(ctx, c.key())
	return err
}
