package samebytes

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
)

// TestRandomReads_MatchUpstream combines options that the other tests try one by one: 300 reads,
// and 20,000 in the long form.
func TestRandomReads_MatchUpstream(t *testing.T) {
	w := open(t)
	reads, timeout := 300, testTimeout
	if harness.Long() {
		reads, timeout = 20_000, 20*time.Minute
	}
	ctx := harness.Context(t, timeout)
	present, err := w.revision(ctx)
	harness.Check(t, err)
	g := &generator{Rand: rand.New(rand.NewPCG(testseed.New(t), 0)), world: w, present: present, tokens: map[string][]string{}}
	answered, settled := 0, map[string]bool{}
	for range reads {
		resource, r := g.next()
		if !settled[resource.path()] {
			settled[resource.path()] = true
			w.settle(t, ctx, resource.path())
		}
		want := w.same(t, ctx, r)
		if want.code == 200 {
			answered++
		}
		var list struct{ Metadata struct{ Continue string } }
		if json.Unmarshal(want.body, &list) == nil && list.Metadata.Continue != "" {
			g.tokens[r.path] = append(g.tokens[r.path], list.Metadata.Continue)
		}
	}
	if answered < reads/4 {
		t.Errorf("%d of %d reads were answered: the others are refused, and compare little", answered, reads)
	}
}

// generator makes reads of all resources, half of them of the subjects, with any of the options.
type generator struct {
	*rand.Rand
	world   *world
	present int64
	tokens  map[string][]string // of upstream's answers, by path
}

func (g *generator) one(of ...string) string { return of[g.IntN(len(of))] }

// next returns a read and its resource.
func (g *generator) next() (resource, request) {
	s := subjects[g.IntN(len(subjects))]
	if g.IntN(2) == 0 {
		s = subject{resource: g.world.resources[g.IntN(len(g.world.resources))], namespace: oddNamespace, name: "plain-1"}
	}
	path, whole, object := s.path(), s.namespaced, false
	switch {
	case g.IntN(4) == 0:
		path, whole, object = s.in(s.namespace)+"/"+s.name, false, true
		if !s.namespaced {
			path = s.path() + "/" + s.name
		}
	case s.namespaced && g.IntN(3) == 0:
		path, whole = s.in(g.one(s.namespace, "default", "missing")), false
	}

	q := url.Values{}
	maybe := func(oneIn int, name string, values ...string) {
		if g.IntN(oneIn) == 0 {
			q.Set(name, g.one(values...))
		}
	}
	between := fmt.Sprint(g.world.past + g.Int64N(g.world.quiet-g.world.past+1))
	maybe(2, "limit", "0", "1", "2", "3", "7", "500")
	maybe(2, "resourceVersion", "0", "1", fmt.Sprint(g.present), fmt.Sprint(g.world.past), between, between, fmt.Sprint(g.world.compacted), "x", "-1")
	maybe(3, "resourceVersionMatch", "Exact", "NotOlderThan", "exact", "")
	maybe(4, "labelSelector", "app", "app=web", "app!=web", "!app", "app in (web,db)", "app notin (web)", "nobody", "app=", "a b", "app=web,tier=front")
	fields := append([]string{"metadata.name=" + s.name, "metadata.name!=" + s.name, "metadata.namespace!=default", "metadata.namespace=" + s.namespace, "bad", ""}, s.fields...)
	maybe(4, "fieldSelector", fields...)
	maybe(12, "pretty", "true", "1", "0", "x")
	maybe(8, "includeObject", "None", "Metadata", "Object", "x")
	maybe(20, "timeoutSeconds", "0", "10", "x")
	maybe(25, "sendInitialEvents", "true", "false")
	maybe(25, "allowWatchBookmarks", "true", "x")
	if tokens := g.tokens[path]; len(tokens) > 0 && g.IntN(2) == 0 {
		q.Set("continue", g.one(tokens...))
		if q.Get("resourceVersion") == "0" { // D-L7
			q.Del("resourceVersion")
		}
	}
	// D-PAGES
	if whole && q.Has("limit") && strings.HasPrefix(q.Get("fieldSelector"), "metadata.namespace=") {
		q.Del("limit")
	}

	// upstream has events in etcd only, and limits their lists
	if s.gvr.Resource == "events" && q.Get("resourceVersion") == "0" {
		q.Del("limit")
	}

	all := media
	if g.IntN(2) == 0 {
		all = moreMedia
	}
	m := all[g.IntN(len(all))]
	accept := m.list
	if object {
		accept = m.object
	}
	if s.gvr.Resource == "events" && strings.Contains(accept, "protobuf") {
		accept = jsonType // byDesign finds the slash in upstream's tokens in text only
	}
	r := request{path: path, query: q.Encode(), accept: accept, gzip: g.IntN(3) == 0, http1: g.IntN(4) == 0}
	if g.IntN(6) == 0 {
		r.agent = g.one(agents...)
	}
	return s.resource, r
}
