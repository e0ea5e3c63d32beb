package robustness

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/client"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"go.uber.org/zap"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	mirrored = "/registry/"
	prefix   = mirrored + "pods/" // of the resource that is read
	writers  = 6
	readers  = 4
	watchers = 6

	// compactEvery and compactBehind are revisions: how often etcd and the mirror are compacted,
	// and how far behind the newest.
	compactEvery, compactBehind = 500, 300
	// interruptEvery is the number of batches after which the mirror loses its feed.
	interruptEvery = 2000
	// runTimeout bounds the traffic of one run.
	runTimeout = 10 * time.Minute
)

// keys are all keys that are written: few, because the model's state is copied with each operation.
// Keys of the last two kinds are in no claimed resource, and outside of the mirror; the mirror
// follows their revisions.
var keys = func() (keys []string) {
	for _, namespace := range []string{"default", "kube-system"} {
		for i := range 6 {
			keys = append(keys, fmt.Sprintf("%s%s/pod-%d", prefix, namespace, i))
		}
	}
	return append(keys, mirrored+"leases/unclaimed", "outside")
}()

// source is etcdsource with disturbances.
type source struct {
	*etcdsource.Source
	defect *defect
}

var errInterrupted = errors.New("the feed was interrupted on purpose")

// Watch implements driver.Source. It occasionally ends with an error, so that the mirror has to
// resume.
func (s *source) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	batches := 0
	return s.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if batches++; batches > interruptEvery {
			return errInterrupted
		}
		if s.defect != nil && s.defect.feed != nil {
			b = s.defect.feed(b)
		}
		return deliver(b)
	})
}

// run is one etcd with clients that write to it, and a mirror with readers.
type run struct {
	etcd     *etcd
	mirror   *mirror.Mirror
	resource *mirror.Resource
	byKey    *mirror.WatchIndex
	clients  *client.ClientSet
	base     time.Time

	remaining atomic.Int64  // operations that are still to be made
	stopped   chan struct{} // closed when there are none
	final     atomic.Int64  // the last revision; watches end when they have reached it
	drain     chan struct{} // closed when final is set

	// compacting is held by readers of a revision, and exclusively while etcd is compacted: the
	// model would let a read that began before a compaction, and ended after it, fail.
	compacting sync.RWMutex
	compacted  atomic.Int64

	mu      sync.Mutex
	revs    map[string]int64 // of each key, as its last writer knows it
	reports []report.ClientReport
	counts  counts
}

// history contains all records of a run.
type history struct {
	reports   []report.ClientReport
	persisted []model.EtcdRequest // that etcd wrote to its log
	counts    counts
	writes    int // requests other than range requests
}

// record makes about so many operations and returns their history.
func record(t *testing.T, operations int, d *defect) history {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), runTimeout)
	defer cancel()
	ids := identity.NewIDProvider()
	r := &run{etcd: startEtcd(t), base: time.Now(), stopped: make(chan struct{}), drain: make(chan struct{}), revs: map[string]int64{}}
	r.clients = client.NewSet(ids, r.base)
	r.remaining.Store(int64(operations))

	etcdClient, err := clientv3.New(clientv3.Config{Endpoints: []string{r.etcd.endpoint}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	defer etcdClient.Close()
	if r.mirror, err = mirror.New(mirror.Options{
		Prefix: mirrored,
		Source: &source{Source: etcdsource.New(etcdClient, t.Name(), mirrored+"probe"), defect: d},
		Logger: slog.New(slog.DiscardHandler),
	}); err != nil {
		t.Fatal(err)
	}
	defer r.mirror.Close()
	if r.resource, err = r.mirror.Claim(prefix); err != nil {
		t.Fatal(err)
	}
	defer r.resource.Release()
	if err := r.resource.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	var partition sync.WaitGroup
	defer partition.Wait()
	partitionCtx, end := context.WithCancel(ctx)
	defer end()
	r.byKey = mirror.NewWatchIndex(partitionCtx, r.resource, func(run func()) bool { partition.Go(run); return true },
		func(e *mirror.Event) (before, now string, known bool) { return e.Key(), e.Key(), true }, nil)

	// The validators' model begins with an empty etcd, and requires that a client has seen it.
	first := r.client(t)
	if _, err := first.Get(ctx, keys[0]); err != nil {
		t.Fatal(err)
	}

	r.drive(ctx, t, first, ids, d)
	if t.Failed() {
		t.FailNow()
	}

	h := history{reports: append(r.clients.Reports(), r.reports...), counts: r.counts}
	r.etcd.stop()
	if h.persisted, err = report.PersistedRequests(zap.NewNop(), []string{r.etcd.data}); err != nil {
		t.Fatal(err)
	}
	h.writes = len(h.persisted)
	return h
}

// drive runs all writers, readers and watchers to their end: until the operations were made, and
// the watchers have seen a last write of first, which the validators need.
func (r *run) drive(ctx context.Context, t *testing.T, first *client.RecordingClient, ids identity.Provider, d *defect) {
	t.Helper()
	var traffic, watching sync.WaitGroup
	for range writers {
		c := r.client(t)
		traffic.Go(func() { r.loop(ctx, t, func() error { return r.write(ctx, c, ids) }) })
	}
	compactor := r.client(t)
	traffic.Go(func() { r.compact(ctx, t, compactor) })
	for range readers {
		reader := newReader(r.mirror, r.resource, ids, r.base, d)
		traffic.Go(func() {
			r.loop(ctx, t, func() error { return r.read(ctx, reader) })
			r.keep(reader)
		})
	}
	for range watchers {
		reader := newReader(r.mirror, r.resource, ids, r.base, d)
		watching.Go(func() {
			for r.final.Load() == 0 && ctx.Err() == nil && !t.Failed() {
				if err := r.watch(ctx, reader); err != nil && !retriable(err) {
					t.Errorf("watch: %v", err)
				}
			}
			r.keep(reader)
		})
	}
	traffic.Wait()

	put, err := first.Put(ctx, keys[0], strconv.Itoa(ids.NewRequestID()))
	for disconnected(err) { // each attempt has another value, as the validators require
		put, err = first.Put(ctx, keys[0], strconv.Itoa(ids.NewRequestID()))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := r.mirror.Wait(ctx, put.Header.Revision); err != nil {
		t.Fatal(err)
	}
	r.final.Store(put.Header.Revision)
	close(r.drain)
	watching.Wait()
}

// client returns a client of etcd whose operations are part of the history.
func (r *run) client(t *testing.T) *client.RecordingClient {
	t.Helper()
	c, err := r.clients.NewClient([]string{r.etcd.endpoint})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// loop makes operations until enough of them were made.
func (r *run) loop(ctx context.Context, t *testing.T, operation func() error) {
	for {
		select {
		case <-r.stopped:
			return
		default:
		}
		err := operation()
		switch {
		case err == nil:
			if r.remaining.Add(-1) == 0 {
				close(r.stopped)
			}
		case !retriable(err):
			t.Errorf("after %v: %v (context: %v)", time.Since(r.base), err, ctx.Err())
			return
		}
	}
}

// keep adds the operations that a reader recorded to the history.
func (r *run) keep(reader *reader) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reports = append(r.reports, reader.report())
	r.counts.add(reader.counts)
}

// known returns the revision of the last write to a key, 0 if that deleted it.
func (r *run) known(key string) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.revs[key]
}

// wrote records that keys were written, or deleted, at a revision.
func (r *run) wrote(rev int64, deleted bool, keys ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if deleted {
		rev = 0
	}
	for _, key := range keys {
		r.revs[key] = rev
	}
}

// write makes one write: of a kind that kube-apiserver makes, or a transaction that changes several
// keys.
func (r *run) write(ctx context.Context, c *client.RecordingClient, ids identity.Provider) error {
	value := func() string { return strconv.Itoa(ids.NewRequestID()) }
	chosen := rand.Perm(len(keys))
	key := keys[chosen[0]]
	switch n := rand.IntN(100); {
	case n < 55: // an update, or a creation, of a revision that is known
		resp, err := c.Txn(ctx).
			If(clientv3.Compare(clientv3.ModRevision(key), "=", r.known(key))).
			Then(clientv3.OpPut(key, value())).
			Else(clientv3.OpGet(key)).
			Commit()
		switch {
		case err != nil:
			return err
		case resp.Succeeded:
			r.wrote(resp.Header.Revision, false, key)
		case len(resp.Responses[0].GetResponseRange().Kvs) > 0:
			r.wrote(resp.Responses[0].GetResponseRange().Kvs[0].ModRevision, false, key)
		default:
			r.wrote(0, true, key)
		}
	case n < 65:
		resp, err := c.Put(ctx, key, value())
		if err != nil {
			return err
		}
		r.wrote(resp.Header.Revision, false, key)
	case n < 80:
		if _, err := c.Delete(ctx, key); err != nil {
			return err
		}
		r.wrote(0, true, key)
	case n < 95: // several keys in one revision
		second, third := keys[chosen[1]], keys[chosen[2]]
		resp, err := c.Txn(ctx).Then(clientv3.OpPut(key, value()), clientv3.OpDelete(second), clientv3.OpPut(third, value())).Commit()
		if err != nil {
			return err
		}
		r.wrote(resp.Header.Revision, false, key, third)
		r.wrote(0, true, second)
	default: // a lease ends, and its keys with it, in one revision
		lease, err := c.LeaseGrant(ctx, int64(runTimeout.Seconds()))
		if err != nil {
			return err
		}
		leased := chosen[:1+rand.IntN(3)]
		for _, i := range leased {
			resp, err := c.PutWithLease(ctx, keys[i], value(), int64(lease.ID))
			if err != nil {
				return err
			}
			r.wrote(resp.Header.Revision, false, keys[i])
		}
		if _, err := c.LeaseRevoke(ctx, int64(lease.ID)); err != nil {
			return err
		}
		for _, i := range leased {
			r.wrote(0, true, keys[i])
		}
	}
	return nil
}

// compact compacts etcd, and then the mirror, whenever compactEvery revisions were written.
func (r *run) compact(ctx context.Context, t *testing.T, c *client.RecordingClient) {
	for next := mirror.Revision(compactEvery); ; next += compactEvery {
		waitCtx, cancel := context.WithCancel(ctx)
		end := context.AfterFunc(ctx, cancel)
		go func() {
			select {
			case <-r.stopped:
				cancel()
			case <-waitCtx.Done():
			}
		}()
		err := r.mirror.Wait(waitCtx, next)
		end()
		cancel()
		select {
		case <-r.stopped:
			return
		default:
		}
		if err != nil {
			t.Errorf("wait for revision %d: %v", next, err)
			return
		}
		r.compacting.Lock()
		rev := next - compactBehind
		_, err = c.Compact(ctx, rev)
		for disconnected(err) {
			if _, err = c.Compact(ctx, rev); errors.Is(err, rpctypes.ErrCompacted) {
				err = nil // by the request before
			}
		}
		if err != nil {
			t.Errorf("compact to %d: %v", rev, err)
		}
		r.compacted.Store(rev)
		r.mirror.Compact(rev)
		r.compacting.Unlock()
	}
}

// ranges are the key ranges that readers read and watch.
var ranges = []struct{ start, end string }{
	{prefix, clientv3.GetPrefixRangeEnd(prefix)},
	{prefix + "default/", clientv3.GetPrefixRangeEnd(prefix + "default/")},
	{prefix + "kube-system/", clientv3.GetPrefixRangeEnd(prefix + "kube-system/")},
	{keys[0], ""},
	{keys[7], ""},
}

// read makes one read: two of three of the latest state, the others at a revision.
func (r *run) read(ctx context.Context, reader *reader) error {
	of := ranges[rand.IntN(len(ranges))]
	limit := 0
	if of.end != "" && rand.IntN(3) == 0 {
		limit = 1 + rand.IntN(5)
	}
	if rand.IntN(3) > 0 {
		return reader.read(ctx, of.start, of.end, 0, limit)
	}
	r.compacting.RLock()
	defer r.compacting.RUnlock()
	latest := r.mirror.PublishedRevision()
	oldest := max(2, r.compacted.Load())
	if latest < oldest {
		return nil
	}
	err := reader.read(ctx, of.start, of.end, oldest+rand.Int64N(latest-oldest+1), limit)
	if errors.Is(err, mirror.ErrCompacted) {
		reader.counts.refused++
	}
	return err
}

// watch opens a cursor of one of the four kinds, and reads it for a while: at the end of the run,
// until it has reached the last revision.
func (r *run) watch(ctx context.Context, reader *reader) error {
	of := ranges[rand.IntN(len(ranges))]
	end := of.end
	if end == "" {
		end = of.start + "\x00"
	}
	var w *watching
	var err error
	switch rand.IntN(4) {
	case 0: // a snapshot and the events after it
		var snapshot mirror.Snapshot
		if snapshot, err = r.resource.Latest(); err != nil {
			return err
		}
		w, err = reader.watch(of.start, of.end != "", snapshot.Rev, func(after mirror.Revision) (*mirror.Cursor, error) {
			if after != snapshot.Rev {
				return r.resource.CursorAfter(after, of.start, end)
			}
			return snapshot.Cursor(of.start, end), nil
		})
	case 1: // one that follows a value: here, the key
		key := keys[rand.IntN(len(keys)-2)]
		w, err = reader.watch(key, false, r.mirror.PublishedRevision(), func(after mirror.Revision) (*mirror.Cursor, error) {
			c, err := r.resource.CursorAfter(after, prefix, ranges[0].end)
			if err == nil {
				c.FollowIndex(r.byKey, key)
			}
			return c, err
		})
		if err == nil {
			w.only = key
		}
	default: // one that resumes at a revision of the past, or will begin at one of the future
		after := max(1, r.mirror.PublishedRevision()+50-rand.Int64N(400))
		w, err = reader.watch(of.start, of.end != "", after, func(after mirror.Revision) (*mirror.Cursor, error) {
			c, err := r.resource.CursorAfter(after, of.start, end)
			if err == nil && rand.IntN(2) == 0 {
				c.Follow()
			}
			return c, err
		})
		if err == nil {
			reader.counts.resumed++
		}
	}
	if err != nil {
		if errors.Is(err, mirror.ErrCompacted) {
			reader.counts.refused++
		}
		return err
	}
	defer w.close()
	for answers := 20 + rand.IntN(400); ; answers-- {
		final := r.final.Load()
		if final > 0 {
			w.cursor.Await(final)
		}
		changed := w.cursor.Changed()
		if err := w.next(1+rand.IntN(6), rand.IntN(3) == 0); err != nil {
			return err
		}
		switch {
		case final > 0 && w.cursor.Position() >= final, final == 0 && answers <= 0:
			return nil
		case len(w.pending) > 0, w.cursor.Position() < r.mirror.PublishedRevision() && w.cursor.Err() == nil:
			continue // more is due
		}
		drain := r.drain
		if final > 0 {
			drain = nil
		}
		select {
		case <-changed:
		case <-drain:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
