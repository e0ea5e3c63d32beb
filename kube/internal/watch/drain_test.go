package watch

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestDrain_DuringInitialEvents_SendsNoBookmark of initial events ends a watch without a bookmark,
// because the list is not complete.
func TestDrain_DuringInitialEvents_SendsNoBookmark(t *testing.T) {
	w := newFixture(t)
	for _, name := range []string{"a", "b"} {
		w.Put(t, podtest.Pod(name))
	}
	w.CatchUp(t)
	yes := true
	opts := withBookmarks(everything())
	opts.SendInitialEvents = &yes
	listing, complete := w.open(t, podtest.Context(t), opts), w.open(t, podtest.Context(t), opts)
	take(t, complete)
	drained := make(chan error, 1)
	go func() { drained <- w.running.Drain(podtest.Context(t)) }()
	podtest.Eventually(t, "the watches are drained", w.running.Draining)
	if b, err := listing.next(); !errors.Is(err, ErrEnded) {
		t.Errorf("in the middle: %+v, %v; want the end", b, err)
	}
	// A complete list may be confirmed by a bookmark.
	for _, end := range []bool{true, false} {
		if b := take(t, complete); b.bookmark.Revision == 0 || b.bookmark.InitialEventsEnd != end {
			t.Errorf("behind the list: %+v, want a bookmark that closes it: %t", b, end)
		}
	}
	if b, err := complete.next(); !errors.Is(err, ErrEnded) {
		t.Errorf("behind the bookmark: %+v, %v; want the end", b, err)
	}
	listing.Close()
	complete.Close()
	if err := <-drained; err != nil {
		t.Error(err)
	}
}

// TestBookmark_GateOff_OnlyEndsInitialEvents: without the gate only the bookmark that closes
// initial events is sent.
func TestBookmark_GateOff_OnlyEndsInitialEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		w.env.Gates.Bookmarks = false
		yes := true
		opts := withBookmarks(everything())
		opts.SendInitialEvents = &yes
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		got, err := record(w.open(t, ctx, opts))
		if len(got) != 1 || !got[0].bookmark.InitialEventsEnd || !errors.Is(err, ErrEnded) {
			t.Errorf("got %+v, %v; want the one that closes the initial events", got, err)
		}
	})
}

// TestDrain_LargeRevision_IsDeliveredWhole: a watch that has begun to deliver a revision when the
// drain's last revision is behind it gets the rest before its end. A part of a transaction would be
// lost to a client that resumes at its revision.
func TestDrain_LargeRevision_IsDeliveredWhole(t *testing.T) {
	w := newFixture(t)
	st := w.open(t, podtest.Context(t), withBookmarks(w.fromNow()))
	const before, large = readAhead + 1, 3 * readAhead
	for i := range before {
		w.Put(t, podtest.Pod(fmt.Sprint(i)))
	}
	w.CatchUp(t)
	drained := make(chan error, 1)
	go func() { drained <- w.running.Drain(podtest.Context(t)) }()
	podtest.Eventually(t, "the watches are drained", w.running.Draining)
	if b := take(t, st); len(b.events) != readAhead {
		// the last revision of the drain is that of the next event
		t.Fatalf("%d events, want %d", len(b.events), readAhead)
	}
	var ops []memory.Op
	for i := range large {
		pod := podtest.Pod(fmt.Sprint(i))
		ops = append(ops, memory.Op{Key: podtest.Key(pod), Value: podtest.Stored(t, withLabel(pod, "in", "transaction"))})
	}
	w.Etcd.Txn(ops...)
	w.CatchUp(t)
	if events, err := endOf(st); events != before-readAhead+large || !errors.Is(err, ErrEnded) {
		t.Errorf("%d events, %v; want %d and the end", events, err, before-readAhead+large)
	}
	st.Close()
	if err := <-drained; err != nil {
		t.Error(err)
	}
}

// TestDrain_NoEvents_EndsAtLastRevision of the drain, with a bookmark if the client requests them
// and memory has reached its position. Events after that revision are not delivered.
func TestDrain_NoEvents_EndsAtLastRevision(t *testing.T) {
	now := (*fixture).fromNow
	for name, c := range map[string]struct {
		opts     func(w *fixture) storage.ListOptions
		late     bool // the watch has all events when the drain begins, and one follows
		bookmark bool
	}{
		"bookmarks":       {func(w *fixture) storage.ListOptions { return withBookmarks(now(w)) }, false, true},
		"no bookmarks":    {now, false, false},
		"later event":     {func(w *fixture) storage.ListOptions { return withBookmarks(now(w)) }, true, true},
		"future revision": {func(w *fixture) storage.ListOptions { return withBookmarks(after(w.Etcd.Revision() + 1000)) }, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				st := w.open(t, t.Context(), c.opts(w))
				last := w.Etcd.Put(podtest.Prefix+"other", "")
				w.CatchUp(t)
				if c.late {
					_, _ = st.next()
				}
				w.drain(t)
				if c.late {
					st.leaving()
					w.Put(t, podtest.Pod("late"))
					w.CatchUp(t)
				}
				b, err := st.next()
				if c.bookmark {
					if err != nil || b.bookmark.Revision != last {
						t.Errorf("got %+v, %v; want a bookmark at %d", b, err, last)
					}
					b, err = st.next()
				}
				if !errors.Is(err, ErrEnded) || !b.empty() {
					t.Errorf("got %+v, %v; want the end", b, err)
				}
			})
		})
	}
}

// TestDrain_RelistedResource_Returns410.
func TestDrain_RelistedResource_Returns410(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		st := w.open(t, t.Context(), w.fromNow())
		w.Etcd.Restore(1000, nil)
		time.Sleep(10 * time.Second) // until it is relisted
		w.drain(t)
		if b, err := st.next(); !apierrors.IsResourceExpired(err) || !b.empty() {
			t.Errorf("got %+v, %v; want 410", b, err)
		}
	})
}
