package watch

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestStartOf_EveryCombination_IsOfTheTable is KEP-2340's second table, and the cases in which only
// etcd can answer: the gate is off, or memory follows events only and may not reach the revision.
func TestStartOf_EveryCombination_IsOfTheTable(t *testing.T) {
	w := newFixture(t)
	past := w.Put(t, podtest.Pod("a"))
	w.CatchUp(t)
	future := past + 1000
	yes, no := true, false
	for _, c := range []struct {
		version             string
		asked               uint64
		events, unset, list start // sendInitialEvents is false, not set, true
		withoutGate         start // the last one, with the gate off
		eventsOnly          start // the last one, if memory follows events only
	}{
		{"", 0, afterPresent, listConsistent, listConsistent, listEtcd, listConsistent},
		{"0", 0, afterMemory, listMemory, listMemory, listMemory, listMemory},
		{"past", uint64(past), afterRevision, afterRevision, listNotOlder, listNotOlder, listNotOlder},
		{"future", uint64(future), afterRevision, afterRevision, listNotOlder, listNotOlder, listEtcd},
	} {
		opts := everything()
		opts.ResourceVersion = c.version
		of := func(send *bool) start {
			opts.SendInitialEvents = send
			return w.env.startOf(c.asked, &opts)
		}
		if events, unset, list := of(&no), of(nil), of(&yes); events != c.events || unset != c.unset || list != c.list {
			t.Errorf("%q: starts %d, %d, %d, want %d, %d, %d", c.version, events, unset, list, c.events, c.unset, c.list)
		}
		w.env.Lists.Gates.Latest = false
		if list := of(&yes); list != c.withoutGate {
			t.Errorf("%q without the gate: start %d, want %d", c.version, list, c.withoutGate)
		}
		w.env.Lists.Gates.Latest = true
		fresh := w.env.Lists.Fresh
		w.env.Lists.Fresh = freshness.New(w.Mirror, w.Resource, w.env.Lists.View.Kind().GroupResource, true)
		if list := of(&yes); list != c.eventsOnly {
			t.Errorf("%q by events only: start %d, want %d", c.version, list, c.eventsOnly)
		}
		w.env.Lists.Fresh = fresh
	}
}

// TestOpen_Refused_Returns429 without a stream: at once if the server has refused watches before,
// and if etcd was restored.
func TestOpen_Refused_Returns429(t *testing.T) {
	for name, c := range map[string]struct {
		refuse func(w *fixture)
		took   time.Duration
	}{
		"shut down before": {func(w *fixture) { w.running.Refuse() }, 0},
		"shut down meanwhile": {func(w *fixture) {
			time.AfterFunc(time.Second, func() { w.running.Refuse(); w.Etcd.Stall(false) })
		}, time.Second},
		"etcd restored": {func(w *fixture) { w.Etcd.FailReadRevision(mirror.ErrRestored) }, 0},
		"memory behind": {func(*fixture) {}, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				w.Etcd.Stall(true)
				w.Put(t, podtest.Pod("a"))
				c.refuse(w)
				began := time.Now()
				st, err := w.env.Open(t.Context(), "/pods", everything())
				if took := time.Since(began); !apierrors.IsTooManyRequests(err) || st != nil || took != c.took {
					t.Errorf("%v after %s, want 429 after %s", err, took, c.took)
				}
			})
		})
	}
}

// TestOpen_BeforeLoad_WaitsForIt.
func TestOpen_BeforeLoad_WaitsForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		etcd := memory.New()
		etcd.FailLists(errors.New("not yet"))
		w := newFixture(t, func(o *podtest.Options) { o.Etcd, o.Unloaded = etcd, true })
		time.AfterFunc(time.Millisecond, func() { etcd.FailLists(nil) })
		w.open(t, t.Context(), after(0))
	})
}

// TestBeginAfter_NotLoaded_ReturnsError: the stream has no cursor.
func TestBeginAfter_NotLoaded_ReturnsError(t *testing.T) {
	etcd := memory.New()
	etcd.FailLists(errors.New("not yet"))
	w := newFixture(t, func(o *podtest.Options) { o.Etcd, o.Unloaded = etcd, true })
	st := &Stream{env: w.env}
	st.life.ctx = t.Context()
	if err := st.beginAfter(1); !errors.Is(err, mirror.ErrNotReady) {
		t.Errorf("the error is %v, want %v", err, mirror.ErrNotReady)
	}
}

// TestOpen_Bookmarks_WantProgress of etcd until the end of the watch; other watches do not.
func TestOpen_Bookmarks_WantProgress(t *testing.T) {
	w := newFixture(t)
	for bookmarks, want := range map[bool]int{true: 1, false: 0} {
		opts := w.fromNow()
		opts.Predicate.AllowWatchBookmarks = bookmarks
		if n := len(w.open(t, podtest.Context(t), opts).life.releases); n != want {
			t.Errorf("with bookmarks: %t: Close releases %d, want %d", bookmarks, n, want)
		}
	}
}
