package readpath

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	selector "k8s.io/apimachinery/pkg/fields"

	"github.com/stratakube/strata/test/harness"
)

// TestCRD_SelectableFieldAndLabels_OfAnyStoredForm_EqualFilter: objects whose stored form lacks the
// field, which has a default since, have characters that JSON escapes, members of the same name
// elsewhere, or another version than the one that is read are selected by their field and labels as
// a filter of all objects selects them.
func TestCRD_SelectableFieldAndLabels_OfAnyStoredForm_EqualFilter(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "stored-forms")
	const spec = `{"type":"object","x-kubernetes-preserve-unknown-fields":true,"properties":{"color":{"type":"string"%s},"count":{"type":"integer"}},"description":%q}`
	// Upstream rejects versions of which either the fields or the schemas are equal.
	fields, reversed := []string{".spec.color", ".spec.count"}, []string{".spec.count", ".spec.color"}
	d := definition{group: "hues.example.com", plural: "hues", kind: "Hue", versions: []version{
		{name: "v1", spec: fmt.Sprintf(spec, "", "first"), fields: fields},
		{name: "v2", spec: fmt.Sprintf(spec, "", "second"), fields: reversed},
	}}
	d.create(t, ctx)
	colors := []any{nil, "red", `"quoted"`, `back\slash`, "<html>&", "grün", "", "\u2028", "gray"}
	const n = 180 // more than a list examines without an index
	for i := range n {
		own := object{"count": i % 7, "other": object{"color": "red"}}
		if color := colors[i%len(colors)]; color != nil {
			own["color"] = color
		}
		v := []string{"v1", "v2"}[i%2]
		_, err := api.Create(ctx, d.path(v, "stored-forms"), object{"apiVersion": d.in() + "/" + v, "kind": "Hue", "spec": own,
			"metadata": object{"name": fmt.Sprintf("hue-%03d", i), "labels": object{"of3": fmt.Sprint(i % 3)}, "annotations": object{"color": "red", "quotes": `{"color":"\"red"}`}}})
		harness.Check(t, err)
	}
	d.versions[0].spec = fmt.Sprintf(spec, `,"default":"gray"`, "first")
	d.versions[1].spec = fmt.Sprintf(spec, `,"default":"red"`, "second")
	d.update(t, ctx)
	const missing = "gray" // upstream applies the defaults of the stored version
	for _, v := range []string{"v1", "v2"} {
		path := d.path(v, "stored-forms")
		var all []hue
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			var err error
			if all, err = hues(ctx, path, ""); err != nil || len(all) != n {
				return false, fmt.Errorf("%d objects: %w", len(all), err)
			}
			return all[0].Spec.Color == missing, fmt.Errorf("%s of hue-000 has the color %q, want the default %q", v, all[0].Spec.Color, missing)
		}))
		for range 3 { // the first use makes the index
			for _, c := range colors {
				color, _ := c.(string)
				if c == nil {
					color = missing
				}
				for query, selects := range map[string]func(hue) bool{
					"spec.color=" + selector.EscapeValue(color):                   func(h hue) bool { return h.Spec.Color == color },
					"spec.color!=" + selector.EscapeValue(color):                  func(h hue) bool { return h.Spec.Color != color },
					"spec.color=" + selector.EscapeValue(color) + ",spec.count=3": func(h hue) bool { return h.Spec.Color == color && h.Spec.Count == 3 },
				} {
					got, err := hues(ctx, path, "fieldSelector="+url.QueryEscape(query))
					harness.Check(t, err)
					harness.RequireEqual(t, v+" "+query, hueNames(got, nil), hueNames(all, selects))
				}
			}
			got, err := hues(ctx, path, "labelSelector=of3%3D1")
			harness.Check(t, err)
			harness.RequireEqual(t, v+" by label", hueNames(got, nil), hueNames(all, func(h hue) bool { return h.Metadata.Labels["of3"] == "1" }))
		}
	}
}

// hue is a custom resource.
type hue struct {
	Metadata metav1.ObjectMeta
	Spec     struct {
		Color string
		Count int
	}
}

// hues lists custom resources.
func hues(ctx context.Context, path, query string) ([]hue, error) {
	r, err := api.Read(ctx, path, query, "")
	if err != nil {
		return nil, err
	}
	if r.Code != http.StatusOK {
		return nil, fmt.Errorf("LIST %s?%s: %w", path, query, r.Err())
	}
	var list struct{ Items []hue }
	err = json.Unmarshal(r.Body, &list)
	return list.Items, err
}

// hueNames returns the names of the selected objects, of all if selects is nil.
func hueNames(all []hue, selects func(hue) bool) (names []string) {
	for _, h := range all {
		if selects == nil || selects(h) {
			names = append(names, h.Metadata.Name)
		}
	}
	return names
}

// TestCRD_SelectableField_SelectsInListAndWatch lists and watches by a selectable field of the
// definition.
func TestCRD_SelectableField_SelectsInListAndWatch(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "fields")
	d := definition{group: "paints.example.com", plural: "paints", kind: "Paint", versions: []version{{name: "v1",
		spec: `{"type":"object","properties":{"color":{"type":"string"}}}`, fields: []string{".spec.color"}}}}
	d.create(t, ctx)
	path := d.path("v1", "fields")
	colors := []string{"red", "green", "blue"}
	var red []string
	for i := range 30 {
		name := fmt.Sprintf("paint-%02d", i)
		d.add(t, ctx, "fields", name, object{"color": colors[i%3]})
		if i%3 == 0 {
			red = append(red, name)
		}
	}
	list, err := api.List(ctx, path, "fieldSelector=spec.color%3Dred")
	harness.Check(t, err)
	harness.RequireEqual(t, "red", list.Names(), red)
	items, _, err := api.ListAll(ctx, path, "fieldSelector=spec.color%3Dred", 4)
	harness.Check(t, err)
	harness.RequireEqual(t, "red in chunks", (&harness.List{Items: items}).Names(), red)
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
