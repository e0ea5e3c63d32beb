package samebytes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// initialEvents asks for all objects and then a bookmark.
const initialEvents = "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"

// TestWatch_EveryResource_MatchesUpstream watches every resource, in every version and its media
// types, over every wire, until all initial events have arrived. The short form has each media type
// over one wire.
func TestWatch_EveryResource_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	for number, r := range w.resources {
		if !r.watchable {
			continue
		}
		t.Run(r.String(), func(t *testing.T) {
			t.Parallel()
			w.settle(t, ctx, r.path())
			n := len(list(t, w, r))
			initial := cases{}
			for i, m := range r.media() {
				for j, v := range wires {
					if harness.Long() || (i+j+number)%2 == 0 {
						initial[named(m.name, v.name)] = v.on(request{path: r.path(), query: initialEvents, accept: m.object})
					}
				}
				if n > 0 {
					t.Run(named("from-any", m.name), func(t *testing.T) {
						w.sameWatch(t, ctx, request{path: r.path(), query: "watch=true&resourceVersion=0", accept: m.object},
							func() func([]byte) bool { return nthFrame(n) })
					})
				}
			}
			w.runInitialEvents(t, ctx, initial)
		})
	}
}

// runInitialEvents compares watches up to the end of their initial events, in a subtest for each.
func (w *world) runInitialEvents(t *testing.T, ctx context.Context, all cases) {
	for name, r := range all {
		t.Run(name, func(t *testing.T) {
			w.sameWatch(t, ctx, r, func() func([]byte) bool { return endOfInitialEvents })
		})
	}
}

// watchOptions are queries of watches that end by themselves, because they are refused or after a
// second, by name.
var watchOptions = map[string]string{
	"watch-1":                  "watch=1",
	"watch-True":               "watch=True",
	"watch-t":                  "watch=t",
	"watch-no-value":           "watch",
	"watch-yes":                "watch=yes",
	"version-garbage":          "watch=true&resourceVersion=x",
	"version-negative":         "watch=true&resourceVersion=-1",
	"version-fraction":         "watch=true&resourceVersion=1.5",
	"version-too-large":        "watch=true&resourceVersion=18446744073709551616",
	"match-without-version":    "watch=true&resourceVersionMatch=NotOlderThan",
	"match-exact":              "watch=true&resourceVersion=5&resourceVersionMatch=Exact",
	"match-garbage":            "watch=true&resourceVersion=5&resourceVersionMatch=x",
	"match-without-initial":    "watch=true&resourceVersion=5&resourceVersionMatch=NotOlderThan",
	"initial-without-match":    "watch=true&sendInitialEvents=true",
	"no-initial-without-match": "watch=true&sendInitialEvents=false&resourceVersion=5",
	"initial-exact":            "watch=true&sendInitialEvents=true&resourceVersionMatch=Exact&resourceVersion=5",
	"initial-garbage":          "watch=true&sendInitialEvents=x",
	"initial-garbage-version":  "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&resourceVersion=x",
	"initial-no-bookmarks":     "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
	"bookmarks-garbage":        "watch=true&allowWatchBookmarks=x",
	"bookmarks-twice":          "watch=true&allowWatchBookmarks=false&allowWatchBookmarks=true",
	"timeout-garbage":          "watch=true&timeoutSeconds=x",
	"limit":                    "watch=true&limit=1",
	"limit-garbage":            "watch=true&limit=x",
	"continue":                 "watch=true&continue=x",
	"labels":                   "watch=true&labelSelector=app%3Dweb",
	"labels-invalid":           "watch=true&labelSelector=a%20b",
	"labels-invalid-in":        "watch=true&labelSelector=a%20in",
	"fields-name":              "watch=true&fieldSelector=metadata.name%3Dplain-1",
	"fields-not-name":          "watch=true&fieldSelector=metadata.name!%3Dplain-1",
	"fields-unsupported":       "watch=true&fieldSelector=spec.unknown%3D1",
	"fields-invalid":           "watch=true&fieldSelector=x",
	"fields-other-namespace":   "watch=true&fieldSelector=metadata.namespace%3Dmissing",
	"pretty":                   "watch=true&pretty=true",
	"unknown":                  "watch=true&unknown=1",
}

// TestWatch_EveryOption_MatchesUpstream tries every option of a WATCH, with valid and invalid
// values, from its first event on.
func TestWatch_EveryOption_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.eachSubject(t, ctx, func(t *testing.T, s subject, present int64) {
		all := cases{}
		for where, path := range s.paths() {
			for name, query := range watchOptions {
				all[named(where, name)] = request{path: path, query: query + "&timeoutSeconds=1", accept: jsonType}
			}
		}
		for name, version := range map[string]int64{"compacted": w.compacted, "past": w.past, "present": present, "1": 1} {
			for _, m := range media {
				all[named("from", name, m.name)] = request{path: s.in(s.namespace), query: fmt.Sprintf("watch=true&resourceVersion=%d&timeoutSeconds=1", version), accept: m.object}
			}
		}
		all["object"] = request{path: s.object(), query: "watch=true&timeoutSeconds=1", accept: jsonType}
		all["object-missing"] = request{path: s.in(s.namespace) + "/missing", query: "watch=true&timeoutSeconds=1", accept: jsonType}
		all["path"] = request{path: s.root() + "/watch/" + s.gvr.Resource, query: "timeoutSeconds=1", accept: jsonType}
		for _, m := range moreMedia {
			all[named("media", m.name)] = request{path: s.in(s.namespace), query: "watch=true&resourceVersion=0&timeoutSeconds=1", accept: m.object}
		}
		for _, agent := range agents {
			all[named("agent", agent)] = request{path: s.in(s.namespace), query: "watch=true&resourceVersion=0&timeoutSeconds=1", agent: agent}
		}
		for _, token := range []string{tokenNoRights, tokenOneName, tokenAnonymous, tokenUnknown} {
			all[named("user", token, "all")] = request{path: s.in(s.namespace), query: "watch=true&timeoutSeconds=1", accept: jsonType, token: token}
			all[named("user", token, "one")] = request{path: s.in(s.namespace), query: "watch=true&fieldSelector=metadata.name%3Dplain-1&timeoutSeconds=1", accept: jsonType, token: token}
		}
		w.watchAll(t, ctx, s.part(all), func() {}, func() func([]byte) bool { return untilEnd })
	})
}

// The duration of a watch that ends by itself, and a longer one for a retry.
const shortTimeout, longTimeout = "timeoutSeconds=1", "timeoutSeconds=10"

// longer returns the watch with the longer duration, if it lasts a second.
func (r request) longer() (request, bool) {
	query, ok := strings.CutSuffix(r.query, shortTimeout)
	r.query = query + longTimeout
	return r, ok
}

// watchAll starts all watches on both servers, calls write and compares the frames up to the one
// that meets until, in a subtest for each. The result of until may be called while write runs.
func (w *world) watchAll(t *testing.T, ctx context.Context, all cases, write func(), until func() func([]byte) bool) {
	t.Helper()
	type pair [2]chan *stream
	started := map[string]*pair{}
	type result struct {
		name   string
		engine int
		o      *openStream
		err    error
	}
	results := make(chan result)
	for name, r := range all {
		started[name] = &pair{}
		for i, e := range w.engines {
			go func() {
				o, err := e.watch(ctx, r, until())
				results <- result{name, i, o, err}
			}()
		}
	}
	// All are read concurrently: those that end by themselves do so at about the same time, and
	// upstream ends a watch that is not read.
	for range 2 * len(all) {
		r := <-results
		if r.err != nil {
			t.Errorf("%s: %v", all[r.name], r.err)
			continue
		}
		done := make(chan *stream, 1)
		started[r.name][r.engine] = done
		go func() { done <- r.o.read() }()
	}
	write()
	read := map[string]chan [2]*stream{}
	for name, p := range started {
		if p[0] == nil || p[1] == nil {
			continue
		}
		done := make(chan [2]*stream, 1)
		read[name] = done
		go func() {
			streams := [2]*stream{<-p[0], <-p[1]}
			differ := streams[0].code != streams[1].code || streams[0].events() != streams[1].events() ||
				streams[0].deadlineExceeded() != streams[1].deadlineExceeded()
			if r, ok := all[name].longer(); ok && differ {
				// A second may have been too short for one of the two: strata answers 429 if it
				// cannot verify within the watch's duration that it is current, and upstream ends
				// the watch with an error. A longer watch decides.
				if more, err := w.watchBoth(ctx, r, until); err == nil {
					streams = more
				}
			}
			done <- streams
		}()
	}
	for _, name := range slices.Sorted(maps.Keys(read)) {
		t.Run(name, func(t *testing.T) {
			streams := <-read[name]
			if !bytes.Equal(streams[0].initialEventsEnd(), streams[1].initialEventsEnd()) {
				// The two may be of different revisions, since servers occasionally write by
				// themselves.
				w.sameWatch(t, ctx, all[name], until)
				return
			}
			sameStreams(t, all[name], streams[0], streams[1])
		})
	}
}

// theEnd is a text in the last event of each live watch.
const theEnd = "this-is-the-end"

// live is a resource that tests change during watches.
type live struct {
	resource
	namespace string
	spec      string // fields of each object, as JSON, with a leading comma
	// merge patches that change selected fields; the last one restores the object
	change []string
	fields []string // selectors that select the unchanged object
	status string   // a merge patch of the subresource status
}

var lives = []live{
	{resource: core("configmaps"), namespace: liveNamespace, change: []string{`{"data":{"html":"<&>\u2028"}}`, `{"data":null}`}},
	{resource: core("secrets"), namespace: liveNamespace, spec: `,"type":"example.com/x"`, fields: []string{"type=example.com/x"}},
	{resource: core("pods"), namespace: liveNamespace, spec: `,"spec":{"nodeName":"node-a","containers":[{"name":"c","image":"i"}]}`,
		status: `{"status":{"phase":"Running","podIP":"10.9.9.9","podIPs":[{"ip":"10.9.9.9"}]}}`, fields: []string{"spec.nodeName=node-a", "spec.nodeName!=node-b,status.phase!=Failed"}},
	{resource: core("services"), namespace: liveNamespace, spec: `,"spec":{"type":"ExternalName","externalName":"example.com"}`,
		change: []string{`{"spec":{"externalName":"example.org"}}`}},
	{resource: core("persistentvolumeclaims"), namespace: liveNamespace,
		spec: `,"spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}},"dataSource":{"apiGroup":"snapshot.storage.k8s.io","kind":"VolumeSnapshot","name":"s"}}`},
	{resource: custom("v1", "widgets", true), namespace: liveNamespace, spec: `,"spec":{"color":"green"}`, status: `{"status":{"phase":"<&>"}}`,
		change: []string{`{"spec":{"color":"red","comment":null,"unknown":1}}`, `{"spec":{"color":"<&>"}}`, `{"spec":{"color":"green"}}`}, fields: []string{"spec.color=green", "spec.color!=red"}},
	{resource: custom("v1beta1", "widgets", true), namespace: liveNamespace, spec: `,"spec":{"color":"green"}`,
		change: []string{`{"spec":{"color":null,"weight":1}}`, `{"spec":{"color":"green"}}`}},
	{resource: custom("v1", "planets", false), spec: `,"list":[1.5,null,"<>"]`, change: []string{`{"list":null}`}},
	{resource: resource{gvr: apiServices.gvr}, spec: `,"spec":{"group":"live.example.com","version":"%s","groupPriorityMinimum":10,"versionPriority":10,"service":{"name":"missing","namespace":"odd"},"insecureSkipTLSVerify":true}`},
}

// watches returns the watches of a live resource that begin at revision, or with initial events if
// that is 0.
func (l live) watches(revision int64) cases {
	version := fmt.Sprintf("&resourceVersion=%d", revision)
	if revision == 0 {
		version = ""
	}
	all := cases{}
	one := l.name("one")
	paths := map[string]string{"all": l.path()}
	if l.namespaced {
		paths["namespace"] = l.in(l.namespace)
	}
	add := func(to cases, where, name, selector string) {
		for _, m := range []mediaType{media[0], media[1], media[5], media[6], media[10]} {
			to[named(where, name, m.name)] = request{path: paths[where], query: "watch=true&" + selector + version, accept: m.object}
		}
	}
	for where, path := range paths {
		for _, m := range media {
			for _, v := range wires {
				all[named(where, m.name, v.name)] = v.on(request{path: path, query: "watch=true" + version, accept: m.object})
			}
		}
		for name, selector := range map[string]string{
			"labels":          "labelSelector=app%3Dweb",
			"labels-not":      "labelSelector=app!%3Ddb",
			"labels-in":       "labelSelector=" + url.QueryEscape("app in (web),tier notin (back)"),
			"labels-exists":   "labelSelector=" + url.QueryEscape("app,!gone"),
			"name":            "fieldSelector=metadata.name%3D" + one,
			"name-and-labels": "labelSelector=app%3Dweb&fieldSelector=metadata.name%3D" + one,
			"not-name":        "fieldSelector=metadata.name!%3D" + l.name("two"),
			"bookmarks":       "allowWatchBookmarks=true",
		} {
			add(all, where, name, selector)
		}
	}
	all = partOf(all, slices.IndexFunc(lives, func(o live) bool { return o.gvr == l.gvr }))
	for where := range paths {
		for _, fields := range l.fields { // of this resource only
			add(all, where, fields, "fieldSelector="+url.QueryEscape(fields))
			add(all, where, fields+" and labels", "labelSelector=app%3Dweb&fieldSelector="+url.QueryEscape(fields))
		}
	}
	// A refused watch ends without theEnd.
	for name, r := range all {
		if r.accept == cborType || strings.HasPrefix(r.accept, yamlType) {
			r.query += "&timeoutSeconds=1"
			all[name] = r
		}
	}
	return all
}

// name returns the name of an object: the name of an APIService contains its group and version.
func (l live) name(name string) string {
	if l.gvr.Resource == "apiservices" {
		return name + ".live.example.com"
	}
	return "live-" + name
}

// apiServices are served by the aggregator.
var apiServices = subjects[len(subjects)-1]

// TestWatch_LiveChanges_MatchUpstream compares watches while objects are created, changed so that
// selectors start and stop selecting them, and deleted; then it compares watches that begin at a
// revision before these changes, or between them.
func TestWatch_LiveChanges_MatchUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	for _, l := range lives {
		t.Run(l.String(), func(t *testing.T) {
			api := w.engines[1].server.API()
			w.settle(t, ctx, l.path())
			before, err := w.revision(ctx)
			harness.Check(t, err)
			var middle int64
			until := func() func([]byte) bool { return containing(theEnd) }
			live := l.watches(before)
			for name, r := range l.watches(0) {
				live["with-initial-events/"+name] = r
			}
			var frames atomic.Int64
			counted := func() func([]byte) bool {
				ends := until()
				return func(frame []byte) bool { frames.Add(1); return ends(frame) }
			}
			w.watchAll(t, ctx, live, func() {
				// Upstream ends a watch that has more than ten events beside its initial ones.
				last := int64(-1)
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					before := last
					last = frames.Load()
					harness.Pause(ctx, 500*time.Millisecond)
					return last > 0 && last == before && last == frames.Load(), errors.New("initial events are arriving")
				}))
				middle = l.write(t, ctx, w, api)
			}, counted)
			t.Run("from-before", func(t *testing.T) { w.watchAll(t, ctx, l.watches(before), func() {}, until) })
			t.Run("from-the-middle", func(t *testing.T) { w.watchAll(t, ctx, l.watches(middle), func() {}, until) })
			harness.Check(t, api.Delete(ctx, l.in(l.namespace)+"/"+l.name("one")))
		})
	}
}

// write changes objects in all supported ways. The final state has object one, which all watches
// select. It returns a revision in between.
func (l live) write(t *testing.T, ctx context.Context, w *world, api *harness.API) (middle int64) {
	t.Helper()
	path := l.in(l.namespace)
	create := func(name, labels string) {
		spec := l.spec
		if l.gvr.Resource == "apiservices" {
			spec = fmt.Sprintf(spec, name)
		}
		kind := map[string]string{"widgets": "Widget", "planets": "Planet"}[l.gvr.Resource]
		typeMeta := ""
		if kind != "" {
			typeMeta = fmt.Sprintf(`"apiVersion":%q,"kind":%q,`, l.gvr.GroupVersion(), kind)
		}
		harness.Check(t, post(ctx, api, path, fmt.Sprintf(`{%s"metadata":{"name":%q,"labels":%s}%s}`, typeMeta, l.name(name), labels, spec)))
	}
	patch := func(name, subresource, patch string) {
		r, err := api.DoAs(ctx, http.MethodPatch, path+"/"+l.name(name)+subresource, "", "application/merge-patch+json", "", patch)
		harness.Check(t, err)
		if r.Code != http.StatusOK {
			t.Fatalf("patch %s %s: %v", name, patch, r.Err())
		}
	}
	remove := func(name string) {
		if l.gvr.Resource == "persistentvolumeclaims" {
			// admission adds one, and no controller removes it
			patch(name, "", `{"metadata":{"finalizers":null}}`)
		}
		r, err := api.Do(ctx, http.MethodDelete, path+"/"+l.name(name), "gracePeriodSeconds=0", nil)
		harness.Check(t, err)
		if r.Code/100 != 2 {
			t.Fatalf("delete %s: %v", name, r.Err())
		}
	}
	create("one", `{"app":"web","tier":"front"}`)
	create("two", `{"app":"db"}`)
	patch("two", "", `{"metadata":{"labels":{"app":"web"}}}`) // starts being selected
	patch("one", "", `{"metadata":{"labels":{"app":"db"}}}`)  // stops being selected
	patch("one", "", `{"metadata":{"labels":{"app":"web"}}}`)
	patch("one", "", `{"metadata":{"labels":{"app":"web"}}}`) // no change
	for _, p := range l.change {
		patch("one", "", p)
	}
	if l.status != "" {
		patch("one", "/status", l.status)
	}
	patch("two", "", `{"metadata":{"labels":{"app":"db"},"annotations":{"html":"<&>\u2028"}}}`)
	middle, err := w.revision(ctx)
	harness.Check(t, err)
	remove("two") // while not selected
	create("two", `{"app":"web","tier":"back"}`)
	remove("two") // while selected
	patch("one", "", `{"metadata":{"annotations":{"html":"<&>\u2028"}}}`)
	patch("one", "", fmt.Sprintf(`{"metadata":{"annotations":{"end":%q}}}`, theEnd))
	return middle
}
