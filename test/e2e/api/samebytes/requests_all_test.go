package samebytes

import (
	"encoding/json"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// TestList_EveryResource_MatchesUpstream lists all objects of every resource, in every version, in
// its media types, over every wire. The short form has each object in one of two media types.
func TestList_EveryResource_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	for number, r := range w.resources {
		t.Run(r.String(), func(t *testing.T) {
			t.Parallel()
			w.settle(t, ctx, r.path())
			objects := list(t, w, r)
			if len(objects) == 0 && !empty[r.kind] {
				t.Errorf("there is no object to compare: the fill lacks %s", r)
			}
			all := cases{}
			for _, m := range r.media() {
				for _, v := range wires {
					all[named("list", m.name, v.name)] = v.on(request{path: r.path(), accept: m.list})
					if len(objects) > 0 {
						all[named("get", m.name, v.name)] = v.on(request{path: objectPath(r, objects[0]), accept: m.object})
					}
				}
			}
			all = partOf(all, number)
			for _, m := range r.media() {
				all[named("list", m.name, wires[0].name)] = wires[0].on(request{path: r.path(), accept: m.list})
				all[named("list-from-memory", m.name)] = request{path: r.path(), query: "resourceVersion=0", accept: m.list}
				all[named("get-missing", m.name)] = request{path: r.in(namespaceIf(r, "default")) + "/missing", accept: m.object}
				if r.namespaced {
					all[named("list-of-namespace", m.name)] = request{path: r.in(oddNamespace), accept: m.list}
				}
			}
			all["list-indented"] = request{path: r.path(), query: "pretty=true", accept: jsonType}
			if len(objects) <= bulkObjects {
				for i, o := range objects {
					name := fmt.Sprintf("%d-%s-%s", i, o.Namespace, o.Name)
					if harness.Long() || (i+number)%2 == 0 {
						all[named("get-each", name, "json")] = request{path: objectPath(r, o), accept: jsonType}
					}
					if harness.Long() || (i+number)%2 == 1 {
						all[named("get-each", name, "protobuf")] = request{path: objectPath(r, o), query: "resourceVersion=0", accept: protobufType}
					}
				}
			}
			w.run(t, ctx, all)
		})
	}
}

// empty are the kinds without objects; all are custom resources.
var empty = map[string]bool{"Unicorn": true, "OpenShiftWebConsoleConfig": true}

// list returns the metadata of all objects of a resource.
func list(t *testing.T, w *world, r resource) []metav1.ObjectMeta {
	t.Helper()
	answer, err := w.engines[1].patient(harness.Context(t, testTimeout), request{path: r.path(), accept: transformedList})
	harness.Check(t, err)
	var list metav1.PartialObjectMetadataList
	if err := json.Unmarshal(answer.body, &list); err != nil || answer.code != 200 {
		t.Fatalf("list %s: %d %s", r, answer.code, excerpt(answer.body, 0))
	}
	var objects []metav1.ObjectMeta
	for _, o := range list.Items {
		objects = append(objects, o.ObjectMeta)
	}
	return objects
}

func objectPath(r resource, o metav1.ObjectMeta) string {
	return r.in(o.Namespace) + "/" + segment(o.Name)
}

func namespaceIf(r resource, namespace string) string {
	if r.namespaced {
		return namespace
	}
	return ""
}
