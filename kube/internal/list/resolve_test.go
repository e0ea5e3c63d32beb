package list

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Revisions of a history: one pod was written at each, up to unseen.
const (
	compacted mirror.Revision = 2 + iota // in etcd and in memory
	older                                // in etcd, older than memory
	oldest                               // in memory
	old                                  // in memory
	now                                  // the published one
	unseen                               // in etcd, newer than memory

	future = unseen + 10 // not in etcd
	beyond = mirror.Revision(math.MaxInt64)
	none   = mirror.Revision(-1) // no resource version, or no token
)

// history is an etcd whose feed is stalled.
type history struct{ *fixture }

func newHistory(t *testing.T, change ...func(*options)) *history {
	t.Helper()
	h := &history{newFixture(t, change...)}
	h.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"))
	h.olderThanMemory(t)
	h.Etcd.Compact(older)
	h.Put(t, podtest.Pod("d"), podtest.Pod("e"))
	h.CatchUp(t)
	h.Etcd.Stall(true)
	if rev := h.Put(t, podtest.Pod("f")); rev != unseen || h.Mirror.PublishedRevision() != now {
		t.Fatalf("etcd is at %d, memory at %d", rev, h.Mirror.PublishedRevision())
	}
	return h
}

// version is the resource version of a revision.
func version(rev mirror.Revision) string {
	if rev == none {
		return ""
	}
	return fmt.Sprint(rev)
}

// start resolves a list in the background and returns its outcome, which begins with "waits, " if
// the list waits for memory. Memory catches up then, or never.
func (h *history) start(t *testing.T, opts storage.ListOptions, catchesUp bool) string {
	t.Helper()
	done := make(chan string, 1)
	go func() {
		r, err := h.env.Read(t.Context(), "/pods/", opts)
		done <- h.outcome(r, err)
	}()
	synctest.Wait()
	waits := ""
	if len(done) == 0 {
		waits = "waits, "
		h.Etcd.Stall(!catchesUp)
	}
	return waits + <-done
}

const exact, notOlder = metav1.ResourceVersionMatchExact, metav1.ResourceVersionMatchNotOlderThan

// starts are the rows of KEP-2340's table for a memory that is behind etcd.
var starts = []struct {
	row     string // of docs/keps.md
	version mirror.Revision
	match   metav1.ResourceVersionMatch
	limit   int64
	token   mirror.Revision
	// the outcomes if memory never catches up, and if it does; "" for once: as never
	never, once string
}{
	{"L1", none, "", 0, none, "waits, 429", "waits, memory@7"},
	{"L1", none, "", 2, none, "waits, 429", "waits, memory@7"},
	{"L2", none, "", 2, now, "memory@6", ""},
	{"L2", none, "", 0, old, "memory@5", ""},
	{"L2", none, "", 2, older, "etcd@3", ""},
	{"L2", none, "", 2, compacted, "410", ""},
	{"L2", none, "", 2, unseen, "waits, 429", "waits, memory@7"},
	{"L2", none, "", 2, future, "too large: 504", ""},
	{"L2", none, "", 2, -2, "waits, 429", "waits, memory@7"}, // of the 410: at the latest revision
	{"L6", 0, "", 0, none, "memory@6", ""},
	{"L6", 0, "", 2, none, "memory@6", ""},
	{"L7", 0, "", 2, old, "memory@5", ""},
	{"L7", 0, "", 2, -2, "waits, 429", "waits, memory@7"},
	{"L9", 0, notOlder, 2, none, "memory@6", ""},
	{"L11", compacted, "", 0, none, "memory@6", ""},
	{"L11", old, "", 0, none, "memory@6", ""},
	{"L11", unseen, "", 0, none, "waits, too large: 504", "waits, memory@7"},
	{"L11", future, "", 0, none, "waits, too large: 504", ""},
	{"L11", beyond, "", 0, none, "waits, too large: 504", ""},
	{"L12", old, "", 2, none, "memory@5", ""},
	{"L12", older, "", 2, none, "etcd@3", ""},
	{"L12", compacted, "", 2, none, "410", ""},
	{"L12", unseen, "", 2, none, "waits, 429", "waits, memory@7"},
	{"L12", future, "", 2, none, "too large: 504", ""},
	{"L13", now, "", 2, now, "400", ""},
	{"L14", now, exact, 0, none, "memory@6", ""},
	{"L14", old, exact, 2, none, "memory@5", ""},
	{"L14", oldest, exact, 0, none, "memory@4", ""},
	{"L14", older, exact, 0, none, "etcd@3", ""},
	{"L14", compacted, exact, 0, none, "410", ""},
	{"L14", unseen, exact, 0, none, "waits, 429", "waits, memory@7"},
	{"L14", future, exact, 0, none, "too large: 504", ""},
	{"L14", beyond, exact, 0, none, "too large: 504", ""},
	{"L16", old, notOlder, 0, none, "memory@6", ""},
	{"L16", future, notOlder, 0, none, "waits, too large: 504", ""},
	{"L17", older, notOlder, 2, none, "memory@6", ""},
	{"L17", unseen, notOlder, 2, none, "waits, too large: 504", "waits, memory@7"},
}

// TestRead_EveryCombination_IsOfKEP2340: the start of a list by resource version, match, limit and
// token.
func TestRead_EveryCombination_IsOfKEP2340(t *testing.T) {
	for _, c := range starts {
		for _, catchesUp := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: version(c.version), ResourceVersionMatch: c.match}
				if opts.Predicate.Limit = c.limit; c.token != none {
					opts.Predicate.Continue = token(t, "a", c.token)
				}
				want := c.never
				if catchesUp && c.once != "" {
					want = c.once
				}
				if got := newHistory(t).start(t, opts, catchesUp); got != want {
					t.Errorf("%s: %s, memory catches up: %t: %q, want %q", c.row, describe(opts), catchesUp, got, want)
				}
			})
		}
	}
}

// TestRead_GatesAndProgress_SendListsToEtcd: with a gate off, and where only events move the
// published revision, etcd has to answer.
func TestRead_GatesAndProgress_SendListsToEtcd(t *testing.T) {
	latest, atRevision := Gates{Latest: true}, Gates{AtRevision: true}
	both := Gates{Latest: true, AtRevision: true}
	for _, c := range []struct {
		gates      Gates
		eventsOnly bool
		version    mirror.Revision
		match      metav1.ResourceVersionMatch
		token      mirror.Revision
		want       string
	}{
		{atRevision, false, none, "", none, "needs etcd: gate"},
		{atRevision, false, none, "", -2, "needs etcd: gate"},
		{atRevision, false, none, "", old, "memory@5"},
		{atRevision, false, old, exact, none, "memory@5"},
		{atRevision, false, now, exact, none, "memory@6"},
		{atRevision, false, unseen, exact, none, "needs etcd: gate"}, // see fromMemory
		{atRevision, false, old, "", none, "memory@6"},
		{atRevision, false, 0, "", none, "memory@6"},
		{latest, false, none, "", none, "waits, memory@7"},
		{latest, false, none, "", -2, "needs etcd: gate"},
		{latest, false, none, "", old, "needs etcd: gate"},
		{latest, false, old, exact, none, "needs etcd: gate"},
		{latest, false, 0, "", none, "memory@6"},
		{Gates{}, false, unseen, "", none, "waits, memory@7"},
		{both, true, now, "", none, "memory@6"},
		{both, true, unseen, "", none, "needs etcd: no_progress"},
		{both, true, future, "", none, "needs etcd: no_progress"},
	} {
		synctest.Test(t, func(t *testing.T) {
			h := newHistory(t, func(o *options) { o.eventsOnly = c.eventsOnly })
			h.env.Gates = c.gates
			opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: version(c.version), ResourceVersionMatch: c.match}
			if c.token != none {
				opts.Predicate.Continue = token(t, "a", c.token)
			}
			if got := h.start(t, opts, true); got != c.want {
				t.Errorf("%+v, events only: %t, %s: %q, want %q", c.gates, c.eventsOnly, describe(opts), got, c.want)
			}
		})
	}
}

// TestRead_InvalidRequest_IsRefused without a wait. The metrics count a compacted revision as
// expired, and nothing else.
func TestRead_InvalidRequest_IsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHistory(t)
		h.Etcd.Stall(false)
		elsewhere, err := storage.EncodeContinue("/registry/pods/../secrets/a", "/registry/pods/", now)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []struct {
			key     string
			opts    storage.ListOptions
			want    string
			expired float64
		}{
			{"/pods/", storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: "x"}, "400", 0},
			{"/pods/", storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: "-1"}, "400", 0},
			{"/pods/", storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: "1", ResourceVersionMatch: "Newest"}, "error", 0},
			{"/pods/", continued(everything(), "garbage"), "400", 0},
			{"/pods/", continued(everything(), "s1.garbage"), "400", 0},
			{"/pods/", continued(everything(), elsewhere), "400", 0},
			{"/pods/", continued(everything(), token(t, "a", 0)), "400", 0},
			{"/secrets/", everything(), "error", 0},
			{"/pods/../secrets/", everything(), "error", 0},
			{"/pods/", exactly(everything(), compacted), "410", 1},
		} {
			before := h.series(t, "strata_lists_expired_total")
			r, err := h.env.Read(t.Context(), c.key, c.opts)
			if got := h.outcome(r, err); got != c.want {
				t.Errorf("%s, %s: %q (%v), want %q", c.key, describe(c.opts), got, err, c.want)
			}
			if n := h.series(t, "strata_lists_expired_total") - before; n != c.expired {
				t.Errorf("%s, %s: %v lists counted as expired, want %v", c.key, describe(c.opts), n, c.expired)
			}
		}
	})
}

// TestRead_BeyondMaximum_ErrorHasNumberOfClient: numbers that parse, but exceed every possible
// revision, are in the future. An exact one is refused without a wait.
func TestRead_BeyondMaximum_ErrorHasNumberOfClient(t *testing.T) {
	for _, number := range []string{"9223372036854775807", "9223372036854775808", "18446744073709551615"} {
		for _, match := range []metav1.ResourceVersionMatch{"", exact, notOlder} {
			for _, limit := range []int64{0, 1} {
				synctest.Test(t, func(t *testing.T) {
					f := newFixture(t)
					opts := limited(everything(), limit)
					opts.ResourceVersion, opts.ResourceVersionMatch = number, match
					began := time.Now()
					_, err := f.env.Read(t.Context(), "/pods/", opts)
					atOnce := match == exact || match == "" && limit > 0
					if wait := time.Since(began); (wait == 0) != atOnce {
						t.Errorf("%s: refused after %s", describe(opts), wait)
					}
					if !storage.IsTooLargeResourceVersion(err) || !strings.Contains(err.Error(), "Too large resource version: "+number+",") {
						t.Errorf("%s: %v, want 504 with the number", describe(opts), err)
					}
				})
			}
		}
	}
}

// TestRead_OneKey_HasNoOther: neither those of which the key is a prefix, nor a page of the legacy
// form.
func TestRead_OneKey_HasNoOther(t *testing.T) {
	f := newFixture(t)
	first := f.Put(t, podtest.Pod("a"), podtest.Pod("aa"), podtest.Pod("a-b"))
	f.Put(t, podtest.Labelled("a", "n", "2"))
	f.CatchUp(t)
	opts := everything()
	opts.Recursive, opts.Predicate.Limit, opts.ResourceVersion = false, 1, fmt.Sprint(first)
	list := f.list(t, "/pods/ns/a", opts)
	if names(list) != "a" || list.Items[0].Labels["n"] != "2" || list.Continue != "" {
		t.Errorf("%v, continue %q", list.Items, list.Continue)
	}
	opts.ResourceVersion = ""
	if list := f.list(t, "/pods/ns/b", opts); len(list.Items) != 0 {
		t.Errorf("a key without an object has %q", names(list))
	}
}

// unloaded makes a fixture whose pods cannot be listed before release is called.
func unloaded(t *testing.T) (f *fixture, release func()) {
	t.Helper()
	etcd := memory.New()
	etcd.Put(podtest.Key(podtest.Pod("a")), podtest.Stored(t, podtest.Pod("a")))
	etcd.FailLists(errors.New("not yet"))
	return newFixture(t, func(o *options) { o.Etcd, o.Unloaded = etcd, true }), func() { etcd.FailLists(nil) }
}

// TestRead_BeforeLoad_WaitsUnlessPageIsSmall (KEP-4568): etcd answers pages of the latest state,
// because they are cheap. Other lists wait for the load, and get 429 if it takes long.
//
// A page at an exact revision continues a list of a client that has a page of this server, and many
// of them come at once after a restart: it waits.
func TestRead_BeforeLoad_WaitsUnlessPageIsSmall(t *testing.T) {
	const rev = 2 // of the pod
	page := limited(everything(), 1)
	pageBelowSelector := limited(selecting(podtest.Selecting(t, "a=b", "")), 1)
	anyVersion := page
	anyVersion.ResourceVersion = "0"
	for name, c := range map[string]struct {
		opts storage.ListOptions
		want string // "" for a list that waits
	}{
		"page":                 {page, "needs etcd: not_loaded"},
		"page, any version":    {anyVersion, "needs etcd: not_loaded"},
		"page with a selector": {pageBelowSelector, ""},
		"page at a revision":   {exactly(page, rev), ""},
		"page of a token":      {continued(page, token(t, "", rev)), ""},
		"list":                 {everything(), ""},
		"list at a revision":   {exactly(everything(), rev), ""},
	} {
		for _, loads := range []bool{false, true} {
			synctest.Test(t, func(t *testing.T) {
				f, release := unloaded(t)
				done := make(chan string, 1)
				go func() {
					r, err := f.env.Read(t.Context(), "/pods/", c.opts)
					done <- f.outcome(r, err)
				}()
				synctest.Wait()
				if want := c.want; want != "" {
					if len(done) == 0 || <-done != want {
						t.Errorf("%s is not answered, or not %q", name, want)
					}
					return
				}
				if len(done) != 0 {
					t.Fatalf("%s is answered before the load: %q", name, <-done)
				}
				want := "429"
				if loads {
					release()
					want = fmt.Sprintf("memory@%d", rev)
				}
				if got := <-done; got != want {
					t.Errorf("%s, loaded: %t: %q, want %q", name, loads, got, want)
				}
			})
		}
	}
}

// TestRead_EtcdRestored_IsNotReady until everything is relisted; then it has the restored state.
func TestRead_EtcdRestored_IsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		was := f.Put(t, podtest.Pod("old"))
		f.CatchUp(t)
		f.Etcd.FailLists(errors.New("not yet"))
		f.Etcd.Restore(was-1, map[string]string{podtest.Key(podtest.Pod("new")): podtest.Stored(t, podtest.Pod("new"))})
		_, err := f.env.Read(t.Context(), "/pods/", everything())
		if !apierrors.IsTooManyRequests(err) || !strings.Contains(err.Error(), storage.ErrStorageNotReady.Error()) {
			t.Errorf("%v, want that the storage is not ready", err)
		}
		f.Etcd.FailLists(nil)
		podtest.Eventually(t, "the restored state is listed", func() bool {
			return f.Mirror.PublishedRevision() == was-1 && f.Resource.Ready()
		})
		if got := names(f.list(t, "/pods/", everything())); got != "new" {
			t.Errorf("list has %q", got)
		}
	})
}

// TestRead_InconsistentMemory_ReadsHistoryFromEtcd: after a check that found lost changes, lists at
// a revision come from etcd until the next check. The latest state was repaired.
func TestRead_InconsistentMemory_ReadsHistoryFromEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		first := f.Put(t, podtest.Pod("a"))
		f.CatchUp(t)
		lost := podtest.Key(podtest.Pod("lost"))
		f.Etcd.DropIf(func(c driver.Change) bool { return string(c.Key) == lost })
		f.Put(t, podtest.Pod("lost"), podtest.Pod("b"))
		f.CatchUp(t)
		f.Etcd.DropIf(nil)
		if got := names(f.list(t, "/pods/", everything())); got != "a b" {
			t.Fatalf("no event was lost: %q", got)
		}
		check := func(differences int) {
			t.Helper()
			if c, err := f.Resource.Check(t.Context(), nil); err != nil || len(c.Differences) != differences {
				t.Fatalf("check: %+v, %v", c, err)
			}
		}
		check(1)
		at := f.Mirror.PublishedRevision()
		for rev, want := range map[mirror.Revision]string{first: "a", at: "a b lost"} {
			before := f.series(t, "strata_lists_total", "source", metrics.SourceEtcd, "reason", metrics.ReasonDifference)
			if got := names(f.list(t, "/pods/", exactly(everything(), rev))); got != want {
				t.Errorf("list at %d has %q, want %q", rev, got, want)
			}
			if n := f.series(t, "strata_lists_total", "source", metrics.SourceEtcd, "reason", metrics.ReasonDifference) - before; n != 1 {
				t.Errorf("%v lists at %d counted from etcd, want 1", n, rev)
			}
		}
		if r := f.read(t, everything()); r.FromEtcd() || r.Count() != 3 {
			t.Errorf("latest state: from etcd: %t, %d pods", r.FromEtcd(), r.Count())
		}
		check(0)
		if r := f.read(t, exactly(everything(), at)); r.FromEtcd() {
			t.Error("after a check without differences: from etcd")
		}
	})
}

// TestRead_ThatMayTakeLong_IsTracked: the mirror's statistics count reads whose snapshot is not the
// latest one: a list of many pods without a limit, and one of an old revision.
func TestRead_ThatMayTakeLong_IsTracked(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, longReading)
	f.CatchUp(t)
	short := f.read(t, everything())
	old := f.Put(t, podtest.Pod("one-more"))
	f.CatchUp(t)
	whole, page := f.read(t, everything()), f.read(t, limited(everything(), 2*longReading))
	f.Put(t, podtest.Pod("later"))
	f.CatchUp(t)
	past := f.read(t, limited(exactly(everything(), old), 1))
	tracked := func(want int) {
		t.Helper()
		if n := f.Resource.Stats().Readers; n != want {
			t.Errorf("%d reads are tracked, want %d", n, want)
		}
	}
	tracked(2)
	short.Close()
	page.Close()
	tracked(2)
	whole.Close()
	tracked(1)
	past.Close()
	tracked(0)
}

// TestRead_Sources_AreCounted by source and reason, and pages by whether they continue.
func TestRead_Sources_AreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHistory(t)
		h.Etcd.Stall(false)
		h.CatchUp(t)
		notOlder := limited(everything(), 1)
		notOlder.ResourceVersion, notOlder.ResourceVersionMatch = version(old), metav1.ResourceVersionMatchNotOlderThan
		legacy := notOlder
		legacy.ResourceVersionMatch = ""
		anyVersion := everything()
		anyVersion.ResourceVersion = "0"
		for _, c := range []struct {
			source, reason string
			opts           storage.ListOptions
			page           string // the label continued, "" if the list is none
		}{
			{metrics.SourcePresent, metrics.ReasonConsistent, everything(), ""},
			{metrics.SourcePresent, metrics.ReasonConsistent, limited(everything(), 1), "false"},
			{metrics.SourcePresent, metrics.ReasonAny, anyVersion, ""},
			{metrics.SourcePresent, metrics.ReasonNotOlder, notOlder, "false"},
			{metrics.SourcePresent, metrics.ReasonExact, exactly(everything(), unseen), ""},
			{metrics.SourcePresent, metrics.ReasonInconsistent, continued(everything(), token(t, "a", -2)), "true"},
			{metrics.SourcePast, metrics.ReasonExact, exactly(everything(), old), ""},
			{metrics.SourcePast, metrics.ReasonLegacy, legacy, "false"},
			{metrics.SourcePast, metrics.ReasonContinue, continued(everything(), token(t, "a", old)), "true"},
			{metrics.SourceEtcd, metrics.ReasonPast, exactly(everything(), older), ""},
		} {
			count := func() (lists, pages, other float64) {
				lists = h.series(t, "strata_lists_total", "source", c.source, "reason", c.reason)
				return lists, h.series(t, "strata_list_pages_total", "continued", "true"), h.series(t, "strata_list_pages_total", "continued", "false")
			}
			lists, pages, other := count()
			h.list(t, "/pods/", c.opts)
			l, p, o := count()
			if l != lists+1 || (p != pages) != (c.page == "true") || (o != other) != (c.page == "false") {
				t.Errorf("%s, %s: %v lists counted, %v pages that continue, %v others", c.source, c.reason, l-lists, p-pages, o-other)
			}
		}
		if n := h.Resource.Stats().Readers; n != 0 {
			t.Errorf("%d readers of old revisions are counted after the last has ended", n)
		}
	})
}
