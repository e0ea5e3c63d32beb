package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror/driver"
)

// withoutProgress is a source without progress on request.
type withoutProgress struct{ driver.Source }

func (withoutProgress) RequestProgress(context.Context) error { return nil }

// progressWhile is a source that forwards progress only while lists wait for it: etcd may answer an
// earlier request late.
type progressWhile struct {
	driver.Source
	lists *atomic.Int32
}

func (s progressWhile) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	return s.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if len(b.Changes) == 0 && s.lists.Load() == 0 {
			return nil
		}
		return deliver(b)
	})
}

// consistently is a storage that counts the lists which need progress: consistent ones, and their
// next pages if memory has the past.
type consistently struct {
	storage.Interface
	lists *atomic.Int32
	past  bool
}

func (s consistently) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	if opts.ResourceVersion == "" && (opts.Predicate.Continue == "" || s.past) {
		s.lists.Add(1)
		defer s.lists.Add(-1)
	}
	return s.Interface.GetList(ctx, key, opts, list)
}

const suitePrefix = "test!" // the prefix that the suites' transformer adds to values

// prefixStore lets a suite change the prefix transformer of a storage.
type prefixStore struct {
	storage.Interface
	swap *swappable
}

func (s prefixStore) UpdatePrefixTransformer(modify storagetesting.PrefixTransformerModifier) func() {
	before := s.swap.get()
	changed := *before.(*storagetesting.PrefixTransformer)
	s.swap.set(modify(&changed))
	return func() { s.swap.set(before) }
}

// unhurried is a storage whose creations do not end with the suite's watch, which lasts 3 s: on a
// busy machine they take longer.
type unhurried struct{ *Store }

func (s unhurried) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.Store.Create(context.WithoutCancel(ctx), key, obj, out, ttl)
}

func (s unhurried) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions) error {
	return s.Store.Delete(context.WithoutCancel(ctx), key, out, preconditions, validate, cached, opts)
}

// lasting is unhurried with watches that last until they are stopped. They know the suite's
// deadline, before which their bookmarks are due.
type lasting struct{ unhurried }

func (s lasting) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	return s.Store.Watch(withDeadlineOf{context.WithoutCancel(ctx), ctx}, key, opts)
}

// bookmarked is lasting whose creations return when the last watch has its bookmark, if it
// requested one: the suite waits 3 s for it, a second more than the bookmark takes. They wait less
// than the interval of bookmarks.
type bookmarked struct {
	lasting
	last *watch.Interface
}

func (s bookmarked) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	w, err := s.lasting.Watch(ctx, key, opts)
	if *s.last = nil; err == nil && opts.Predicate.AllowWatchBookmarks {
		*s.last = w
	}
	return w, err
}

func (s bookmarked) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	err := s.lasting.Create(ctx, key, obj, out, ttl)
	for end := time.Now().Add(30 * time.Second); err == nil && *s.last != nil && len((*s.last).ResultChan()) == 0 && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

type withDeadlineOf struct {
	context.Context
	of context.Context
}

func (c withDeadlineOf) Deadline() (time.Time, bool) { return c.of.Deadline() }

// repeating is a storage that repeats what a busy machine makes fail, as clients do: a read that is
// refused because memory is behind etcd, and a write whose lease, of a second, ended before it.
type repeating struct{ storage.Interface }

func repeat(f func() error) (err error) {
	for range 3 {
		if err = f(); !apierrors.IsTooManyRequests(err) && !errors.Is(err, rpctypes.ErrLeaseNotFound) {
			break
		}
	}
	return err
}

func (s repeating) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return repeat(func() error { return s.Interface.Create(ctx, key, obj, out, ttl) })
}

func (s repeating) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	return repeat(func() error {
		return s.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, preconditions, update, cached)
	})
}

func (s repeating) GetList(ctx context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	return repeat(func() error { return s.Interface.GetList(ctx, key, opts, list) })
}

func (s repeating) Watch(ctx context.Context, key string, opts storage.ListOptions) (w watch.Interface, err error) {
	err = repeat(func() error {
		w, err = s.Interface.Watch(ctx, key, opts)
		return err
	})
	return w, err
}

// longLived is a storage whose objects do not expire during a suite that reads them as if they did
// not.
type longLived struct{ storage.Interface }

func (s longLived) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	longer := func(obj runtime.Object, meta storage.ResponseMeta) (runtime.Object, *uint64, error) {
		updated, ttl, err := update(obj, meta)
		if ttl != nil {
			ttl = new(uint64(600))
		}
		return updated, ttl, err
	}
	return s.Interface.GuaranteedUpdate(ctx, key, out, ignoreNotFound, preconditions, longer, cached)
}

// writeAndDeliver is a storage whose creations return when memory has them and the watches of their
// namespaces have delivered them: the suite waits 150 ms for an event.
type writeAndDeliver struct {
	writeAndSee
	open *sync.Map // prefix of the keys, by watch
}

func (s writeAndDeliver) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	w, err := s.writeAndSee.Watch(ctx, key, opts)
	if err == nil {
		s.open.Store(w, key+"/")
	}
	return w, err
}

func (s writeAndDeliver) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	before := map[watch.Interface]int{}
	s.open.Range(func(w, prefix any) bool {
		if strings.HasPrefix(key, prefix.(string)) {
			before[w.(watch.Interface)] = len(w.(watch.Interface).ResultChan())
		}
		return true
	})
	if err := s.writeAndSee.Create(ctx, key, obj, out, ttl); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for w, n := range before {
		for len(w.ResultChan()) == n {
			select {
			case <-ctx.Done():
				return fmt.Errorf("a watch has not delivered %s: %w", key, ctx.Err())
			case <-time.After(time.Millisecond):
			}
		}
	}
	return nil
}

// writeAndSee is a storage whose writes return when memory has them.
type writeAndSee struct{ *Store }

func (s writeAndSee) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if err := s.Store.Create(ctx, key, obj, out, ttl); err != nil {
		return err
	}
	rev, err := s.Versioner().ObjectResourceVersion(out)
	if err != nil {
		return err
	}
	// Not bounded by the 3 s of a read, unlike the read below.
	if err := errors.Join(s.resource.WaitReady(ctx), s.see(ctx, out)); err != nil {
		return err
	}
	seen := &example.Pod{}
	if err := s.Get(ctx, key, storage.GetOptions{ResourceVersion: fmt.Sprint(rev)}, seen); err != nil {
		return err
	}
	if !apiequality.Semantic.DeepEqual(seen, out) {
		return fmt.Errorf("memory has %+v, created %+v", seen, out)
	}
	return nil
}

func (s writeAndSee) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	if err := s.Store.GuaranteedUpdate(ctx, key, out, ignoreNotFound, preconditions, update, cached); err != nil {
		return err
	}
	return s.see(ctx, out)
}

func (s writeAndSee) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions) error {
	if err := s.Store.Delete(ctx, key, out, preconditions, validate, cached, opts); err != nil {
		return err
	}
	return s.see(ctx, out)
}

func (s writeAndSee) see(ctx context.Context, written runtime.Object) error {
	rev, err := s.Versioner().ObjectResourceVersion(written)
	if err != nil {
		return err
	}
	return s.mirror.Wait(ctx, int64(rev))
}

// checkStored returns a check of the value in etcd: it decodes, and has no field that only a server
// sets.
func (f *fixture) checkStored(prefix string) storagetesting.KeyValidation {
	return func(ctx context.Context, t *testing.T, key string) {
		key = testPrefix + strings.TrimPrefix(key, "/")
		resp, err := f.client.KV.Get(ctx, key)
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatalf("read %s: %v, %d values", key, err, len(resp.Kvs))
		}
		data, ok := strings.CutPrefix(string(resp.Kvs[0].Value), prefix)
		if !ok {
			t.Fatalf("stored value %q lacks the prefix %q", data, prefix)
		}
		obj, err := runtime.Decode(f.codec, []byte(data))
		if err != nil {
			t.Fatalf("decode %q: %v", data, err)
		}
		if pod := obj.(*example.Pod); pod.ResourceVersion != "" || pod.GetSelfLink() != "" {
			t.Errorf("stored with resource version %q and self link %q", pod.ResourceVersion, pod.GetSelfLink())
		}
	}
}

// increaseRV increases etcd's revision by a write that no mirror receives.
func (f *fixture) increaseRV(ctx context.Context, t *testing.T) int64 {
	resp, err := f.client.Put(ctx, "increaseRV", "ok")
	testcheck.NoError(t, err)
	return resp.Header.Revision
}

// compact compacts etcd as a kube-apiserver does, and returns when the storage has followed.
func (f *fixture) compact(ctx context.Context, t *testing.T, resourceVersion string) {
	rev := parseRevision(t, resourceVersion)
	turn, _, _, err := etcd3.Compact(ctx, f.client.Client, 0, rev)
	if err == nil && turn > 1 {
		// The first call was not this server's turn; the second, with the returned count, is.
		_, _, _, err = etcd3.Compact(ctx, f.client.Client, turn, rev)
	}
	if err != nil {
		t.Fatalf("compact to %d: %v", rev, err)
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.ListFromCacheSnapshot) {
		// upstream's compactor follows others
		eventually(t, "the mirror detects the compaction", func() bool { return f.CompactRevision() == rev })
	}
}

// outrun compacts etcd to the revision and writes so much that the revision leaves the window too:
// upstream's cacher drops events at a compaction, the engine keeps them while there is room
// (KEP-4988).
func (f *fixture) outrun(ctx context.Context, t *testing.T, resourceVersion string) {
	rev := parseRevision(t, resourceVersion)
	ballast := f.create(t, newPod("ballast"))[0]
	for i := 0; ; i++ {
		f.update(t, ballast, strings.Repeat(string(rune('a'+i%26)), 512<<10))
		f.catchUp(t)
		_, floor, err := f.engine(t).resource.Oldest()
		testcheck.NoError(t, err)
		if floor >= rev {
			break
		}
		if i == 100 {
			t.Fatalf("after %d MiB history still reaches back to %d", i/2, floor)
		}
	}
	f.compact(ctx, t, resourceVersion)
}

func parseRevision(t testing.TB, resourceVersion string) int64 {
	t.Helper()
	rev, err := storage.APIObjectVersioner{}.ParseResourceVersion(resourceVersion)
	testcheck.NoError(t, err)
	return int64(rev)
}
