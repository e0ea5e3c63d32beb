package semantics

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// initialEventsEnd reports whether e is the bookmark after the initial events.
func initialEventsEnd(e harness.Event) bool {
	return e.Type == "BOOKMARK" && e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true"
}

// TestWatch_InitialEvents_EndWithBookmark watches with selectors and across namespaces.
func TestWatch_InitialEvents_EndWithBookmark(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	for i, name := range numbered(30) {
		_, err := api.Create(ctx, maps(ns), configMap(name, map[string]string{"third": fmt.Sprint(i % 3)}))
		harness.Check(t, err)
	}
	const initial = "&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
	for _, tc := range []struct{ path, query string }{
		{maps(ns), ""},
		{maps(ns), "labelSelector=third%3D1"},
		{maps(ns), "labelSelector=third%3Dnone"},
		{maps(ns), "fieldSelector=metadata.name%3Dmap-0007"},
		{"/api/v1/configmaps", "labelSelector=third%3D1"},
		{"/api/v1/configmaps", "fieldSelector=metadata.namespace%3D" + ns},
	} {
		want := harness.Must[*harness.List](t)(api.List(ctx, tc.path, tc.query))
		w := harness.StartWatch(t, ctx, api, tc.path, tc.query+initial)
		var got []harness.Object
		for {
			e := harness.Must[harness.Event](t)(w.Next(ctx))
			if initialEventsEnd(e) {
				break
			}
			if e.Type != "ADDED" {
				t.Fatalf("%s?%s: got %s, want ADDED only", tc.path, tc.query, e.Type)
			}
			got = append(got, e.Object)
		}
		equalVersions(t, tc.path+"?"+tc.query, got, want.Items)
	}
	// Without allowWatchBookmarks there is none at the end.
	w := harness.StartWatch(t, ctx, api, maps(ns), strings.Replace(initial, "allowWatchBookmarks=true", "allowWatchBookmarks=false", 1))
	for range 30 {
		if e := harness.Must[harness.Event](t)(w.Next(ctx)); e.Type != "ADDED" {
			t.Fatalf("got %s", e.Type)
		}
	}
	createMaps(t, ctx, ns, "fence")
	if e := harness.Must[harness.Event](t)(w.Next(ctx)); e.Type != "ADDED" || e.Object.Metadata.Name != "fence" {
		t.Errorf("got %s of %q, want ADDED of fence", e.Type, e.Object.Metadata.Name)
	}
}

// TestWatch_LabelChange_SendsAddedAndDeleted changes labels so that an object starts and stops
// matching.
func TestWatch_LabelChange_SendsAddedAndDeleted(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	start := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "")).Metadata.ResourceVersion
	query := "labelSelector=color%3Dred&resourceVersion=" + start
	live := harness.StartWatch(t, ctx, api, maps(ns), query)

	write := func(method, body string) harness.Object {
		t.Helper()
		switch method {
		case "create":
			return harness.Must[harness.Object](t)(api.Create(ctx, maps(ns), body))
		default:
			return harness.Must[harness.Object](t)(api.Patch(ctx, maps(ns)+"/a", body))
		}
	}
	_ = write("create", `{"metadata":{"name":"a","labels":{"color":"blue"}},"data":{"v":"1"}}`)
	added := write("patch", `{"metadata":{"labels":{"color":"red"}},"data":{"v":"2"}}`)
	modified := write("patch", `{"data":{"v":"3"}}`)
	left := write("patch", `{"metadata":{"labels":{"color":"green"}},"data":{"v":"4"}}`)
	_ = write("patch", `{"data":{"v":"5"}}`)
	again := write("patch", `{"metadata":{"labels":{"color":"red"}},"data":{"v":"6"}}`)
	harness.Check(t, api.Delete(ctx, maps(ns)+"/a"))

	// The same events from history as from the live watch.
	for name, w := range map[string]*harness.Watch{"live": live, "from history": harness.StartWatch(t, ctx, api, maps(ns), query)} {
		t.Run(name, func(t *testing.T) {
			expect := func(kind, version, value, color string) {
				t.Helper()
				o := expectEvent(t, ctx, w, kind, "a")
				if version != "" && o.Metadata.ResourceVersion != version {
					t.Errorf("%s has resource version %s, want %s", kind, o.Metadata.ResourceVersion, version)
				}
				if o.Data["v"] != value || o.Metadata.Labels["color"] != color {
					t.Errorf("%s has v=%s color=%s, want v=%s color=%s", kind, o.Data["v"], o.Metadata.Labels["color"], value, color)
				}
			}
			expect("ADDED", added.Metadata.ResourceVersion, "2", "red")
			expect("MODIFIED", modified.Metadata.ResourceVersion, "3", "red")
			// The previous state with the new resource version.
			expect("DELETED", left.Metadata.ResourceVersion, "3", "red")
			expect("ADDED", again.Metadata.ResourceVersion, "6", "red")
			expect("DELETED", "", "6", "red")
		})
	}
}

// TestWatch_PodBinding_SendsAddedForNode binds pods to nodes, like a scheduler, and watches like
// kubelets.
func TestWatch_PodBinding_SendsAddedForNode(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	pods := "/api/v1/namespaces/" + ns + "/pods"
	rv := harness.Must[*harness.List](t)(api.List(ctx, "/api/v1/pods", "")).Metadata.ResourceVersion
	kubelet1 := harness.StartWatch(t, ctx, api, "/api/v1/pods", "fieldSelector=spec.nodeName%3Dnode-1&resourceVersion="+rv)
	kubelet2 := harness.StartWatch(t, ctx, api, "/api/v1/pods", "fieldSelector=spec.nodeName%3Dnode-2&resourceVersion="+rv)
	scheduler := harness.StartWatch(t, ctx, api, "/api/v1/pods", "fieldSelector=spec.nodeName%3D&resourceVersion="+rv)
	one := harness.StartWatch(t, ctx, api, pods, "fieldSelector=metadata.name%3Dpod-2&resourceVersion="+rv)

	for i := range 4 {
		name := fmt.Sprintf("pod-%d", i)
		harness.Must[harness.Object](t)(api.Create(ctx, pods, pod(name, "")))
		node := fmt.Sprintf("node-%d", 1+i%2)
		r := harness.Must[*harness.Response](t)(api.Do(ctx, http.MethodPost, pods+"/"+name+"/binding", "", object{
			"apiVersion": "v1", "kind": "Binding", "metadata": object{"name": name}, "target": object{"kind": "Node", "name": node}}))
		if r.Code != http.StatusCreated {
			t.Fatal(r.Err())
		}
	}
	for i := range 4 {
		name := fmt.Sprintf("pod-%d", i)
		expectEvent(t, ctx, scheduler, "ADDED", name)
		expectEvent(t, ctx, scheduler, "DELETED", name)
		expectEvent(t, ctx, []*harness.Watch{kubelet1, kubelet2}[i%2], "ADDED", name)
	}
	expectEvent(t, ctx, one, "ADDED", "pod-2")
	expectEvent(t, ctx, one, "MODIFIED", "pod-2")

	_, err := api.Patch(ctx, pods+"/pod-2/status", `{"status":{"phase":"Running"}}`)
	harness.Check(t, err)
	r := harness.Must[*harness.Response](t)(api.Do(ctx, http.MethodDelete, pods+"/pod-2", "gracePeriodSeconds=0", nil))
	if r.Code != http.StatusOK {
		t.Fatal(r.Err())
	}
	for _, w := range []*harness.Watch{kubelet1, one} {
		expectEvent(t, ctx, w, "MODIFIED", "pod-2") // its status
		expectEvent(t, ctx, w, "MODIFIED", "pod-2") // its deletion timestamp
		expectEvent(t, ctx, w, "DELETED", "pod-2")
	}
	// The other watches got none of these events: their next event is the fence.
	harness.Must[harness.Object](t)(api.Create(ctx, pods, pod("fence-2", "node-2")))
	expectEvent(t, ctx, kubelet2, "ADDED", "fence-2")
	harness.Must[harness.Object](t)(api.Create(ctx, pods, pod("fence", "")))
	expectEvent(t, ctx, scheduler, "ADDED", "fence")
}

// TestWatch_Deleted_CarriesDeletionRevision resumes directly before and directly after a deletion.
func TestWatch_Deleted_CarriesDeletionRevision(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	created := createMaps(t, ctx, ns, "a")[0]
	w := harness.StartWatch(t, ctx, api, maps(ns), "resourceVersion="+created.Metadata.ResourceVersion)
	patched := harness.Must[harness.Object](t)(api.Patch(ctx, maps(ns)+"/a", `{"data":{"v":"last"}}`))
	harness.Check(t, api.Delete(ctx, maps(ns)+"/a"))
	createMaps(t, ctx, ns, "fence")

	expectEvent(t, ctx, w, "MODIFIED", "a")
	deleted := expectEvent(t, ctx, w, "DELETED", "a")
	fence := expectEvent(t, ctx, w, "ADDED", "fence")
	at := harness.Revision(t, deleted.Metadata.ResourceVersion)
	if at <= harness.Revision(t, patched.Metadata.ResourceVersion) || at >= harness.Revision(t, fence.Metadata.ResourceVersion) {
		t.Errorf("deletion at %d, not between the writes at %s and %s", at, patched.Metadata.ResourceVersion, fence.Metadata.ResourceVersion)
	}
	if deleted.Data["v"] != "last" {
		t.Errorf("deleted object has data %v, want its last state", deleted.Data)
	}
	after := harness.StartWatch(t, ctx, api, maps(ns), fmt.Sprintf("resourceVersion=%d", at))
	expectEvent(t, ctx, after, "ADDED", "fence")
	before := harness.StartWatch(t, ctx, api, maps(ns), fmt.Sprintf("resourceVersion=%d", at-1))
	expectEvent(t, ctx, before, "DELETED", "a")
	expectEvent(t, ctx, before, "ADDED", "fence")
	// The lists at both sides agree.
	harness.RequireEqual(t, "before", harness.Must[*harness.List](t)(api.List(ctx, maps(ns), fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", at-1))).Names(), []string{"a"})
	harness.RequireEqual(t, "after", harness.Must[*harness.List](t)(api.List(ctx, maps(ns), fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", at))).Names(), nil)
}

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
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	created := createMaps(t, ctx, ns, "a")[0]
	// Upstream sends a bookmark two seconds before the end of a watch.
	const query = "timeoutSeconds=4&fieldSelector=metadata.name%3Da&resourceVersion="
	with := harness.StartWatch(t, ctx, api, maps(ns), "allowWatchBookmarks=true&"+query+created.Metadata.ResourceVersion)
	without := harness.StartWatch(t, ctx, api, maps(ns), query+created.Metadata.ResourceVersion)
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
		t.Errorf("without bookmarks: got %d events, want one MODIFIED", len(plain))
	}
	if len(events) < 2 || events[0].Type != "MODIFIED" || events[0].Object.Metadata.ResourceVersion != patched.Metadata.ResourceVersion {
		t.Fatalf("with bookmarks: got %d events, want MODIFIED and at least one bookmark", len(events))
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
		t.Errorf("last bookmark at %s, before the change of another object at %s", last, unrelated.Metadata.ResourceVersion)
	}
}

// TestWatch_FromEachRevision_DeliversLaterEvents watches from each revision of a history and
// receives exactly the later events (I3).
func TestWatch_FromEachRevision_DeliversLaterEvents(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns, other := harness.Namespace(t, ctx, api, harness.NewName("ns")), harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, other, "x")
	start := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "")).Metadata.ResourceVersion
	all := harness.StartWatch(t, ctx, api, maps(ns), "resourceVersion="+start)
	for i := range 12 {
		name := fmt.Sprintf("map-%d", i%4)
		switch {
		case i < 4:
			createMaps(t, ctx, ns, name)
		case i < 8:
			_, err := api.Patch(ctx, maps(ns)+"/"+name, `{"data":{"v":"2"}}`)
			harness.Check(t, err)
		default:
			harness.Check(t, api.Delete(ctx, maps(ns)+"/"+name))
		}
		// Revisions of other namespaces and resources lie between.
		_, err := api.Patch(ctx, maps(other)+"/x", fmt.Sprintf(`{"data":{"v":"%d"}}`, i))
		harness.Check(t, err)
	}
	end := createMaps(t, ctx, ns, "fence")[0]
	var history []harness.Event
	for len(history) == 0 || history[len(history)-1].Object.Metadata.Name != "fence" {
		history = append(history, next(t, ctx, all))
	}
	if len(history) != 13 {
		t.Fatalf("got %d events, want 13", len(history))
	}
	for at := harness.Revision(t, start); at < harness.Revision(t, end.Metadata.ResourceVersion); at++ {
		w := harness.StartWatch(t, ctx, api, maps(ns), fmt.Sprintf("resourceVersion=%d", at))
		for _, want := range history {
			if harness.Revision(t, want.Object.Metadata.ResourceVersion) <= at {
				continue
			}
			got := next(t, ctx, w)
			if got.Type != want.Type || got.Object.Metadata.ResourceVersion != want.Object.Metadata.ResourceVersion || got.Object.Key() != want.Object.Key() {
				t.Fatalf("watch at %d: got %s %s, want %s %s", at, got.Type, versions([]harness.Object{got.Object}), want.Type, versions([]harness.Object{want.Object}))
			}
		}
		w.Close()
	}
}

// TestWatch_ManyWatchers_ReceiveEveryEventInOrder runs many watchers with different selections
// against concurrent writers: each receives every selected event once, in revision order.
func TestWatch_ManyWatchers_ReceiveEveryEventInOrder(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const watchers, writers, rounds = 24, 4, 40
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	start := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "")).Metadata.ResourceVersion
	paths := []struct{ path, query string }{
		{maps(ns), ""},
		{maps(ns), "labelSelector=writer"},
		{"/api/v1/configmaps", "labelSelector=writer"},
		{"/api/v1/configmaps", "fieldSelector=metadata.namespace%3D" + ns},
	}
	var watches []*harness.Watch
	for i := range watchers {
		p := paths[i%len(paths)]
		watches = append(watches, harness.StartWatch(t, ctx, api, p.path, p.query+"&resourceVersion="+start))
	}
	var writing sync.WaitGroup
	for writer := range writers {
		writing.Go(func() {
			labels := map[string]string{"writer": fmt.Sprint(writer)}
			for round := range rounds {
				name := fmt.Sprintf("map-%d-%d", writer, round%10)
				_, err := api.Create(ctx, maps(ns), configMap(name, labels))
				if err == nil {
					_, err = api.Patch(ctx, maps(ns)+"/"+name, `{"data":{"v":"2"}}`)
				}
				if err == nil {
					err = api.Delete(ctx, maps(ns)+"/"+name)
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	results := make([][]string, watchers)
	var reading sync.WaitGroup
	for i, w := range watches {
		reading.Go(func() {
			last := int64(0)
			for range writers * rounds * 3 {
				e, err := w.Next(ctx)
				if err != nil {
					t.Errorf("watcher %d after %d events: %v", i, len(results[i]), err)
					return
				}
				results[i] = append(results[i], e.Type+" "+e.Object.Metadata.Name+"@"+e.Object.Metadata.ResourceVersion)
				var at int64
				fmt.Sscan(e.Object.Metadata.ResourceVersion, &at)
				if at <= last {
					t.Errorf("watcher %d: event at %d after one at %d", i, at, last)
				}
				last = at
			}
		})
	}
	writing.Wait()
	reading.Wait()
	for i := range results {
		if !slices.Equal(results[i], results[0]) {
			t.Errorf("watchers %d and 0 saw different events", i)
		}
	}
}
