package semantics

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestWatch_FutureRevision_DeliversLaterEvents watches from a resource version that is reached
// later.
func TestWatch_FutureRevision_DeliversLaterEvents(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	created := createMaps(t, ctx, ns, "a")[0]
	future := harness.Revision(t, created.Metadata.ResourceVersion) + 20
	w := harness.StartWatch(t, ctx, api, maps(ns), fmt.Sprintf("resourceVersion=%d", future))
	var want []string
	for i := 0; len(want) < 3; i++ {
		patched := harness.Must[harness.Object](t)(api.Patch(ctx, maps(ns)+"/a", fmt.Sprintf(`{"data":{"i":"%d"}}`, i)))
		if harness.Revision(t, patched.Metadata.ResourceVersion) > future {
			want = append(want, patched.Metadata.ResourceVersion)
		}
	}
	for _, version := range want {
		if o := expectEvent(t, ctx, w, "MODIFIED", "a"); o.Metadata.ResourceVersion != version {
			t.Fatalf("got the event at %s, want that at %s: watch at %d", o.Metadata.ResourceVersion, version, future)
		}
	}
}

// TestBookmarks_Requested_PrecedeWatchTimeout watches until the server ends the watch: with
// allowWatchBookmarks there is a bookmark before the end, otherwise none.
func TestBookmarks_Requested_PrecedeWatchTimeout(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	// A busy machine may take longer for the writes than the server takes to the last bookmark.
	for seconds := 8; ; seconds *= 2 {
		err := bookmarksBeforeEnd(t, ctx, seconds)
		if err == nil {
			return
		}
		if seconds > 30 {
			t.Fatal(err)
		}
		t.Logf("watches of %d s: %v", seconds, err)
	}
}

// bookmarksBeforeEnd returns an error unless watches of some seconds have the writes in time, and
// the bookmarks that are due.
func bookmarksBeforeEnd(t *testing.T, ctx context.Context, seconds int) error {
	t.Helper()
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	created := createMaps(t, ctx, ns, "a")[0]
	// Upstream sends a bookmark two seconds before the end of a watch.
	query := fmt.Sprintf("timeoutSeconds=%d&fieldSelector=metadata.name%%3Da&resourceVersion=%s", seconds, created.Metadata.ResourceVersion)
	with := harness.StartWatch(t, ctx, api, maps(ns), "allowWatchBookmarks=true&"+query)
	without := harness.StartWatch(t, ctx, api, maps(ns), query)
	patched := harness.Must[harness.Object](t)(api.Patch(ctx, maps(ns)+"/a", `{"data":{"v":"last"}}`))
	unrelated := createMaps(t, ctx, ns, "b", "c")[1]

	collect := func(w *harness.Watch) (events []harness.Event) {
		for {
			e, err := w.Next(ctx)
			if errors.Is(err, harness.ErrEnded) {
				return events
			}
			harness.Check(t, err)
			events = append(events, e)
		}
	}
	var events, plain []harness.Event
	var reading sync.WaitGroup
	reading.Go(func() { plain = collect(without) })
	events = collect(with)
	reading.Wait()

	if len(plain) != 1 || plain[0].Type != "MODIFIED" {
		return fmt.Errorf("without bookmarks: got %d events, want one MODIFIED", len(plain))
	}
	if len(events) < 2 || events[0].Type != "MODIFIED" || events[0].Object.Metadata.ResourceVersion != patched.Metadata.ResourceVersion {
		return fmt.Errorf("with bookmarks: got %d events, want MODIFIED and at least one bookmark", len(events))
	}
	last := events[0].Object.Metadata.ResourceVersion
	for _, e := range events[1:] {
		if e.Type != "BOOKMARK" || harness.Revision(t, e.Object.Metadata.ResourceVersion) < harness.Revision(t, last) {
			t.Errorf("got %s at %s after %s, want bookmarks that move on", e.Type, e.Object.Metadata.ResourceVersion, last)
		}
		if o := e.Object; o.Kind != "ConfigMap" || o.Metadata.Name != "" || len(o.Data) != 0 {
			t.Errorf("bookmark holds %+v, want a resource version only", o)
		}
		last = e.Object.Metadata.ResourceVersion
	}
	// Bookmarks advance with the revision, not only with selected events.
	if harness.Revision(t, last) < harness.Revision(t, unrelated.Metadata.ResourceVersion) {
		return fmt.Errorf("last bookmark at %s, before the change of another object at %s", last, unrelated.Metadata.ResourceVersion)
	}
	return nil
}
