package freshness

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestWaiter_EtcdRestored_IsNotReady: the read that finds a restored etcd reports that the storage
// is not ready, as later ones do. It does not report that memory cannot keep up.
func TestWaiter_EtcdRestored_IsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		w := New(c.Mirror, c.Resource, schema.GroupResource{Resource: "pods"}, false)
		was := c.Put(t, podtest.Pod("a"))
		c.CatchUp(t)
		c.Etcd.Stall(true) // the feed does not find it
		c.Etcd.FailLists(errors.New("not yet"))
		c.Etcd.Restore(was-1, nil)
		if err := w.Consistent(t.Context(), nil); !errors.Is(err, mirror.ErrNotReady) {
			t.Errorf("got %v, want ErrNotReady", err)
		}
	})
}

// TestWaiter_EtcdUnavailable_Is429: also if the answer of etcd, or of a feed, comes at once.
func TestWaiter_EtcdUnavailable_Is429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaited(t)
		ahead := w.Mirror.PublishedRevision() + 1
		for _, unavailable := range []error{rpctypes.ErrNoLeader, status.Error(codes.Unavailable, "the replica is loading")} {
			w.Etcd.FailReadRevision(unavailable)
			_, present := w.Present(t.Context())
			_, exact := w.Snapshot(t.Context(), storage.ListOptions{}, ahead, nil)
			for name, err := range map[string]error{"consistent": w.Consistent(t.Context(), nil), "present": present, "exact": exact} {
				if !apierrors.IsTooManyRequests(err) {
					t.Errorf("%s read, etcd answers %v: got %v, want 429", name, unavailable, err)
				}
			}
		}
	})
}

// waited is a Waiter of pods in a synctest bubble.
type waited struct {
	*podtest.Cluster
	*Waiter
}

// newWaited returns a waiter with one pod in memory, which etcd has too.
func newWaited(t *testing.T, change ...func(*podtest.Options)) waited {
	t.Helper()
	c := podtest.New(t, change...)
	w := waited{c, New(c.Mirror, c.Resource, schema.GroupResource{Resource: "pods"}, false)}
	c.Put(t, podtest.Pod("a"))
	c.CatchUp(t)
	return w
}

// after returns how long a wait has taken, and its result.
func after(wait func() error) (took time.Duration, err error) {
	began := time.Now()
	err = wait()
	return time.Since(began), err
}

// TestWaitFor_Revision_ReturnsWhenPublished: a wait for a published revision takes no time; one for
// a later revision ends with the event of that revision.
func TestWaitFor_Revision_ReturnsWhenPublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaited(t)
		published := w.Mirror.PublishedRevision()
		for _, asked := range []uint64{0, 1, uint64(published)} {
			if took, err := after(func() error { return w.WaitFor(t.Context(), asked) }); err != nil || took != 0 {
				t.Errorf("a wait for revision %d of %d takes %s: %v", asked, published, took, err)
			}
		}
		result := make(chan error, 1)
		go func() { result <- w.WaitFor(t.Context(), uint64(published)+1) }()
		synctest.Wait()
		if len(result) > 0 {
			t.Fatalf("a wait for revision %d ends at %d: %v", published+1, published, <-result)
		}
		w.Put(t, podtest.Pod("b"))
		synctest.Wait()
		if len(result) == 0 {
			t.Errorf("a wait for revision %d does not end at %d", published+1, w.Mirror.PublishedRevision())
		} else if err := <-result; err != nil {
			t.Error(err)
		}
	})
}

// TestWaitFor_OtherKeyWritten_RequestsProgress: no event of the mirror has the revision, so the
// wait ends only if it requests progress.
func TestWaitFor_OtherKeyWritten_RequestsProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaited(t)
		rev := w.Etcd.Put("/outside", "1")
		synctest.Wait()
		if published := w.Mirror.PublishedRevision(); published >= rev {
			t.Fatalf("revision %d is published without a request for progress", published)
		}
		if took, err := after(func() error { return w.WaitFor(t.Context(), uint64(rev)) }); err != nil || took >= freshWait/2 {
			t.Errorf("a wait for a revision of another key takes %s: %v", took, err)
		}
	})
}

// TestWaits_FeedStalled_EndLate: etcd has a revision that memory does not receive. Each wait ends
// at its limit with its error, and a moment before the request's own deadline.
func TestWaits_FeedStalled_EndLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaited(t)
		w.Etcd.Stall(true)
		rev := uint64(w.Put(t, podtest.Pod("b")))
		tooLarge := fmt.Sprintf("Too large resource version: %d, current: %d", rev, w.Mirror.PublishedRevision())
		isTooLarge := func(err error) bool {
			return storage.IsTooLargeResourceVersion(err) && strings.Contains(err.Error(), tooLarge)
		}
		isExpired := func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
		snapshot := func(exact int64) func(context.Context) error {
			return func(ctx context.Context) error {
				_, err := w.Snapshot(ctx, storage.ListOptions{}, exact, nil)
				return err
			}
		}
		for name, c := range map[string]struct {
			wait  func(context.Context) error
			limit time.Duration
			is    func(error) bool
		}{
			"WaitFor":        {func(ctx context.Context) error { return w.WaitFor(ctx, rev) }, freshWait, isTooLarge},
			"Consistent":     {func(ctx context.Context) error { return w.Consistent(ctx, nil) }, freshWait, apierrors.IsTooManyRequests},
			"SoonConsistent": {func(ctx context.Context) error { return w.SoonConsistent(ctx, nil) }, getWait, isExpired},
			"Snapshot":       {snapshot(0), freshWait, apierrors.IsTooManyRequests},
			"Snapshot at":    {snapshot(int64(rev)), freshWait, apierrors.IsTooManyRequests},
		} {
			took, err := after(func() error { return c.wait(t.Context()) })
			if !c.is(err) || took != c.limit {
				t.Errorf("%s ends after %s with %v, want %s", name, took, err, c.limit)
			}
			if c.limit < freshWait {
				continue
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			if took, err := after(func() error { return c.wait(ctx) }); !c.is(err) || took != time.Second-answerTime {
				t.Errorf("%s with a deadline of 1 s ends after %s with %v", name, took, err)
			}
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(freshWait/2, cancel)
			if took, err := after(func() error { return c.wait(ctx) }); !errors.Is(err, context.Canceled) || took != freshWait/2 {
				t.Errorf("%s ends after %s with %v, want the request's cancellation after %s", name, took, err, freshWait/2)
			}
		}
		w.Etcd.Stall(false)
		if err := w.Consistent(t.Context(), nil); err != nil || w.Mirror.PublishedRevision() < mirror.Revision(rev) {
			t.Errorf("Consistent returns at %d, before %d: %v", w.Mirror.PublishedRevision(), rev, err)
		}
	})
}

// TestSnapshot_Revision_HasItsState: an exact snapshot is of its revision and no later one. One of
// a revision that etcd does not have is refused without a wait, one that etcd has compacted too.
func TestSnapshot_Revision_HasItsState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWaited(t)
		first := w.Mirror.PublishedRevision()
		second := w.Put(t, podtest.Pod("b"))
		for _, c := range []struct {
			resourceVersion string
			exact           int64
			want            mirror.Revision
		}{{"", 0, second}, {"0", 0, second}, {fmt.Sprint(first), 0, second}, {fmt.Sprint(second), 0, second}, {"", second, second}, {"", first, first}} {
			snap, err := w.Snapshot(t.Context(), storage.ListOptions{ResourceVersion: c.resourceVersion}, c.exact, nil)
			if err != nil || snap.Rev != c.want {
				t.Errorf("resource version %q, exact %d: revision %d, want %d: %v", c.resourceVersion, c.exact, snap.Rev, c.want, err)
			}
		}
		if _, err := w.Snapshot(t.Context(), storage.ListOptions{ResourceVersion: "x"}, 0, nil); !apierrors.IsBadRequest(err) {
			t.Errorf("resource version x: %v, want 400", err)
		}
		took, err := after(func() error {
			_, err := w.Snapshot(t.Context(), storage.ListOptions{}, second+1, nil)
			return err
		})
		if !storage.IsTooLargeResourceVersion(err) || took != 0 {
			t.Errorf("exactly the next revision: %v after %s, want 504 immediately", err, took)
		}
		w.Mirror.Compact(second)
		if _, err := w.Snapshot(t.Context(), storage.ListOptions{}, first, nil); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("exactly a compacted revision: %v, want ErrCompacted", err)
		}
	})
}

// TestReady_LoadTakesLong_RefusesLaterReads: the first reader waits for the load, later ones are
// refused immediately, until it is loaded. A reader whose own time is shorter decides for no other.
func TestReady_LoadTakesLong_RefusesLaterReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		etcd := memory.New()
		etcd.FailLists(errors.New("not yet"))
		c := podtest.New(t, func(o *podtest.Options) { o.Etcd, o.Unloaded = etcd, true })
		w := New(c.Mirror, c.Resource, schema.GroupResource{Resource: "pods"}, false)
		hasty, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		gone, leave := context.WithCancel(t.Context())
		leave()
		for ctx, want := range map[context.Context]time.Duration{hasty: time.Second - answerTime, gone: 0} {
			took, err := after(func() error { return w.Ready(ctx) })
			if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsTooManyRequests(err) || !ok || seconds != RetrySeconds || took != want {
				t.Errorf("a reader without time: %v after %s, want 429 after %s", err, took, want)
			}
		}
		for i, want := range []time.Duration{freshWait, 0} {
			took, err := after(func() error { return w.Ready(t.Context()) })
			if !apierrors.IsTooManyRequests(err) || took != want {
				t.Errorf("reader %d: %v after %s, want 429 after %s", i, err, took, want)
			}
		}
		etcd.FailLists(nil)
		if err := c.Resource.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		if took, err := after(func() error { return w.Ready(t.Context()) }); err != nil || took != 0 {
			t.Errorf("a reader of the loaded resource: %v after %s", err, took)
		}
	})
}

// TestOutage_RetryAfter_Grows: the Retry-After of refusals is 1 s at first and 30 s at last; a new
// outage starts at 1 s again.
func TestOutage_RetryAfter_Grows(t *testing.T) {
	var o outage
	start := time.Now()
	for _, c := range []struct{ after, want time.Duration }{
		{0, time.Second},
		{5 * time.Second, time.Second},
		{12 * time.Second, 2 * time.Second},
		{30 * time.Second, 6 * time.Second},
		{time.Minute, 30 * time.Second},
		{time.Minute + outageGap, 30 * time.Second},
		{time.Hour, time.Second},
		{time.Hour + 12*time.Second, 2 * time.Second},
	} {
		if got := o.refuse(start.Add(c.after)); got != c.want {
			t.Errorf("after %s the pause is %s, want %s", c.after, got, c.want)
		}
	}
}
