package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// pages lists the prefix and returns its pages.
func pages(t *testing.T, s *etcdsource.Source, prefix string, at mirror.Revision) (driver.Header, [][]driver.KV) {
	t.Helper()
	var all [][]driver.KV
	h, err := s.List(contextFor(t), prefix, at, func(kvs []driver.KV) error {
		all = append(all, cloned(kvs))
		return nil
	})
	testcheck.NoError(t, err)
	return h, all
}

// cloned returns a copy of a page, which a source may reuse.
func cloned(page []driver.KV) []driver.KV {
	page = slices.Clone(page)
	for i := range page {
		page[i].Key, page[i].Value = bytes.Clone(page[i].Key), bytes.Clone(page[i].Value)
	}
	return page
}

func size(kvs []driver.KV) (bytes int) {
	for _, kv := range kvs {
		bytes += len(kv.Key) + len(kv.Value)
	}
	return bytes
}

// requireKeys fails the test unless the pages contain the keys prefix00000.. in order, each once.
func requireKeys(t *testing.T, all [][]driver.KV, prefix string, n int, value string) {
	t.Helper()
	i := 0
	for _, p := range all {
		for _, kv := range p {
			if want := fmt.Sprintf("%s%05d", prefix, i); string(kv.Key) != want || string(kv.Value) != value {
				t.Fatalf("entry %d is %s with %d bytes, want %s with %d", i, kv.Key, len(kv.Value), want, len(value))
			}
			if kv.Version != 1 || kv.CreateRevision == 0 || kv.ModRevision != kv.CreateRevision {
				t.Fatalf("%s: version %d, created %d, modified %d", kv.Key, kv.Version, kv.CreateRevision, kv.ModRevision)
			}
			i++
		}
	}
	if i != n {
		t.Fatalf("%d keys, want %d", i, n)
	}
}

// TestListPages_SmallValues_Grow: few pages are used, because etcd counts the rest of the range for
// each page.
func TestListPages_SmallValues_Grow(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe").InPages()
	fill(t, client, prefix, "v", 12_000)
	h, all := pages(t, s, prefix, 0)
	requireKeys(t, all, prefix, 12_000, "v")
	if want := header(t, s); h != want {
		t.Errorf("header %v, want %v", h, want)
	}
	if len(all) > 6 {
		t.Errorf("%d pages", len(all))
	}
}

// TestListPages_LargeValues_AreBounded: the bytes of a page stay near 8 MiB.
func TestListPages_LargeValues_AreBounded(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe").InPages()
	value := strings.Repeat("v", 30_000)
	fill(t, client, prefix, value, 1000)
	_, all := pages(t, s, prefix, 0)
	requireKeys(t, all, prefix, 1000, value)
	for i, p := range all[1:] { // the first page has no size estimate
		if size(p) > 9<<20 {
			t.Errorf("page %d holds %d MiB", i+1, size(p)>>20)
		}
	}
	if len(all) != 3 {
		t.Errorf("%d pages for 30 MB, of which the first holds 15", len(all))
	}
	if _, err := client.Delete(contextFor(t), prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
}

// TestList_MessageTooLarge_IsRetried: after small values, large ones may follow, so that a
// page, or a part of a stream, exceeds the maximum size of a message.
func TestList_MessageTooLarge_IsRetried(t *testing.T) {
	client, prefix := open(t)
	fill(t, client, prefix+"a", "v", 2000)
	value := strings.Repeat("v", 400_000)
	fill(t, client, prefix+"b", value, 12)
	small, err := clientv3.New(clientv3.Config{Endpoints: client.Endpoints(), MaxCallRecvMsgSize: 1 << 20, Logger: client.GetLogger()})
	testcheck.NoError(t, err)
	defer small.Close()
	streamed := etcdsource.New(small, t.Name(), prefix+"probe")
	for _, s := range []*etcdsource.Source{streamed, streamed.InPages()} {
		var keys []string
		if _, err := s.List(contextFor(t), prefix, 0, func(kvs []driver.KV) error {
			for _, kv := range kvs {
				keys = append(keys, string(kv.Key))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		for i, k := range keys[1:] {
			if keys[i] >= k {
				t.Fatalf("%s after %s", k, keys[i])
			}
		}
		if len(keys) != 2012 {
			t.Errorf("%d keys, want 2012", len(keys))
		}
	}
}

// TestList_DuringWrites_IsOfOneRevision: every transaction writes the same number to the first and
// the last key, which lie on different pages.
func TestList_DuringWrites_IsOfOneRevision(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	fill(t, client, prefix+"m", "v", 3000)
	write := func(n int) mirror.Revision {
		resp, err := client.Txn(contextFor(t)).Then(
			clientv3.OpPut(prefix+"a", fmt.Sprint(n)), clientv3.OpPut(prefix+"z", fmt.Sprint(n)),
			clientv3.OpPut(fmt.Sprintf("%sn%d", prefix, n), "v"), // the range grows
		).Commit()
		if err != nil {
			t.Error(err)
			return 0
		}
		return resp.Header.Revision
	}
	first := write(0)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 1; ; n++ {
			select {
			case <-stop:
				return
			default:
				write(n)
			}
		}
	})
	for range 10 {
		h, all := pages(t, s, prefix, 0)
		a, lastPage := all[0][0], all[len(all)-1]
		z := lastPage[len(lastPage)-1]
		if len(all) < 3 {
			t.Fatalf("%d pages; the test has no effect", len(all))
		}
		if string(a.Value) != string(z.Value) || a.ModRevision != z.ModRevision {
			t.Errorf("at %d the first key has %s@%d, the last %s@%d", h.Revision, a.Value, a.ModRevision, z.Value, z.ModRevision)
		}
		for _, p := range all {
			for _, kv := range p {
				if kv.ModRevision > h.Revision {
					t.Errorf("a list of %d has %s of %d", h.Revision, kv.Key, kv.ModRevision)
				}
			}
		}
	}
	close(stop)
	wg.Wait()
	// A list at a past revision returns that revision, independent of etcd's latest one.
	h, all := pages(t, s, prefix, first)
	if string(all[0][0].Value) != "0" || h.Revision != first {
		t.Errorf("at %d: %s@%d", h.Revision, all[0][0].Value, all[0][0].ModRevision)
	}
	if h, all := pages(t, s, prefix+"none/", 0); len(all) > 1 || len(all) == 1 && len(all[0]) > 0 || h != header(t, s) {
		t.Errorf("of an empty prefix: %v, %d pages", h, len(all))
	}
}

// TestList_Failure_ReturnsError: a compaction before or during the list, and an error of the page
// function.
func TestList_Failure_ReturnsError(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	old := fill(t, client, prefix, "v", 3000)
	compact := func() {
		rev := put(t, client, prefix+"a", "1")
		if _, err := client.Compact(contextFor(t), rev); err != nil {
			t.Fatal(err)
		}
	}
	compact()
	none := func([]driver.KV) error { return nil }
	if _, err := s.List(contextFor(t), prefix, old, none); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("below the compacted revision: %v", err)
	}
	n := 0
	_, err := s.InPages().List(contextFor(t), prefix, 0, func([]driver.KV) error {
		// for streams see stream_test.go
		if n++; n == 1 {
			compact()
		}
		return nil
	})
	// The page in flight may still be served.
	if !errors.Is(err, mirror.ErrCompacted) && !(err == nil && n <= 3) {
		t.Errorf("compacted between pages: %v after %d pages", err, n)
	}
	mine := errors.New("enough")
	if _, err := s.List(contextFor(t), prefix, 0, func([]driver.KV) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("the page's error: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := s.List(ctx, prefix, 0, func([]driver.KV) error { cancel(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("List with a canceled context: %v, want Canceled", err)
	}
	if _, err := s.List(contextFor(t), prefix, header(t, s).Revision+1000, none); !errors.Is(err, mirror.ErrRestored) {
		t.Errorf("at a revision that etcd does not have: %v", err)
	}
}

// TestFeed_Transaction_IsOneBatch: all events of a revision are in one batch, also those of a range
// deletion.
func TestFeed_Transaction_IsOneBatch(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	f := watch(t, s, prefix, header(t, s))
	resp, err := client.Txn(contextFor(t)).Then(
		clientv3.OpPut(prefix+"a", "1"), clientv3.OpPut(prefix+"b", "1"), clientv3.OpPut("/elsewhere/"+prefix, "1"),
	).Commit()
	testcheck.NoError(t, err)
	b := f.next()
	if len(b.Changes) != 2 || b.Through != resp.Header.Revision || string(b.Changes[1].Key) != prefix+"b" ||
		string(b.Changes[1].Value) != "1" || b.Changes[1].Version != 1 || b.Changes[1].Deleted {
		t.Errorf("%+v", b)
	}
	del, err := client.Delete(contextFor(t), prefix, clientv3.WithPrefix())
	testcheck.NoError(t, err)
	b = f.next()
	if len(b.Changes) != 2 || b.Through != del.Header.Revision {
		t.Fatalf("%+v", b)
	}
	for i, c := range b.Changes {
		if !c.Deleted || string(c.Key) != prefix+string(rune('a'+i)) || c.ModRevision != del.Header.Revision {
			t.Errorf("%+v", c)
		}
	}
}

// TestFeed_FragmentsOfRevision_AreOneBatch: the events of one range deletion may exceed the maximum
// size of an etcd message.
func TestFeed_FragmentsOfRevision_AreOneBatch(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	// Long keys rather than many keys: etcd 3.7 computes the size of the whole fragment for each
	// added event.
	const keys = 900
	long := prefix + strings.Repeat("k", 3000)
	fill(t, client, long, "v", keys)
	f := watch(t, s, prefix, header(t, s))
	del, err := client.Delete(contextFor(t), prefix, clientv3.WithPrefix())
	testcheck.NoError(t, err)
	b := f.next()
	if len(b.Changes) != keys || b.Through != del.Header.Revision {
		t.Fatalf("%d changes through %d, want %d through %d", len(b.Changes), b.Through, keys, del.Header.Revision)
	}
	bytes := 0
	for _, c := range b.Changes {
		bytes += len(c.Key)
		if !c.Deleted || c.ModRevision != del.Header.Revision {
			t.Fatalf("%+v", c)
		}
	}
	if bytes < 5<<19 {
		t.Errorf("only %d bytes of events; etcd has sent them in one message", bytes)
	}
	after := put(t, client, prefix+"after", "1")
	if b := f.next(); len(b.Changes) != 1 || b.Through != after {
		t.Errorf("%+v", b)
	}
}

// TestFeed_Behind_GetsCompleteRevisions: etcd sends up to 1,000 revisions in one response, in
// fragments; no revision is split.
func TestFeed_Behind_GetsCompleteRevisions(t *testing.T) {
	t.Parallel()
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	began := header(t, s)
	const revisions, perTxn = 1500, 3
	value := strings.Repeat("v", 1000)
	var written [revisions]mirror.Revision
	concurrently(t, revisions, func(i int) error {
		var ops []clientv3.Op
		for k := range perTxn {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s%d", prefix, k), fmt.Sprint(i, value)))
		}
		resp, err := client.Txn(t.Context()).Then(ops...).Commit()
		if err == nil {
			written[i] = resp.Header.Revision
		}
		return err
	})
	last := slices.Max(written[:])
	f := watch(t, s, prefix, began)
	at, n := began.Revision, 0
	for at < last {
		b := f.next()
		if b.Through <= at {
			t.Fatalf("a batch through %d after %d", b.Through, at)
		}
		count := map[mirror.Revision]int{}
		for _, c := range b.Changes {
			if c.ModRevision <= at || c.ModRevision > b.Through {
				t.Fatalf("a change of %d in a batch from %d through %d", c.ModRevision, at, b.Through)
			}
			count[c.ModRevision]++
			n++
		}
		for rev, k := range count {
			if k != perTxn {
				t.Fatalf("%d of %d changes of revision %d", k, perTxn, rev)
			}
		}
		at = b.Through
	}
	if n != revisions*perTxn {
		t.Errorf("%d changes, want %d", n, revisions*perTxn)
	}
}

// TestFeed_LeaseExpires_DeletionsAreOneBatch: when a lease ends, etcd deletes all its keys in one
// revision.
func TestFeed_LeaseExpires_DeletionsAreOneBatch(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	f := watch(t, s, prefix, header(t, s))
	// The watch has begun, so that etcd does not send it both revisions of the keys at once.
	put(t, client, prefix+"begins", "v")
	f.next()
	const keys = 500
	for {
		lease, err := client.Grant(contextFor(t), 1)
		testcheck.NoError(t, err)
		var ops []clientv3.Op
		for i := range keys {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s%05d", prefix, i), "v", clientv3.WithLease(lease.ID)))
		}
		_, err = client.Txn(contextFor(t)).Then(ops...).Commit()
		if errors.Is(err, rpctypes.ErrLeaseNotFound) {
			continue // it ended before its keys were written
		}
		testcheck.NoError(t, err)
		break
	}
	if b := f.next(); len(b.Changes) != keys || b.Changes[0].Deleted {
		t.Fatalf("%d changes", len(b.Changes))
	}
	b := f.next()
	if len(b.Changes) != keys {
		t.Fatalf("%d deletions, want %d at once", len(b.Changes), keys)
	}
	for _, c := range b.Changes {
		if !c.Deleted || c.ModRevision != b.Through {
			t.Fatalf("%+v", c)
		}
	}
}

// TestFeed_Failure_ReturnsError: compacted revisions, another cluster, an error of deliver, and
// cancellation.
func TestFeed_Failure_ReturnsError(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	old := header(t, s)
	put(t, client, prefix+"a", "1")
	rev := put(t, client, prefix+"a", "2")
	put(t, client, prefix+"a", "3")
	if _, err := client.Compact(contextFor(t), rev); err != nil {
		t.Fatal(err)
	}
	if err := watch(t, s, prefix, old).end(); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("a watch from a compacted revision: %v, want ErrCompacted", err)
	}
	// The event at the compacted revision is the oldest available one.
	if b := watch(t, s, prefix, driver.Header{ClusterID: old.ClusterID, Revision: rev - 1}).next(); b.Changes[0].ModRevision != rev {
		t.Errorf("after %d: %+v", rev-1, b)
	}
	now := header(t, s)
	for what, after := range map[string]driver.Header{
		"another cluster": {ClusterID: now.ClusterID + 1, Revision: now.Revision},
		// which etcd no longer has
		"a future revision": {ClusterID: now.ClusterID, Revision: now.Revision + 1000},
	} {
		if err := watch(t, s, prefix, after).end(); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("%s: %v", what, err)
		}
	}
	mine := errors.New("enough")
	err := s.Watch(contextFor(t), prefix, driver.Header{ClusterID: now.ClusterID, Revision: rev - 1}, func(driver.Batch) error { return mine })
	if !errors.Is(err, mine) {
		t.Errorf("deliver's error: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer time.AfterFunc(50*time.Millisecond, cancel).Stop()
	if err := s.Watch(ctx, prefix, now, func(driver.Batch) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("Watch with a canceled context: %v, want Canceled", err)
	}
}

// progress requests progress until the feed reports it at the revision.
func progress(t *testing.T, s *etcdsource.Source, f *feed, at mirror.Revision) {
	t.Helper()
	deadline := time.After(patience)
	for {
		testcheck.NoError(t, s.RequestProgress(contextFor(t)))
		select {
		case b := <-f.batches:
			if len(b.Changes) != 0 || b.Through > at {
				t.Fatalf("%+v, want progress at %d", b, at)
			}
			if b.Through == at {
				return
			}
		case <-time.After(100 * time.Millisecond): // the watch was not synced
		case err := <-f.ended:
			t.Fatal(err)
		case <-deadline:
			t.Fatal("no progress")
		}
	}
}

// TestProgress_Requested_ReturnsEtcdRevision: progress requests are answered with etcd's revision
// on an idle etcd, and after writes outside the prefix.
func TestProgress_Requested_ReturnsEtcdRevision(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	rev := put(t, client, prefix+"a", "1")
	// A watch that starts behind delivers the event first.
	f := watch(t, s, prefix, driver.Header{ClusterID: header(t, s).ClusterID, Revision: rev - 1})
	if b := f.next(); b.Through != rev {
		t.Fatalf("%+v", b)
	}
	progress(t, s, f, rev)
	progress(t, s, f, rev) // again, without new writes
	for range 3 {
		progress(t, s, f, put(t, client, "/elsewhere/"+prefix, "1"))
	}
	// A watch started at the next revision, on an idle etcd: since 3.6.2 etcd sends it no progress
	// before that revision exists, and it needs none.
	f = watch(t, s, prefix, header(t, s))
	progress(t, s, f, put(t, client, "/elsewhere/"+prefix, "2"))
}

// TestProgress_Requested_DoesNotReachOtherWatches: etcd answers a progress request to every watch
// of a gRPC stream, so the feed's requests must not use the stream that the client's other watches
// share (KEP-2340).
func TestProgress_Requested_DoesNotReachOtherWatches(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	rev := put(t, client, prefix+"a", "1")
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	others := []clientv3.WatchChan{
		client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithProgressNotify(), clientv3.WithRev(rev)),
		client.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithProgressNotify(), clientv3.WithRev(rev)),
	}
	for _, other := range others {
		if r := <-other; len(r.Events) != 1 {
			t.Fatalf("%+v, want the write", r)
		}
	}
	f := watch(t, s, prefix, driver.Header{ClusterID: header(t, s).ClusterID, Revision: rev - 1})
	f.next()
	for range 20 {
		rev = put(t, client, "/elsewhere/"+prefix, "1")
		progress(t, s, f, rev)
	}
	put(t, client, prefix+"a", "2")
	for _, other := range others {
		if r := <-other; r.IsProgressNotify() || len(r.Events) != 1 {
			t.Errorf("another watch received %+v before the next write", r)
		}
	}
}

// TestFeed_WithoutProgress_DeliversEventsOnly: the feed delivers events only, because the client
// would resume after the revision of a progress response.
func TestFeed_WithoutProgress_DeliversEventsOnly(t *testing.T) {
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe").WithoutProgress()
	rev := put(t, client, prefix+"a", "1")
	f := watch(t, s, prefix, driver.Header{ClusterID: header(t, s).ClusterID, Revision: rev - 1})
	if b := f.next(); b.Through != rev || len(b.Changes) != 1 {
		t.Fatalf("%+v", b)
	}
	for range 10 {
		put(t, client, "/elsewhere/"+prefix, "1")
		testcheck.NoError(t, s.RequestProgress(contextFor(t)))
	}
	rev = put(t, client, prefix+"a", "2")
	if b := f.next(); b.Through != rev || len(b.Changes) != 1 {
		t.Errorf("%+v, want the write at %d", b, rev)
	}
}

// requireProbe fails unless a probe of the etcd returns the mode. On a busy machine etcd may answer
// too late for a probe, which then shows nothing.
func requireProbe(t *testing.T, client *clientv3.Client, key string, want etcdsource.ProgressMode) {
	t.Helper()
	ctx := contextFor(t)
	got, err := etcdsource.Probe(ctx, client, key)
	for (err != nil || got != want) && ctx.Err() == nil {
		t.Logf("probe: %s, %v", got, err)
		got, err = etcdsource.Probe(ctx, client, key)
	}
	if err != nil || got != want {
		t.Fatalf("probe: %s, %v; want %s", got, err, want)
	}
}

// TestProbe_RealEtcd_ReturnsByProgress: the probe immediately detects that this etcd version
// supports progress requests.
func TestProbe_RealEtcd_ReturnsByProgress(t *testing.T) {
	client, prefix := open(t)
	began := time.Now()
	requireProbe(t, client, prefix+"probe", etcdsource.ByProgress)
	t.Logf("took %v", time.Since(began))
	gone := connect(t, "/nonexistent/client.sock")
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if got, err := etcdsource.Probe(ctx, gone, prefix+"probe"); err == nil || got != etcdsource.ByProgress {
		t.Errorf("an etcd that is not there: %s, %v", got, err)
	}
}
