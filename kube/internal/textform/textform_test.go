package textform

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	serializerjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// forms are the forms with the functions that upstream's encoders call.
var forms = []struct {
	name     string
	form     *Form
	upstream func(json []byte) ([]byte, error)
	options  serializerjson.SerializerOptions
}{
	{"YAML", YAML, yaml.JSONToYAML, serializerjson.SerializerOptions{Yaml: true}},
	{"indented", Indented, func(object []byte) ([]byte, error) {
		var b bytes.Buffer
		err := json.Indent(&b, object, "", "  ")
		return b.Bytes(), err
	}, serializerjson.SerializerOptions{Pretty: true}},
}

// listOf returns a list with the items, and the list in the form.
func listOf(f *Form, items ...[]byte) (list, text []byte, err error) {
	const head, tail = `{"kind":"List","apiVersion":"v1","metadata":{"continue":"items: []","resourceVersion":"1"},"items":[`, `]}`
	list = slices.Concat([]byte(head), bytes.Join(items, []byte(",")), []byte(tail))
	before, after, err := f.Around([]byte(head), []byte(tail), "items")
	if err != nil {
		return list, nil, err
	}
	text = before
	for i, item := range items {
		if text, err = f.Element(text, item, i == 0); err != nil {
			return list, nil, err
		}
	}
	return list, append(text, after...), nil
}

// compare returns a difference between the forms and upstream's functions: of an object, and of a
// list that has it at its begin, in its midst and at its end.
func compare(object []byte) error {
	for _, f := range forms {
		want, wantErr := f.upstream(object)
		got, err := f.form.Object(nil, object)
		if fmt.Sprint(err) != fmt.Sprint(wantErr) || err == nil && !bytes.Equal(got, want) {
			return fmt.Errorf("%s of %q:\n%q, %v\nwant\n%q, %v", f.name, object, got, err, want, wantErr)
		}
		if f.form.Check != nil {
			if err := f.form.Check(object); fmt.Sprint(err) != fmt.Sprint(wantErr) {
				return fmt.Errorf("check of %s of %q: %v, want %v", f.name, object, err, wantErr)
			}
		}
		list, got, err := listOf(f.form, object, object, []byte(`{"a":"b"}`), object)
		want, wantErr = f.upstream(list)
		// The text of an error depends on the place of a long string.
		if (err == nil) != (wantErr == nil) || err == nil && !bytes.Equal(got, want) {
			return fmt.Errorf("list as %s of %q:\n%q, %v\nwant\n%q, %v", f.name, object, got, err, want, wantErr)
		}
	}
	return nil
}

// kinds returns all kinds of the client's scheme.
func kinds() []schema.GroupVersionKind {
	all := slices.Collect(maps.Keys(scheme.Scheme.AllKnownTypes()))
	all = slices.DeleteFunc(all, func(gvk schema.GroupVersionKind) bool { return gvk.Version == runtime.APIVersionInternal })
	slices.SortFunc(all, func(a, b schema.GroupVersionKind) int { return strings.Compare(a.String(), b.String()) })
	return all
}

// TestForms_AllKinds_EqualUpstream fills objects of all kinds at random and compares them, and
// lists of them, with the output of the serializers of k8s.io/apimachinery.
func TestForms_AllKinds_EqualUpstream(t *testing.T) {
	fill := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(1), serializer.NewCodecFactory(scheme.Scheme)).NilChance(0.2).NumElements(0, 2)
	parsed := 0
	for _, gvk := range kinds() {
		obj, err := scheme.Scheme.New(gvk)
		if err != nil {
			t.Fatal(err)
		}
		fill.Fill(obj)
		obj.GetObjectKind().SetGroupVersionKind(gvk)
		object, err := json.Marshal(obj)
		if err != nil {
			continue // raw fields that are filled at random
		}
		if _, ok := parse(object); ok {
			parsed++
		}
		if err := compare(object); err != nil {
			t.Errorf("%s: %v", gvk, err)
		}
		for _, f := range forms {
			var want bytes.Buffer
			wantErr := serializerjson.NewSerializerWithOptions(serializerjson.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, f.options).Encode(obj, &want)
			if got, err := f.form.Object(nil, object); fmt.Sprint(err) != fmt.Sprint(wantErr) || err == nil && !bytes.Equal(got, want.Bytes()) {
				t.Errorf("%s of a %s: %q, %v, want %q, %v", f.name, gvk, got, err, want.Bytes(), wantErr)
			}
		}
	}
	if all := len(kinds()); parsed < all/2 {
		t.Errorf("%d of %d kinds are read by the parser", parsed, all)
	}
}

// texts are strings that YAML quotes, folds, or writes in a block.
var texts = []string{
	"", " ", "a", " a", "a ", "~", "null", "Null", "true", "yes", "No", "on", "y", "n", "1", "-1", "+1", "0x1f", "0o7", "017", "1_000", "1e3", "1.5", ".5", ".inf", "-.inf", ".nan",
	"1:30", "190:20:30", "2026-11-28", "2026-11-28T01:02:03Z", "<<", "=", "!", "!!str", "&a", "*a", "- a", "-", "?", ": ", "a: b", "a:b", "a #b", "#a", "%a", "@a", "`a`", "'", "'a'", "\"", `\`, "|", ">", "{}", "[]",
	"---", "...", "a\nb", "a\n", "\na", "a\n\n", "\n", " \n a", "a \nb", "a\n  b\n", "a\tb", "\ta", "a\r\nb", "\x01", "\x00", "\b\f", "é", "日本", "🙂", "\u0085", "\u00a0", "\u2028", "\u2029", "\ufeff", "\ufffe", "\ufffd", "\x7f", "\u0080",
	"<&>", strings.Repeat("long ", 40), strings.Repeat("x", 200), strings.Repeat("long ", 40) + "\n" + strings.Repeat("b ", 80), " " + strings.Repeat("long ", 40),
	strings.Repeat("'quoted' ", 30), strings.Repeat("é ", 90), strings.Repeat("k", 300), strings.Repeat("k", 1100), `{"a":"b"}`,
}

// TestForms_UnusualTexts_EqualUpstream has each text as value, as key, and in nested values.
func TestForms_UnusualTexts_EqualUpstream(t *testing.T) {
	for _, s := range texts {
		for _, v := range []any{
			map[string]any{"a": s}, map[string]any{s: "a"}, map[string]any{"a": map[string]any{"b": []any{s, map[string]any{s: s}, []any{s, s}}, "z": 1}},
		} {
			object, err := json.Marshal(v)
			if err != nil {
				t.Fatal(err)
			}
			if err := compare(object); err != nil {
				t.Error(err)
			}
		}
	}
	all := map[string]any{}
	for i, s := range texts {
		if _, err := yaml.JSONToYAML(fmt.Appendf(nil, "{%q:1}", s)); err == nil && len(s) < maxKey {
			all[s] = i
		}
	}
	for i := range 120 { // the order of keys with numbers
		all[fmt.Sprintf("k%d", i)], all[fmt.Sprintf("%d", i)], all[fmt.Sprintf("k0%d-%c", i, 'a'+i%26)] = i, true, nil
	}
	object, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	if err := compare(object); err != nil {
		t.Error(err)
	}
}

// jsonSeeds are JSON as encoding/json does not write it, and numbers.
var jsonSeeds = []string{
	`{}`, `{"a":{}}`, `{"a":[]}`, `{"a":[[],[[]],{},[{}]]}`, `{"a":null,"b":true,"c":false}`, `{"a":1,"a":2}`, `{"a": 1}`, "{\"a\":1}\n", `{"a":"\/"}`, `{"a":"\ud83d\ude42"}`, `{"a":"\ud83d"}`,
	`{"a":0,"b":-0,"c":-1,"d":1.0,"e":1e3,"f":1E-7,"g":1e+21,"h":12345678901234567890,"i":-9223372036854775808,"j":9223372036854775807,"k":18446744073709551616,"l":0.1,"m":1e400,"n":-0.0}`,
	`{"<<":{"a":1},"b":2}`, `{"<<":"x"}`, "{\"a\":\"\u0085\"}", "{\"a\":\"\u2028\"}", "{\"a\":\"\x7f\"}", `{"a":"\u0041\u00e9\u2028\u0000\u007f\u0085"}`,
	strings.Repeat(`{"a":`, 30) + "1" + strings.Repeat("}", 30), `{"` + strings.Repeat("k", 600) + `":"v"}`,
}

// TestForms_UnusualJSON_EqualUpstream compares the seeds of FuzzForms.
func TestForms_UnusualJSON_EqualUpstream(t *testing.T) {
	for _, s := range jsonSeeds {
		if err := compare([]byte(strings.TrimSuffix(s, "\n"))); err != nil {
			t.Error(err)
		}
	}
}

// FuzzForms compares objects in any valid JSON without spaces, and in the form of encoding/json.
func FuzzForms(f *testing.F) {
	for _, s := range jsonSeeds {
		f.Add([]byte(s))
	}
	for _, s := range texts {
		if object, err := json.Marshal(map[string]any{s: s, "a": []string{s}}); err == nil {
			f.Add(object)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var value map[string]any
		var compact bytes.Buffer
		if json.Unmarshal(data, &value) != nil || json.Compact(&compact, data) != nil || compact.Bytes()[0] != '{' {
			return
		}
		if err := compare(compact.Bytes()); err != nil {
			t.Fatal(err)
		}
		if data, err := json.Marshal(value); err == nil {
			if err := compare(data); err != nil {
				t.Fatal(err)
			}
		}
	})
}
