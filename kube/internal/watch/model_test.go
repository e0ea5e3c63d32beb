package watch

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// eventsOf returns the events of a watch with the selector after the revision m.Revs[at].
func eventsOf(t *testing.T, m *podtest.Model, at int, pred storage.SelectionPredicate) (events []string) {
	t.Helper()
	for i := at + 1; i < len(m.Revs); i++ {
		for _, key := range m.Changed[i] {
			before, now := podtest.Matches(t, pred, m.Past[i-1][key]), podtest.Matches(t, pred, m.Past[i][key])
			typ := watch.Modified
			switch {
			case !before && !now:
				continue
			case !before:
				typ = watch.Added
			case !now:
				typ = watch.Deleted
			}
			events = append(events, fmt.Sprintf("%s %s@%d", typ, strings.TrimPrefix(key, podtest.Root), m.Revs[i]))
		}
	}
	return events
}

// selectorWatch is a watch with a random selector.
type selectorWatch struct {
	pred   storage.SelectionPredicate
	events chan watch.Event
	at     int  // in Model.Revs; -1: with initial events
	ended  bool // a bookmark ends the initial events
}

func (c *selectorWatch) String() string { return fmt.Sprintf("%q %q", c.pred.Label, c.pred.Field) }

// watch begins a watch: from an old revision, with initial events, or with initial events that a
// bookmark ends.
func (f *fixture) watch(t *testing.T, ctx context.Context, m *podtest.Model, how int) *selectorWatch {
	t.Helper()
	c := &selectorWatch{pred: m.Selector(t), at: -1}
	opts := storage.ListOptions{Recursive: true, Predicate: c.pred}
	switch how {
	case 0:
		c.at = m.Rand.IntN(len(m.Revs))
		opts.ResourceVersion = fmt.Sprint(m.Revs[c.at])
	case 1:
		c.ended, opts.SendInitialEvents, opts.ResourceVersionMatch = true, new(true), metav1.ResourceVersionMatchNotOlderThan
		opts.Predicate.AllowWatchBookmarks = true
	}
	w, err := f.env.Watch(ctx, "/pods", opts)
	for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ { // memory is late
		w, err = f.env.Watch(ctx, "/pods", opts)
	}
	if err != nil {
		t.Fatal(err)
	}
	// The events are read at once: a watch ends if its client does not read the initial events in
	// time.
	c.events = make(chan watch.Event, 1<<13) // more than the test makes
	done := make(chan struct{})
	t.Cleanup(func() { w.Stop(); <-done })
	go func() {
		defer close(done)
		defer close(c.events)
		for ev := range w.ResultChan() {
			select {
			case c.events <- ev:
			case <-ctx.Done():
			}
		}
	}()
	return c
}

// next returns the next event.
func (c *selectorWatch) next(t *testing.T, ctx context.Context) (watch.EventType, *example.Pod) {
	t.Helper()
	select {
	case ev, ok := <-c.events:
		if !ok || ev.Type == watch.Error {
			t.Fatalf("%v: watch ended: %+v", c, ev)
		}
		obj := ev.Object
		if shared, ok := obj.(runtime.CacheableObject); ok {
			obj = shared.GetObject()
		}
		return ev.Type, obj.(*example.Pod)
	case <-ctx.Done():
		t.Fatalf("%v: no further event", c)
	}
	return "", nil
}

// initial compares the initial events with the model at the revision of the bookmark, after which
// the watch continues.
func (c *selectorWatch) initial(t *testing.T, ctx context.Context, m *podtest.Model) {
	t.Helper()
	var got []string
	typ, pod := c.next(t, ctx)
	for ; typ != watch.Bookmark; typ, pod = c.next(t, ctx) {
		got = append(got, fmt.Sprintf("%s %s/%s", typ, pod.Namespace, pod.Name))
	}
	rev, err := strconv.ParseInt(pod.ResourceVersion, 10, 64)
	if err != nil || pod.Annotations[metav1.InitialEventsAnnotationKey] != "true" {
		t.Fatalf("%v: the bookmark %+v does not end the initial events (%v)", c, pod.ObjectMeta, err)
	}
	if c.at = slices.Index(m.Revs, rev); c.at < 0 {
		t.Fatalf("%v: the bookmark has the revision %d, at which no pod has changed", c, rev)
	}
	var want []string
	for _, path := range m.Selected(t, c.at, "", c.pred) {
		want = append(want, fmt.Sprintf("%s %s", watch.Added, path))
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%v: initial events at %d: %v, want %v", c, rev, got, want)
	}
}

// follow compares the events with those of the model, in order. It skips bookmarks.
func (c *selectorWatch) follow(t *testing.T, ctx context.Context, m *podtest.Model) {
	t.Helper()
	for _, want := range eventsOf(t, m, c.at, c.pred) {
		typ, pod := c.next(t, ctx)
		for typ == watch.Bookmark {
			typ, pod = c.next(t, ctx)
		}
		if got := fmt.Sprintf("%s %s/%s@%s", typ, pod.Namespace, pod.Name, pod.ResourceVersion); got != want {
			t.Fatalf("%v after %d: %s, want %s", c, m.Revs[c.at], got, want)
		}
	}
}

// reach reads until the watch has led to the objects that its selector selects at the end.
func (c *selectorWatch) reach(t *testing.T, ctx context.Context, m *podtest.Model) {
	t.Helper()
	state := map[string]bool{}
	want := slices.Sorted(slices.Values(m.Selected(t, len(m.Revs)-1, "", c.pred)))
	for !slices.Equal(slices.Sorted(maps.Keys(state)), want) {
		typ, pod := c.next(t, ctx)
		path := pod.Namespace + "/" + pod.Name
		if state[path] == (typ == watch.Added) {
			t.Fatalf("%v: %s of %s, selected before: %v", c, typ, path, state[path])
		}
		if state[path] = true; typ == watch.Deleted {
			delete(state, path)
		}
	}
}

// TestSelectors_Watches_EqualModel watches with random selectors while pods change. The events from
// old revisions are those of the model in order. Initial events lead to the objects that the
// selector selects at the end; with a bookmark that closes them, they are the selected objects at
// its revision in key order, and the model's events after it follow.
func TestSelectors_Watches_EqualModel(t *testing.T) {
	t.Parallel()
	f, m := newFixture(t), podtest.NewModel(testseed.New(t), 2)
	ctx := podtest.Context(t)
	for range 300 {
		m.Step(t, f.Etcd)
	}
	f.CatchUp(t)
	var watches []*selectorWatch
	for i := range 90 {
		watches = append(watches, f.watch(t, ctx, m, i%3))
		for range m.Rand.IntN(20) {
			m.Step(t, f.Etcd)
		}
	}
	for _, c := range watches {
		if c.ended {
			c.initial(t, ctx, m)
		}
		if c.at >= 0 {
			c.follow(t, ctx, m)
		} else {
			c.reach(t, ctx, m)
		}
	}
}
