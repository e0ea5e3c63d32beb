package history

import (
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// entry is an entry of managedFields, written a number of seconds after noon.
func entry(name string, seconds int, fields string) metav1.ManagedFieldsEntry {
	return metav1.ManagedFieldsEntry{Manager: name, Operation: "Update", APIVersion: "v1", FieldsType: "FieldsV1",
		Time: &metav1.Time{Time: noon.Add(time.Duration(seconds) * time.Second)}, FieldsV1: metav1.NewFieldsV1(fields)}
}

func TestChangedManagers_Version_HasItsWriters(t *testing.T) {
	const x, xy = `{"f:data":{"f:x":{}}}`, `{"f:data":{"f:x":{},"f:y":{}}}`
	status := entry("kubelet", 5, `{"f:status":{"f:phase":{}}}`)
	status.Subresource = "status"
	for name, c := range map[string]struct {
		before, after []metav1.ManagedFieldsEntry
		field         string
		want          string
	}{
		"new":                       {[]metav1.ManagedFieldsEntry{entry("a", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 2, xy)}, "data.y", "b"},
		"other time":                {[]metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 9, x), entry("b", 1, x)}, "data.x", "a"},
		"loser of a field":          {[]metav1.ManagedFieldsEntry{entry("a", 1, xy)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 2, xy)}, "data.y", "b"},
		"same second, more fields":  {[]metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, xy)}, "data.y", "b"},
		"same second, same fields":  {[]metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, `{"f:data":{"f:y":{}}}`)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, `{"f:data":{"f:y":{}}}`)}, "data.x", "a"},
		"same second, taken field":  {[]metav1.ManagedFieldsEntry{entry("a", 1, xy), entry("b", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, xy)}, "data.y", "b"},
		"same second, removed":      {[]metav1.ManagedFieldsEntry{entry("a", 1, xy), entry("b", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), entry("b", 1, x)}, "data.y", "a"},
		"subresource":               {[]metav1.ManagedFieldsEntry{entry("a", 1, x)}, []metav1.ManagedFieldsEntry{entry("a", 1, x), status}, "status.phase", "kubelet (status)"},
		"without managed fields":    {nil, nil, "data.x", ""},
		"entry without a time or x": {nil, []metav1.ManagedFieldsEntry{{Manager: "m"}}, "data.x", "m"},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, m := range changedManagers(c.before, c.after, []fieldChange{{Field: c.field}}) {
				got = append(got, m.String())
			}
			if text := strings.Join(got, ","); text != c.want {
				t.Errorf("managers %q, want %q", text, c.want)
			}
		})
	}
}

func TestOwns_Fields_AreFoundInTheSet(t *testing.T) {
	e := entry("m", 1, `{"f:metadata":{"f:labels":{"f:app.io/a":{}},"f:finalizers":{".":{},"v:\"x\"":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{"f:image":{}}}}}`)
	for field, want := range map[string]bool{
		"metadata.labels[app.io/a]": true, "metadata.labels[app.io/b]": false, "metadata.labels": true, "metadata.finalizers[0]": true,
		"spec.containers[name=c].image": true, "spec.replicas": false, "data": false, "data.x": false,
	} {
		if got := owns(e, field); got != want {
			t.Errorf("%s: %v", field, got)
		}
	}
	if owns(metav1.ManagedFieldsEntry{}, "data") {
		t.Error("an entry without fields owns one")
	}
}

func configMap(uid string, revision int64, data map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "data": data,
		"metadata": map[string]any{"name": "a", "uid": uid, "resourceVersion": fmt.Sprint(revision)}}}
}

func TestVersionOf_Events_AreTheChangesOfAnObject(t *testing.T) {
	first := configMap("u", 31, map[string]any{"x": "1"})
	second := configMap("u", 32, map[string]any{"x": "2"})
	for _, c := range []struct {
		before *unstructured.Unstructured
		event  event
		change string
		fields int
	}{
		{nil, event{"ADDED", 31, first}, created, 0},
		{first, event{"MODIFIED", 32, second}, changed, 1},
		{second, event{"DELETED", 33, second}, deleted, 0},
	} {
		v := versionOf(c.before, c.event, stampOf(observed(), c.event.revision))
		if v.Change != c.change || len(v.Fields) != c.fields || v.Revision != c.event.revision || v.Time == nil {
			t.Errorf("%s at %d: %+v", c.event.kind, c.event.revision, v)
		}
	}
}

func TestState_Events_AreTheDifferenceOfTheEnds(t *testing.T) {
	one, two := configMap("u", 20, map[string]any{"x": "1", "y": "1"}), configMap("u", 31, map[string]any{"x": "2", "y": "1"})
	three := configMap("u", 55, map[string]any{"x": "2", "y": "2"})
	again := configMap("v", 60, map[string]any{"x": "1", "y": "1"})
	for name, c := range map[string]struct {
		first  *unstructured.Unstructured
		events []event
		want   string
	}{
		"no event":                  {one, nil, ""},
		"changed":                   {one, []event{{"MODIFIED", 31, two}, {"MODIFIED", 55, three}}, "changed 55 2: data.x@31 data.y@55"},
		"changed and back":          {one, []event{{"MODIFIED", 31, two}, {"MODIFIED", 55, one}}, ""},
		"added":                     {nil, []event{{"ADDED", 31, two}, {"MODIFIED", 55, three}}, "added 55 2:"},
		"deleted":                   {one, []event{{"DELETED", 31, one}}, "deleted 31 1:"},
		"added and deleted":         {nil, []event{{"ADDED", 31, two}, {"DELETED", 55, two}}, ""},
		"deleted and created":       {one, []event{{"DELETED", 31, one}, {"ADDED", 60, again}}, "replaced 60 2: metadata.uid@60"},
		"created, deleted, created": {nil, []event{{"ADDED", 31, two}, {"DELETED", 40, two}, {"ADDED", 60, again}}, "added 60 3:"},
	} {
		t.Run(name, func(t *testing.T) {
			s := &state{first: c.first, last: c.first}
			for _, e := range c.events {
				s.apply(e)
			}
			got := ""
			if d, differs := s.diff(observed()); differs {
				got = fmt.Sprintf("%s %d %d:", d.Change, d.Revision, d.Versions)
				for _, f := range d.Fields {
					got += fmt.Sprintf(" %s@%d", f.Field, f.Revision)
				}
			}
			if got != c.want {
				t.Errorf("difference %q, want %q", got, c.want)
			}
		})
	}
}
