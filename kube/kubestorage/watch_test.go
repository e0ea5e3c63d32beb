package kubestorage

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// TestWatch_SlowClient_DoesNotDelayOthers: it keeps its position as far as the window reaches, and
// then gets 410; a watcher that reads in time loses no event and is not delayed.
func TestWatch_SlowClient_DoesNotDelayOthers(t *testing.T) {
	t.Parallel()
	f := setupInMemory(t, withWindow(mirror.Window{MaxAge: time.Hour, MaxBytes: 4 << 20}))
	pod := f.create(t, newPod("a"))[0]
	slow := f.watchPods(t, afterRevision(pod.ResourceVersion))
	fast := f.watchPods(t, afterRevision(pod.ResourceVersion))

	const held = 75 // above the events that a watcher holds
	var revisions []string
	for i := 0; ; i++ {
		out := f.update(t, pod, strings.Repeat(string(rune('a'+i%26)), 25<<10))
		revisions = append(revisions, out.ResourceVersion)
		if got := nextPod(t, fast, watch.Modified); got.ResourceVersion != out.ResourceVersion {
			t.Fatalf("the fast watcher has %s after a write at %s", got.ResourceVersion, out.ResourceVersion)
		}
		_, floor, err := f.engine(t).resource.Oldest()
		testcheck.NoError(t, err)
		// A watcher still delivers the events that it has read from the log.
		if i > held && floor > parseRevision(t, revisions[held]) {
			break
		}
		if i == 500 {
			t.Fatalf("after 12 MiB history still reaches back to %d", floor)
		}
	}

	// First those events, in order and without a gap, then the end.
	n := 0
	for ; ; n++ {
		e := next(t, slow)
		if e.Type == watch.Error {
			break
		}
		if got := objectRevision(t, e); n >= len(revisions) || got != revisions[n] {
			t.Fatalf("event %d is of %s", n, got)
		}
	}
	ended(t, slow)
	if n == 0 || n == len(revisions) {
		t.Errorf("the slow watcher has %d of %d events, want some", n, len(revisions))
	}
	again := f.watchPods(t, afterRevision(pod.ResourceVersion))
	if status := nextStatus(t, again); status.Code != 410 || status.Reason != "Expired" {
		t.Errorf("a watch from before the window: %+v, want 410", status)
	}
	ended(t, again)
	last := f.update(t, pod, "last")
	if got := nextPod(t, fast, watch.Modified); got.ResourceVersion != last.ResourceVersion {
		t.Errorf("the fast watcher has %s after a write at %s", got.ResourceVersion, last.ResourceVersion)
	}
}

func objectRevision(t *testing.T, e watch.Event) string {
	t.Helper()
	rev, err := storage.APIObjectVersioner{}.ObjectResourceVersion(e.Object)
	testcheck.NoError(t, err)
	return fmt.Sprint(rev)
}

// TestWatch_StopContextOrStorageEnd_EndsWatch: with Stop, with their context, and with the storage,
// with or without a reader. No goroutine is left.
func TestWatch_StopContextOrStorageEnd_EndsWatch(t *testing.T) {
	f := setupInMemory(t)
	pod := f.create(t, newPod("a"))[0]
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var stopped, cancelled, destroyed []watch.Interface
	for range 10 {
		for _, group := range []struct {
			ctx     context.Context
			watches *[]watch.Interface
		}{{context.Background(), &stopped}, {ctx, &cancelled}, {context.Background(), &destroyed}} {
			w, err := f.Watch(group.ctx, "/pods/", afterRevision(pod.ResourceVersion))
			testcheck.NoError(t, err)
			*group.watches = append(*group.watches, w)
		}
	}
	// All of them are blocked on an event that is not read.
	for i := range 20 {
		f.update(t, pod, fmt.Sprint(i))
	}
	f.catchUp(t)
	eventually(t, "30 watchers run", func() bool { return watchersRunning() == 30 })
	for _, w := range stopped {
		w.Stop()
		w.Stop() // may be called again
	}
	eventually(t, "stopped watchers are removed", func() bool { return watchersRunning() == 20 })
	cancel()
	eventually(t, "cancelled watchers are removed", func() bool { return watchersRunning() == 10 })
	f.destroy()
	if n := watchersRunning(); n != 0 {
		t.Errorf("%d watchers outlive their storage", n)
	}
	f.destroy() // may be called again
	for _, w := range append(append(stopped, cancelled...), destroyed...) {
		ended(t, w)
	}
	if w, err := f.Watch(context.Background(), "/pods/", everything()); err == nil {
		ended(t, w)
	}
	if n := watchersRunning(); n != 0 {
		t.Errorf("%d watchers began after the end", n)
	}
}

// TestWatch_StorageEndsMeanwhile_EndsOrIsRefused: each watch either runs and is ended, or is
// refused.
func TestWatch_StorageEndsMeanwhile_EndsOrIsRefused(t *testing.T) {
	f := setupInMemory(t)
	var wg sync.WaitGroup
	begun := make(chan struct{}, 100)
	for range 4 {
		wg.Go(func() {
			for {
				w, err := f.Watch(context.Background(), "/pods/", afterRevision("0"))
				if err != nil {
					requireRetry(t, "watch", err)
					return
				}
				select {
				case begun <- struct{}{}:
				default:
				}
				defer ended(t, w)
			}
		})
	}
	for range cap(begun) {
		<-begun
	}
	f.destroy()
	if n := watchersRunning(); n != 0 {
		t.Errorf("%d watchers outlive their storage", n)
	}
	wg.Wait()
}

// TestWatch_Canceled_ClosesWithoutErrorEvent when their client is gone, or there is no error to
// report.
func TestWatch_Canceled_ClosesWithoutErrorEvent(t *testing.T) {
	f := setupInMemory(t)
	pod := f.create(t, newPod("a"))[0]
	f.catchUp(t)
	silent := func(why string, w watch.Interface) {
		t.Helper()
		select {
		case e, ok := <-w.ResultChan():
			if ok {
				t.Errorf("%s: got %s %v", why, e.Type, e.Object)
			}
		case <-time.After(patience):
			t.Errorf("%s: the watch did not end in %s", why, patience)
		}
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	for _, rv := range []string{"", "0", pod.ResourceVersion} {
		opts := afterRevision(rv)
		if rv == "0" {
			opts.Predicate.Field = fields.OneTermEqualSelector("metadata.name", "none")
		}
		w, err := f.Watch(gone, "/pods/", opts)
		if err != nil {
			t.Fatalf("watch at %q: %v", rv, err)
		}
		silent(fmt.Sprintf("cancelled before it began at %q", rv), w)
	}
	w := f.watchPods(t, afterRevision(pod.ResourceVersion))
	f.cluster.mirror.Close() // the server shuts down; the position stays valid
	silent("closed mirror", w)
}

// watchersRunning returns the number of goroutines that serve a watch.
func watchersRunning() int {
	buf := make([]byte, 1<<20)
	for n := len(buf); n == len(buf); buf = make([]byte, 2*len(buf)) {
		if n = runtime.Stack(buf, true); n < len(buf) {
			return strings.Count(string(buf[:n]), "internal/watch.(*watcher).run(")
		}
	}
	return 0
}
