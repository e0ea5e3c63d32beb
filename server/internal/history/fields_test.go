package history

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func decode(t *testing.T, text string) map[string]any {
	t.Helper()
	object := map[string]any{}
	testcheck.NoError(t, json.Unmarshal([]byte(text), &object))
	return object
}

func TestCompare_TwoStates_ReturnsChangedFields(t *testing.T) {
	for name, c := range map[string]struct{ before, after, want string }{
		"equal":                 {`{"a":{"b":[1,{"c":2}]}}`, `{"a":{"b":[1,{"c":2}]}}`, ``},
		"value":                 {`{"spec":{"replicas":1,"x":true}}`, `{"spec":{"replicas":3,"x":true}}`, `spec.replicas: 1 -> 3`},
		"added and removed":     {`{"data":{"a":"1"}}`, `{"data":{"b":"2"}}`, `data.a: "1" -> <none>; data.b: <none> -> "2"`},
		"subtree":               {`{}`, `{"spec":{"a":{"b":1}}}`, `spec: <none> -> {"a":{"b":1}}`},
		"key with dots":         {`{"labels":{"app.io/a":"x"}}`, `{"labels":{"app.io/a":"y"}}`, `labels[app.io/a]: "x" -> "y"`},
		"other type":            {`{"a":[1]}`, `{"a":{"b":1}}`, `a: [1] -> {"b":1}`},
		"list of equal length":  {`{"args":["a","b"]}`, `{"args":["a","c"]}`, `args[1]: "b" -> "c"`},
		"list of other length":  {`{"finalizers":["a"]}`, `{"finalizers":["a","b"]}`, `finalizers: ["a"] -> ["a","b"]`},
		"list by name":          {`{"c":[{"name":"x","i":1},{"name":"y"}]}`, `{"c":[{"name":"z"},{"name":"x","i":2}]}`, `c[name=x].i: 1 -> 2; c[name=y]: {"name":"y"} -> <none>; c[name=z]: <none> -> {"name":"z"}`},
		"list by type":          {`{"c":[{"type":"Ready","status":"True"}]}`, `{"c":[{"type":"Ready","status":"False"}]}`, `c[type=Ready].status: "True" -> "False"`},
		"list with double name": {`{"c":[{"name":"x"},{"name":"x"}]}`, `{"c":[{"name":"x"},{"name":"y"}]}`, `c[1].name: "x" -> "y"`},
		"order of a list":       {`{"c":[{"name":"x"},{"name":"y"}]}`, `{"c":[{"name":"y"},{"name":"x"}]}`, `c[0].name: "x" -> "y"; c[1].name: "y" -> "x"`},
		"ignored":               {`{"metadata":{"resourceVersion":"1","managedFields":[],"name":"a"}}`, `{"metadata":{"resourceVersion":"2","managedFields":[1],"name":"a"}}`, ``},
		"null":                  {`{"a":null}`, `{}`, ``},
	} {
		t.Run(name, func(t *testing.T) {
			var got []string
			for _, change := range compare(decode(t, c.before), decode(t, c.after)) {
				got = append(got, fmt.Sprintf("%s: %s -> %s", change.Field, value(change.Before), value(change.After)))
			}
			if text := strings.Join(got, "; "); text != c.want {
				t.Errorf("changes\n%s\nwant\n%s", text, c.want)
			}
		})
	}
}

func TestWithin_Paths(t *testing.T) {
	for _, c := range []struct {
		outer, inner string
		want         bool
	}{
		{"spec", "spec", true}, {"spec", "spec.a", true}, {"spec", "spec[a.b]", true}, {"spec", "special", false}, {"spec.a", "spec", false},
	} {
		if got := within(c.outer, c.inner); got != c.want {
			t.Errorf("within(%q, %q) = %v", c.outer, c.inner, got)
		}
	}
}

func TestKeyed_ListsWithoutKey_AreNotMatched(t *testing.T) {
	for _, text := range []string{`[1]`, `[{"name":"a"},{"other":"b"}]`, `[{"name":"a"},{"name":"a"}]`} {
		var list []any
		testcheck.NoError(t, json.Unmarshal([]byte(text), &list))
		if elements, _ := keyed(list, "name"); elements != nil {
			t.Errorf("%s is matched by name: %v", text, elements)
		}
	}
	_, order := keyed([]any{map[string]any{"name": "b"}, map[string]any{"name": "a"}}, "name")
	if !slices.Equal(order, []string{"b", "a"}) {
		t.Errorf("order %v", order)
	}
}
