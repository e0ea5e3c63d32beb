package readpath

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	group           = "test.example.com"
)

// definition is a CustomResourceDefinition of namespaced objects.
type definition struct {
	group    string // "" for group; a parallel test has its own
	plural   string
	kind     string
	versions []version
}

type version struct {
	name       string
	notServed  bool
	deprecated string // the warning; "-" for the default one
	spec       string // the schema of spec, JSON
	fields     []string
}

func (d definition) in() string { return cmp.Or(d.group, group) }

func (d definition) name() string { return d.plural + "." + d.in() }

// object returns the definition; the first version is the storage version.
func (d definition) object(t *testing.T) object {
	t.Helper()
	var versions []any
	for i, v := range d.versions {
		var spec any
		harness.Check(t, json.Unmarshal([]byte(v.spec), &spec))
		var fields []any
		for _, path := range v.fields {
			fields = append(fields, object{"jsonPath": path})
		}
		o := object{
			"name": v.name, "served": !v.notServed, "storage": i == 0, "selectableFields": fields,
			"schema": object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": spec}}},
		}
		if v.deprecated != "" {
			o["deprecated"] = true
			if v.deprecated != "-" {
				o["deprecationWarning"] = v.deprecated
			}
		}
		versions = append(versions, o)
	}
	return object{
		"metadata": object{"name": d.name()},
		"spec": object{
			"group": d.in(), "scope": "Namespaced", "versions": versions,
			"names": object{"plural": d.plural, "singular": strings.ToLower(d.kind), "kind": d.kind, "listKind": d.kind + "Collection"},
		},
	}
}

func (d definition) path(version, namespace string) string {
	if namespace == "" {
		return fmt.Sprintf("/apis/%s/%s/%s", d.in(), version, d.plural)
	}
	return fmt.Sprintf("/apis/%s/%s/namespaces/%s/%s", d.in(), version, namespace, d.plural)
}

func (d definition) create(t *testing.T, ctx context.Context) {
	t.Helper()
	_, err := api.Create(ctx, definitionsPath, d.object(t))
	harness.Check(t, err)
	for _, v := range d.versions {
		if !v.notServed {
			untilCode(t, ctx, d.path(v.name, ""), "", http.StatusOK)
		}
	}
}

// update replaces the definition. Servers observe the change a little later.
func (d definition) update(t *testing.T, ctx context.Context) {
	t.Helper()
	patch, err := json.Marshal(object{"spec": d.object(t)["spec"]})
	harness.Check(t, err)
	_, err = api.Patch(ctx, definitionsPath+"/"+d.name(), string(patch))
	harness.Check(t, err)
}

func (d definition) add(t *testing.T, ctx context.Context, namespace, name string, spec object) {
	t.Helper()
	_, err := api.Create(ctx, d.path(d.versions[0].name, namespace), object{
		"apiVersion": d.in() + "/" + d.versions[0].name, "kind": d.kind, "metadata": object{"name": name}, "spec": spec,
	})
	harness.Check(t, err)
}

func (d definition) delete(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, api.Delete(ctx, definitionsPath+"/"+d.name()))
}

// list lists on the engine under test.
func list(t *testing.T, ctx context.Context, path string) *harness.List {
	t.Helper()
	return harness.Must[*harness.List](t)(api.List(ctx, path, ""))
}

// sized is a schema with one number that has a default.
func sized(size int) string {
	return fmt.Sprintf(`{"type":"object","properties":{"size":{"type":"integer","default":%d}}}`, size)
}

const anySpec = `{"type":"object","x-kubernetes-preserve-unknown-fields":true}`

// reads returns the ways to read the object named a; the watch includes it as an initial event.
func (d definition) reads(version, namespace string) [][2]string {
	return [][2]string{
		{d.path(version, namespace) + "/a", ""},
		{d.path(version, namespace), ""},
		{d.path(version, ""), "resourceVersion=0"},
		{d.path(version, namespace), "limit=1"},
		{d.path(version, namespace), "fieldSelector=metadata.name%3Da"},
	}
}

// TestCRD_Changed_ReadsFollowDefinition: changes of a definition's versions and schemas take effect
// in reads.
func TestCRD_Changed_ReadsFollowDefinition(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "decides")
	d := definition{group: "decides.example.com", plural: "gadgets", kind: "Gadget", versions: []version{{name: "v1", spec: anySpec}, {name: "v2", spec: anySpec}}}
	d.create(t, ctx)
	d.add(t, ctx, "decides", "a", object{"color": "red"})
	for _, v := range []string{"v1", "v2"} {
		for _, read := range d.reads(v, "decides") {
			untilBody(t, ctx, read[0], read[1], `"color":"red"`)
		}
		byBytes(t, ctx, d.path(v, "decides"), "")
	}

	settled(t, ctx, d.path("v1", "decides")+"/a", d.path("v1", "decides"), d.path("v2", "decides")+"/a", d.path("v2", "decides"), d.path("v2", ""))

	t.Run("a version that is not served any more", func(t *testing.T) {
		d.versions[1].notServed = true
		d.update(t, ctx)
		for _, read := range d.reads("v2", "decides") {
			untilCode(t, ctx, read[0], read[1], http.StatusNotFound)
		}
		untilCode(t, ctx, d.path("v2", ""), "watch=true", http.StatusNotFound)
		untilBody(t, ctx, d.path("v1", ""), "", `"color":"red"`)
	})
	t.Run("a new version", func(t *testing.T) {
		d.versions = append(d.versions, version{name: "v3", spec: anySpec})
		d.update(t, ctx)
		for _, read := range d.reads("v3", "decides") {
			untilBody(t, ctx, read[0], read[1], `"apiVersion":"decides.example.com/v3"`)
		}
		byBytes(t, ctx, d.path("v3", "decides"), "")
	})
	t.Run("the version comes back", func(t *testing.T) {
		d.versions[1].notServed = false
		d.update(t, ctx)
		untilBody(t, ctx, d.path("v2", "decides"), "", `"color":"red"`)
	})
	t.Run("another storage version", func(t *testing.T) {
		before := list(t, ctx, d.path("v1", "")).Items[0].Metadata.ResourceVersion
		d.versions[0], d.versions[2] = d.versions[2], d.versions[0]
		d.update(t, ctx)
		d.add(t, ctx, "decides", "b", object{"color": "blue"})
		for _, v := range []string{"v1", "v2", "v3"} {
			untilBody(t, ctx, d.path(v, "decides")+"/b", "", `"color":"blue"`)
			if items := list(t, ctx, d.path(v, "")).Items; len(items) != 2 || items[0].Metadata.ResourceVersion != before || items[0].APIVersion != d.in()+"/"+v {
				t.Errorf("%s lists %+v, want the object of %s and another one", v, items, before)
			}
		}
		harness.Check(t, api.Delete(ctx, d.path("v1", "decides")+"/b"))
		d.versions[0], d.versions[2] = d.versions[2], d.versions[0]
	})
	t.Run("a default", func(t *testing.T) {
		before := list(t, ctx, d.path("v1", "")).Items[0].Metadata.ResourceVersion
		settled(t, ctx, d.path("v1", "decides")+"/a", d.path("v1", "decides"), d.path("v1", ""))
		d.versions[0].spec = `{"type":"object","properties":{"color":{"type":"string"},"size":{"type":"integer","default":7}}}`
		d.update(t, ctx)
		for _, read := range d.reads("v1", "decides") {
			untilBody(t, ctx, read[0], read[1], `"size":7`)
		}
		if now := list(t, ctx, d.path("v1", "")).Items[0].Metadata.ResourceVersion; now != before {
			t.Errorf("the object has the resource version %s, want %s: it was not written", now, before)
		}
		e, err := startWatch(t, ctx, api, d.path("v1", "decides"), "").Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" || e.Object.Metadata.Name != "a" {
			t.Errorf("the watch begins with %s of %q", e.Type, e.Object.Metadata.Name)
		}
		byBytes(t, ctx, d.path("v1", "decides"), "")
	})
	t.Run("a field that is not known any more", func(t *testing.T) {
		d.versions[0].spec = sized(7)
		d.update(t, ctx)
		for _, read := range d.reads("v1", "decides") {
			until(t, ctx, read[0], read[1], func(r *harness.Response) bool { return !bytes.Contains(r.Body, []byte(`"color":"red"`)) })
		}
	})
	t.Run("a field that can be selected by", func(t *testing.T) {
		untilCode(t, ctx, d.path("v2", ""), "fieldSelector=spec.size%3D7", http.StatusBadRequest)
		d.versions[1].spec, d.versions[1].fields = sized(7), []string{".spec.size"}
		d.update(t, ctx)
		untilBody(t, ctx, d.path("v2", ""), "fieldSelector=spec.size%3D7", `"name":"a"`)
		untilCode(t, ctx, d.path("v2", ""), "fieldSelector=spec.size%3D8", http.StatusOK)
		untilCode(t, ctx, d.path("v1", ""), "fieldSelector=spec.size%3D7", http.StatusBadRequest)
		untilCode(t, ctx, d.path("v1", ""), "fieldSelector=metadata.namespace%3Ddecides", http.StatusOK)
	})
	t.Run("deprecation", func(t *testing.T) {
		d.versions[0].deprecated = "-"
		d.versions[1].deprecated = "not \"this\" one"
		d.update(t, ctx)
		for _, v := range []string{"v1", "v2"} {
			for _, read := range d.reads(v, "decides") {
				until(t, ctx, read[0], read[1], func(r *harness.Response) bool { return len(r.Header["Warning"]) == 1 })
			}
		}
		if n := metric(t, ctx, api, `apiserver_requested_deprecated_apis{group="decides.example.com",removed_release="",resource="gadgets"`); harness.Engine() == harness.Strata && n != 2 {
			t.Errorf("%v deprecated versions were requested, want 2", n)
		}
	})
	t.Run("a path that only a probe requests", func(t *testing.T) {
		for _, path := range []string{"/gadgets/a/status", "/gadgets/a/scale", "/gadgets/a/b/c", "/nothing"} {
			same(t, ctx, "/apis/"+d.in()+"/v1/namespaces/decides"+path, "")
		}
		same(t, ctx, d.path("v1", "")+"/a", "") // the resource is namespaced
		same(t, ctx, "/apis/"+d.in()+"/v9/gadgets", "")
	})
}

// settled returns when reads of the paths are no longer preceded by a probe, ten seconds after a
// change: from then on a change of the definition has to be detected by the byte path itself.
func settled(t *testing.T, ctx context.Context, paths ...string) {
	t.Helper()
	if harness.Engine() == harness.Upstream {
		return
	}
	const probes = "strata_readpath_probes_total"
	harness.Check(t, harness.PollEvery(ctx, 500*time.Millisecond, func(ctx context.Context) (bool, error) {
		before, err := api.Metric(ctx, probes)
		if err != nil {
			return false, err
		}
		for _, path := range paths {
			get(t, ctx, api, path, "")
		}
		after, err := api.Metric(ctx, probes)
		if err != nil {
			return false, err
		}
		return after == before, fmt.Errorf("%v probes for %d reads", after-before, len(paths))
	}))
}

// TestCRD_FrequentChanges_ReadsUseNewStorage is read while it changes, so that some readers use it
// before the handler of custom resources has replaced its storage. No reader may continue with the
// old storage. Concurrent changes and reads of other definitions add load to that handler.
func TestCRD_FrequentChanges_ReadsUseNewStorage(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "often")
	definitions := []definition{
		{plural: "dials", kind: "Dial"}, {plural: "busies", kind: "Busy"}, {plural: "hectics", kind: "Hectic"}, {plural: "hurries", kind: "Hurry"},
	}
	for i := range definitions {
		definitions[i].versions = []version{{name: "v1", spec: sized(0)}}
		definitions[i].create(t, ctx)
	}
	d := definitions[0]
	// Stored without the field that has a default.
	_, err := etcd.Put(ctx, "/registry/"+group+"/dials/often/a",
		`{"apiVersion":"test.example.com/v1","kind":"Dial","metadata":{"name":"a","namespace":"often","uid":"1"},"spec":{}}`)
	harness.Check(t, err)
	untilBody(t, ctx, d.path("v1", "often")+"/a", "", `"size":0`)

	reading, stop := context.WithCancel(ctx)
	var readers sync.WaitGroup
	defer readers.Wait()
	defer stop()
	for range 4 {
		readers.Go(func() {
			for reading.Err() == nil {
				for _, o := range definitions {
					_, _ = api.Do(reading, http.MethodGet, o.path("v1", "often")+"/a", "resourceVersion=0", nil)
				}
			}
		})
	}
	changes := harness.Pick(10, 30)
	for size := 1; size <= changes; size++ {
		for i := len(definitions) - 1; i >= 0; i-- {
			definitions[i].versions[0].spec = sized(size)
			definitions[i].update(t, ctx)
		}
		// Escaped paths are answered by upstream's handlers, on the same server.
		for !bytes.Contains(get(t, ctx, api, escaped(d.path("v1", "often"))+"/a", "").Body, fmt.Appendf(nil, `"size":%d`, size)) {
		}
		for _, read := range d.reads("v1", "often") {
			if r := get(t, ctx, api, read[0], read[1]); !bytes.Contains(r.Body, fmt.Appendf(nil, `"size":%d`, size)) {
				t.Fatalf("upstream's handlers have taken up the definition of size %d, %s?%s shows %s", size, read[0], read[1], r.Body)
			}
		}
	}
	for _, read := range d.reads("v1", "often") {
		untilBody(t, ctx, read[0], read[1], fmt.Sprintf(`"size":%d`, changes))
	}
}

// TestCRD_Changed_EndsOpenWatches when the definition changes, and not before their storage is
// released.
func TestCRD_Changed_EndsOpenWatches(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "watches")
	d := definition{group: "watches.example.com", plural: "clocks", kind: "Clock", versions: []version{{name: "v1", spec: anySpec}}}
	d.create(t, ctx)
	byBytes(t, ctx, d.path("v1", "watches"), "")
	w := startWatch(t, ctx, api, d.path("v1", "watches"), "")
	d.add(t, ctx, "watches", "a", object{"x": 1})
	e, err := w.Next(ctx)
	harness.Check(t, err)
	if e.Type != "ADDED" {
		t.Fatalf("got %s", e.Type)
	}
	d.versions[0].spec = sized(1)
	d.update(t, ctx)
	ctx, cancel := context.WithTimeoutCause(ctx, 60*time.Second, errors.New("the watch of the old form did not end"))
	defer cancel()
	for err == nil {
		_, err = w.Next(ctx)
	}
	if !errors.Is(err, harness.ErrEnded) {
		t.Error(err)
	}
	e, err = startWatch(t, ctx, api, d.path("v1", "watches"), "").Next(ctx)
	harness.Check(t, err)
	if e.Object.Metadata.Name != "a" {
		t.Errorf("the new watch begins with %q", e.Object.Metadata.Name)
	}
	untilBody(t, ctx, d.path("v1", "watches"), "", `"size":1`)
}

// TestCRD_Recreated_ServesNewSchema with the same name, with another schema and other versions.
func TestCRD_Recreated_ServesNewSchema(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "recreated")
	d := definition{group: "recreated.example.com", plural: "ghosts", kind: "Ghost", versions: []version{{name: "v1", spec: anySpec}}}
	for round := range 3 {
		d.versions[0].spec = sized(round)
		d.create(t, ctx)
		before := list(t, ctx, d.path("v1", ""))
		if len(before.Items) != 0 {
			t.Fatalf("round %d begins with %d objects", round, len(before.Items))
		}
		w := startWatch(t, ctx, api, d.path("v1", ""), "resourceVersion="+before.Metadata.ResourceVersion)
		d.add(t, ctx, "recreated", "a", object{})
		for _, read := range d.reads("v1", "recreated") {
			untilBody(t, ctx, read[0], read[1], fmt.Sprintf(`"size":%d`, round))
		}
		byBytes(t, ctx, d.path("v1", "recreated"), "")
		d.delete(t, ctx)
		for _, want := range []string{"ADDED", "DELETED"} {
			if e := harness.Must[harness.Event](t)(w.Next(ctx)); e.Type != want || e.Object.Metadata.Name != "a" {
				t.Errorf("round %d: got %s of %q, want %s of a", round, e.Type, e.Object.Metadata.Name, want)
			}
		}
		for _, read := range d.reads("v1", "recreated") {
			untilGone(t, ctx, read[0], read[1])
		}
		untilGone(t, ctx, d.path("v1", ""), "watch=true")
	}
}

// TestCRD_Terminating_IsReadable until its last object is gone.
func TestCRD_Terminating_IsReadable(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "ends")
	d := definition{group: "ends.example.com", plural: "anchors", kind: "Anchor", versions: []version{{name: "v1", spec: anySpec}}}
	d.create(t, ctx)
	d.add(t, ctx, "ends", "a", object{})
	_, err := api.Patch(ctx, d.path("v1", "ends")+"/a", `{"metadata":{"finalizers":["test.example.com/hold"]}}`)
	harness.Check(t, err)
	untilBody(t, ctx, d.path("v1", "ends"), "", "test.example.com/hold")
	settled(t, ctx, d.path("v1", "ends"))
	d.delete(t, ctx)
	untilBody(t, ctx, definitionsPath+"/"+d.name(), "", `"type":"Terminating"`)
	for _, read := range d.reads("v1", "ends") {
		untilBody(t, ctx, read[0], read[1], `"name":"a"`)
	}
	_, err = api.Patch(ctx, d.path("v1", "ends")+"/a", `{"metadata":{"finalizers":null}}`)
	harness.Check(t, err)
	for _, read := range d.reads("v1", "ends") {
		untilGone(t, ctx, read[0], read[1])
	}
}

// TestCRD_NamesNotAccepted_IsNotServed: another definition has the names.
func TestCRD_NamesNotAccepted_IsNotServed(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	first := definition{group: "names.example.com", plural: "firsts", kind: "Thing", versions: []version{{name: "v1", spec: anySpec}}}
	first.create(t, ctx)
	second := definition{group: "names.example.com", plural: "seconds", kind: "Thing", versions: []version{{name: "v1", spec: anySpec}}}
	_, err := api.Create(ctx, definitionsPath, second.object(t))
	harness.Check(t, err)
	untilBody(t, ctx, definitionsPath+"/"+second.name(), "", `Conflict"`)
	untilCode(t, ctx, second.path("v1", ""), "", http.StatusNotFound)
	first.delete(t, ctx)
	untilCode(t, ctx, first.path("v1", ""), "", http.StatusNotFound)
	untilCode(t, ctx, second.path("v1", ""), "", http.StatusOK)
	byBytes(t, ctx, second.path("v1", ""), "")
}
