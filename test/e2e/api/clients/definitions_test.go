package clients

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

const definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// definition is a definition without a conversion webhook, whose versions differ only in the schema
// of spec.
type definition struct {
	plural   string
	versions []version
}

type version struct {
	name    string
	served  bool
	storage bool
	spec    string // the schema of spec, JSON
	fields  []string
}

const group = "test.example.com"

func (d definition) object() object {
	var versions []any
	for _, v := range d.versions {
		var spec any
		if err := json.Unmarshal([]byte(v.spec), &spec); err != nil {
			panic(err) // the schema is a constant of the test
		}
		var fields []any
		for _, path := range v.fields {
			fields = append(fields, object{"jsonPath": path})
		}
		versions = append(versions, object{
			"name": v.name, "served": v.served, "storage": v.storage, "selectableFields": fields,
			"schema": object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": spec}}},
		})
	}
	kind := strings.ToUpper(d.plural[:1]) + strings.TrimSuffix(d.plural[1:], "s")
	return object{
		"metadata": object{"name": d.plural + "." + group},
		"spec": object{
			"group": group, "scope": "Namespaced", "versions": versions,
			"names": object{"plural": d.plural, "singular": strings.ToLower(kind), "kind": kind, "listKind": kind + "List"},
		},
	}
}

func (d definition) path(version, namespace string) string {
	if namespace == "" {
		return fmt.Sprintf("/apis/%s/%s/%s", group, version, d.plural)
	}
	return fmt.Sprintf("/apis/%s/%s/namespaces/%s/%s", group, version, namespace, d.plural)
}

// create creates the definition and returns when its served versions are available.
func (d definition) create(t *testing.T, ctx context.Context) {
	t.Helper()
	_, err := api.Create(ctx, definitionsPath, d.object())
	harness.Check(t, err)
	d.await(t, ctx)
}

// update replaces the definition and returns when each version is available, or is not, according
// to it.
func (d definition) update(t *testing.T, ctx context.Context) {
	t.Helper()
	o := d.object()
	patch, err := json.Marshal(object{"spec": o["spec"]})
	harness.Check(t, err)
	_, err = api.Patch(ctx, definitionsPath+"/"+d.plural+"."+group, string(patch))
	harness.Check(t, err)
	d.await(t, ctx)
}

func (d definition) await(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, v := range d.versions {
		want := http.StatusOK
		if !v.served {
			want = http.StatusNotFound
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, d.path(v.name, ""), "", nil)
			if err != nil {
				return false, err
			}
			return r.Code == want, fmt.Errorf("version %s: %w, want code %d", v.name, r.Err(), want)
		}))
	}
}

const anySpec = `{"type":"object","x-kubernetes-preserve-unknown-fields":true}`

// TestCRD_VersionsChanged_AreServedAccordingly serves, stops serving and adds versions while
// objects exist.
func TestCRD_VersionsChanged_AreServedAccordingly(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	harness.Namespace(t, ctx, api, "versions")
	d := definition{"gadgets", []version{
		{name: "v1", served: true, storage: true, spec: anySpec},
		{name: "v2", served: true, spec: anySpec},
	}}
	d.create(t, ctx)
	for i := range 20 {
		_, err := api.Create(ctx, d.path("v1", "versions"), object{"apiVersion": group + "/v1", "kind": "Gadget",
			"metadata": object{"name": fmt.Sprintf("gadget-%02d", i)}, "spec": object{"i": i}})
		harness.Check(t, err)
	}
	all, err := api.List(ctx, d.path("v1", ""), "")
	harness.Check(t, err)
	same := func(version string) {
		t.Helper()
		list, err := api.List(ctx, d.path(version, ""), "")
		harness.Check(t, err)
		equalObjects(t, version, list.Items, all.Items)
		for _, o := range list.Items {
			if o.APIVersion != group+"/"+version {
				t.Fatalf("%s is in %s, requested %s", o.Key(), o.APIVersion, version)
			}
		}
	}
	same("v1")
	same("v2")

	d.versions[1].served = false
	d.update(t, ctx)
	same("v1")
	d.versions = append(d.versions, version{name: "v3", served: true, spec: anySpec})
	d.update(t, ctx)
	same("v3")
	d.versions[1].served = true
	d.update(t, ctx)
	same("v2")

	// The storage version changes: existing objects stay in their stored version, new ones use the
	// new version, and reads are not affected.
	d.versions[0].storage, d.versions[2].storage = false, true
	d.update(t, ctx)
	_, err = api.Patch(ctx, d.path("v2", "versions")+"/gadget-07", `{"spec":{"more":"data"}}`)
	harness.Check(t, err)
	all, err = api.List(ctx, d.path("v1", ""), "")
	harness.Check(t, err)
	for _, version := range []string{"v1", "v2", "v3"} {
		same(version)
	}
}

// TestCRD_NewDefault_AppearsInStoredObjects adds a default to a schema after objects were stored
// without that field: the objects do not change in etcd, but all reads return it.
func TestCRD_NewDefault_AppearsInStoredObjects(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	harness.Namespace(t, ctx, api, "defaults")
	d := definition{"lamps", []version{{name: "v1", served: true, storage: true,
		spec: `{"type":"object","properties":{"size":{"type":"integer"}}}`}}}
	d.create(t, ctx)
	created, err := api.Create(ctx, d.path("v1", "defaults"), object{"apiVersion": group + "/v1", "kind": "Lamp",
		"metadata": object{"name": "lamp"}, "spec": object{"size": 3}})
	harness.Check(t, err)

	d.versions[0].spec = `{"type":"object","properties":{"size":{"type":"integer"},"color":{"type":"string","default":"white"}}}`
	d.update(t, ctx)
	path := d.path("v1", "defaults")
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path+"/lamp", "", nil)
		if err != nil {
			return false, err
		}
		return strings.Contains(string(r.Body), `"color":"white"`), fmt.Errorf("get shows %s", r.Body)
	}))
	for _, query := range []string{"", "resourceVersion=0", "limit=1", "resourceVersionMatch=Exact&resourceVersion=" + created.Metadata.ResourceVersion} {
		r, err := api.Do(ctx, http.MethodGet, path, query, nil)
		harness.Check(t, err)
		if !strings.Contains(string(r.Body), `"color":"white"`) || !strings.Contains(string(r.Body), `"resourceVersion":"`+created.Metadata.ResourceVersion+`"`) {
			t.Errorf("list with %q shows %s", query, r.Body)
		}
	}
	// And pruning: a field that is no longer in the schema is not returned.
	d.versions[0].spec = `{"type":"object","properties":{"color":{"type":"string","default":"white"}}}`
	d.update(t, ctx)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		if err != nil {
			return false, err
		}
		return !strings.Contains(string(r.Body), `"size"`), fmt.Errorf("list shows %s", r.Body)
	}))
}

// TestCRD_SelectableField_SelectsInListAndWatch lists and watches by a selectable field of the
// definition.
func TestCRD_SelectableField_SelectsInListAndWatch(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	harness.Namespace(t, ctx, api, "fields")
	d := definition{"paints", []version{{name: "v1", served: true, storage: true,
		spec: `{"type":"object","properties":{"color":{"type":"string"}}}`, fields: []string{".spec.color"}}}}
	d.create(t, ctx)
	path := d.path("v1", "fields")
	colors := []string{"red", "green", "blue"}
	var red []string
	for i := range 30 {
		name := fmt.Sprintf("paint-%02d", i)
		_, err := api.Create(ctx, path, object{"apiVersion": group + "/v1", "kind": "Paint",
			"metadata": object{"name": name}, "spec": object{"color": colors[i%3]}})
		harness.Check(t, err)
		if i%3 == 0 {
			red = append(red, name)
		}
	}
	list, err := api.List(ctx, path, "fieldSelector=spec.color%3Dred")
	harness.Check(t, err)
	equal(t, "red", list.Names(), red)
	items, _, err := api.ListAll(ctx, path, "fieldSelector=spec.color%3Dred", 4)
	harness.Check(t, err)
	equal(t, "red in chunks", (&harness.List{Items: items}).Names(), red)
	w := harness.StartWatch(t, ctx, api, path, "fieldSelector=spec.color%3Dred&resourceVersion="+list.Metadata.ResourceVersion)
	for _, step := range []struct{ name, color, event string }{
		{"paint-00", "blue", "DELETED"}, {"paint-01", "red", "ADDED"}, {"paint-02", "green", ""}, {"paint-03", "red", ""}, {"paint-01", "green", "DELETED"},
	} {
		_, err := api.Patch(ctx, path+"/"+step.name, fmt.Sprintf(`{"spec":{"color":%q}}`, step.color))
		harness.Check(t, err)
		if step.event == "" {
			continue // any event would be the next one below
		}
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != step.event || e.Object.Metadata.Name != step.name {
			t.Fatalf("got %s of %s, want %s of %s", e.Type, e.Object.Metadata.Name, step.event, step.name)
		}
	}
	if r, err := api.Do(ctx, http.MethodGet, path, "fieldSelector=spec.size%3D1", nil); err != nil || r.Code != http.StatusBadRequest {
		t.Errorf("an undeclared field: %+v, %v, want 400", r, err)
	}
}

// TestCRD_Recreated_HasNoPreviousObjects creates and deletes definitions of the same name, each
// with objects, and looks for objects of the previous one.
func TestCRD_Recreated_HasNoPreviousObjects(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	harness.Namespace(t, ctx, api, "rounds")
	d := definition{"ghosts", []version{{name: "v1", served: true, storage: true, spec: anySpec}}}
	for round := range 3 {
		d.create(t, ctx)
		list, err := api.List(ctx, d.path("v1", ""), "")
		harness.Check(t, err)
		if len(list.Items) != 0 {
			t.Fatalf("round %d begins with %d objects", round, len(list.Items))
		}
		w := harness.StartWatch(t, ctx, api, d.path("v1", "rounds"), "resourceVersion="+list.Metadata.ResourceVersion)
		for i := range 10 {
			_, err := api.Create(ctx, d.path("v1", "rounds"), object{"apiVersion": group + "/v1", "kind": "Ghost",
				"metadata": object{"name": fmt.Sprintf("ghost-%d-%d", round, i)}})
			harness.Check(t, err)
		}
		harness.Check(t, api.Delete(ctx, definitionsPath+"/"+d.plural+"."+group))
		events := map[string]int{}
		for events["DELETED"] < 10 {
			e, err := w.Next(ctx)
			if errors.Is(err, harness.ErrEnded) {
				t.Fatalf("the watch ended after %v", events)
			}
			harness.Check(t, err)
			events[e.Type]++
		}
		w.Close()
		if events["ADDED"] != 10 {
			t.Errorf("round %d: events %v", round, events)
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, definitionsPath+"/"+d.plural+"."+group, "", nil)
			return err == nil && r.Code == http.StatusNotFound, err
		}))
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, d.path("v1", ""), "", nil)
			return err == nil && r.Code == http.StatusNotFound, err
		}))
	}
}

// atVersions returns the keys of objects with their resource versions.
func atVersions(objects []harness.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key()+"@"+o.Metadata.ResourceVersion)
	}
	return keys
}

func equalObjects(t *testing.T, what string, got, want []harness.Object) {
	t.Helper()
	equal(t, what, atVersions(got), atVersions(want))
}

// equal compares keys and reports the first difference.
func equal(t *testing.T, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: got %d objects, want %d; from number %d got %v, want %v",
		what, len(got), len(want), i, got[i:min(i+3, len(got))], want[i:min(i+3, len(want))])
}
