package watch

import (
	"testing"

	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/test/podtest"
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
