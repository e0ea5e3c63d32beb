package transcode

import (
	"encoding/json"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

var thing = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Thing"}

// storedThings are seeds: objects in the version, in other forms, and malformed.
var storedThings = []string{
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"name":"x","labels":{"a":"b","c":"d"}},"spec":{"color":"red"}}`,
	` { "spec" : { "other" : [1,-2.5,{"color":"no"}], "color" : "red" } , "kind" : "Thing" , "apiVersion" : "example.com/v1" } `,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"managedFields":[{"k:{\"a\":\"\\\"\"}":{}}],"labels":{"a":"b"}},"spec":{"color":"é"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{}},"spec":{"color":""}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":null,"spec":null}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":null},"spec":{"color":null}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":5}},"spec":{"color":true}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b","a":"c"}},"spec":{"color":"red","color":"blue"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"\u0062"}},"spec":{"color":"r\u0065d"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"\u0061":"b"}},"spec":{"c\u006flor":"red"}}`,
	`{"apiVersion":"example.com/v2","kind":"Thing","metadata":{"labels":{"a":"b"}},"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Other","metadata":{"labels":{"a":"b"}},"spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"spec":{"color":"blue"}}`,
	`{"apiVersion":"example.com/v1","apiVersion":"example.com/v2","kind":"Thing","spec":{"color":"red"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},}`, `{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"}} {}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red","n":01}}`, `{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red","n":"\u00zz"}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"` + "\xff" + `"}}`, `{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red","n":nul}}`,
	`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red","n":` + strings.Repeat("[", 200) + strings.Repeat("]", 200) + `}}`,
	thingWithNumber("1e999"), thingWithNumber("-1E+400"), thingWithNumber("2.5e3"), thingWithNumber("1e-999"),
	thingWithNumber(strings.Repeat("9", 400)), thingWithNumber("-" + strings.Repeat("9", 309) + ".5"), thingWithNumber("0." + strings.Repeat("9", 400)),
	`[]`, `{}`, ``, `{`, `null`, "k8s\x00", `{"apiVersion":"example.com/v1","kind":"Thing"`, "{\"\\",
}

// thingWithNumber returns an object with a number beside the labels and the field.
func thingWithNumber(n string) string {
	return `{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"labels":{"a":"b"}},"spec":{"color":"red"},"status":{"n":` + n + `}}`
}

// found is the value that upstream's selectors evaluate; ok is false if a decoder could find
// another one, for a default or a conversion.
func found(t *testing.T, data []byte, label string) (value string, present, ok bool) {
	t.Helper()
	var u unstructured.Unstructured
	if err := u.UnmarshalJSON(data); err != nil || u.GroupVersionKind() != thing {
		return "", false, false
	}
	if label != "" {
		value, present = u.GetLabels()[label]
		return value, present, true
	}
	value, present, err := unstructured.NestedString(u.Object, "spec", "color")
	return value, present, err == nil && present
}

func compareFound(t *testing.T, data []byte) (n int) {
	t.Helper()
	for name, find := range map[string]Find{"": FindJSONField(thing, "spec.color"), "a": FindJSONLabel(thing, "a"), "c": FindJSONLabel(thing, "c")} {
		value, present, ok := find(data)
		if !ok {
			continue
		}
		if !json.Valid(data) {
			t.Fatalf("found %q in invalid JSON %q", value, data)
		}
		if want, has, known := found(t, data, name); !known || present != has || string(value) != want {
			t.Fatalf("%q: found %q, %t, want %q, %t, %t, in %q", name, value, present, want, has, known, data)
		}
		n++
	}
	return n
}

// FuzzFindJSON compares the values that are found in any bytes with those of upstream's decoder.
func FuzzFindJSON(f *testing.F) {
	for _, text := range storedThings {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) { compareFound(t, data) })
}

// TestFindJSON_Forms_AreFoundOrDeclined: the first four objects have all values.
func TestFindJSON_Forms_AreFoundOrDeclined(t *testing.T) {
	for i, text := range storedThings {
		n := compareFound(t, []byte(text))
		if i < 4 && n != 3 {
			t.Errorf("%d of 3 values were found in %s", n, text)
		}
	}
	for text, want := range map[string]bool{
		// may have a default
		`{"apiVersion":"example.com/v1","kind":"Thing"}`:                                        false,
		`{"apiVersion":"example.com/v1","kind":"Thing","spec":{}}`:                              false,
		`{"apiVersion":"example.com/v1","kind":"Thing","spec":"no"}`:                            false,
		`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"metadata":null}`: true,
		`{"apiVersion":"example.com/v1","kind":"Thing","spec":{"color":"red"},"metadata":"no"}`: false,
		storedThings[7]: false, storedThings[8]: false, storedThings[10]: false, storedThings[11]: false,
	} {
		if _, _, ok := FindJSONField(thing, "spec.color")([]byte(text)); ok != want {
			t.Errorf("%s: found %t", text, ok)
		}
	}
	for _, path := range []string{"metadata.name", "metadata", "spec.template.metadata.name", "spec['a.b']", `spec.a\.b`, "spec.a[0]", "", "spec..a", "spec.*"} {
		if FindJSONField(thing, path) != nil {
			t.Errorf("the path %q is accepted", path)
		}
	}
	if FindJSONLabel(thing, "") != nil {
		t.Error("the label without a name is accepted")
	}
}

// TestFindJSON_Value_AllocatesNothing.
func TestFindJSON_Value_AllocatesNothing(t *testing.T) {
	data := []byte(storedThings[0])
	for name, find := range map[string]Find{"field": FindJSONField(thing, "spec.color"), "label": FindJSONLabel(thing, "a")} {
		if n := testing.AllocsPerRun(100, func() { find(data) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}
