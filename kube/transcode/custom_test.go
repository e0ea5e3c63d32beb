package transcode_test

import (
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"sigs.k8s.io/yaml"
)

// widgetSchema has every property of schemas that changes what decoding does.
const widgetSchema = `
type: object
properties:
  metadata: {type: object, properties: {name: {type: string, pattern: a}}}
  spec:
    type: object
    properties:
      text: {type: string}
      size: {x-kubernetes-int-or-string: true, anyOf: [{type: integer}, {type: string}]}
      ratio: {type: number}
      maybe: {type: string, nullable: true}
      "a\"<b": {type: object, properties: {c: {type: string}}}
      list: {type: array, items: {type: object, properties: {a: {type: string, default: x}, b: {type: string}}}}
      maybes: {type: array, items: {type: string, nullable: true}}
      map: {type: object, additionalProperties: {type: object, properties: {a: {type: string}}}}
      free: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {known: {type: object, properties: {a: {type: string}}}}}
      freeItems: {type: array, x-kubernetes-preserve-unknown-fields: true, items: {type: object, properties: {a: {type: object}}}}
      template: {type: object, x-kubernetes-embedded-resource: true, x-kubernetes-preserve-unknown-fields: true}
      owned: {type: object, x-kubernetes-embedded-resource: true, properties: {metadata: {type: object, properties: {name: {type: string, default: x}}}}}
      pruned: {type: object, x-kubernetes-embedded-resource: true, properties: {spec: {type: object}}}
  mode: {type: object, properties: {"on": {type: boolean, default: true}, level: {type: integer, default: 3, nullable: true}}}
`

func widgets(t testing.TB) customKind {
	props := &apiextensionsv1.JSONSchemaProps{}
	if err := yaml.UnmarshalStrict([]byte(widgetSchema), props); err != nil {
		t.Fatal(err)
	}
	return newCustomKind(t, props)
}

// storedMetadata is the metadata of an object with three managers.
const storedMetadata = `"creationTimestamp":"2026-01-02T03:04:05Z","deletionGracePeriodSeconds":0,"finalizers":["a","b"],"generation":2,"labels":{"a":"","b":"\u003c\n\""},` +
	`"managedFields":[{"apiVersion":"example.com/v1","fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{"f:labels":{".":{},"f:a":{}}},"f:spec":{"f:list":{"k:{\"a\":\"x\"}":{".":{}},"k:{\"a\":\"y\"}":{}}}},"manager":"kubectl","operation":"Apply"},` +
	`{"apiVersion":"example.com/v1","fieldsType":"FieldsV1","fieldsV1":{},"manager":"controller","operation":"Update","subresource":"status","time":"2026-01-02T03:04:05Z"}],` +
	`"name":"é","namespace":"ns","ownerReferences":[{"apiVersion":"v1","blockOwnerDeletion":true,"controller":false,"kind":"Pod","name":"","uid":"u"}],"uid":"5f7b"`

// storedWidget returns a widget with the metadata and the members that follow it.
func storedWidget(metadata, rest string) string {
	return `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{` + metadata + `}` + rest + "}\n"
}

func storedSpec(spec string) string { return storedWidget(storedMetadata, `,"spec":{`+spec+`}`) }

func TestCustom_StoredAsServed_IsTranscoded(t *testing.T) {
	k := widgets(t)
	for _, stored := range []string{
		storedWidget(storedMetadata, ""),
		strings.TrimSpace(storedWidget(storedMetadata, "")),
		storedWidget(`"creationTimestamp":"2026-01-02T03:04:05Z","generation":1,"uid":"u"`, `,"spec":{}`),
		storedWidget(storedMetadata, `,"mode":{"level":null,"on":false}`),
		storedSpec(`"text":"\u2028\u0000\b\f\n\r\t\\\u0026\u003e` + "\x7fé😀�" + `"`),
		storedSpec(`"ratio":1.5,"size":0`), storedSpec(`"ratio":-0.000001,"size":"50%"`), storedSpec(`"ratio":-12345678901234567`),
		storedSpec(`"maybe":null,"maybes":[null,"a"]`), storedSpec(`"list":[],"map":{}`),
		storedSpec(`"list":[{"a":"x","b":"y"},{"a":"z"}],"map":{"x":{},"y":{"a":""}}`),
		storedSpec(`"a\"\u003cb":{"c":"x"}`),
		storedSpec(`"free":{"a":null,"b":[{"":{},"c":1}],"known":{"a":""}},"freeItems":[{"a":{},"b":{"c":null}}]`),
		storedSpec(`"template":{"apiVersion":"v1","kind":"Pod","metadata":{"labels":{"a":"b"}},"spec":{"a":[]}}`),
		storedSpec(`"owned":{"kind":"Pod"}`),
		storedSpec(`"pruned":{"kind":"Pod","metadata":{"creationTimestamp":"2026-01-02T03:04:05Z","name":"a"},"spec":{}}`),
	} {
		if k.transcoded(t, []byte(stored)) == "" {
			t.Errorf("declined: %s", stored)
		}
	}
}

func TestCustom_ChangedByDecoding_IsDeclined(t *testing.T) {
	k := widgets(t)
	for _, stored := range []string{
		"", "{}", "null", "k8s\x00", strings.Replace(storedSpec(""), "/v1", "/v2", 1), strings.Replace(storedSpec(""), "Widget", "Other", 1),
		storedSpec("") + "\n", storedSpec("") + "{}", strings.Replace(storedSpec(""), ":", ": ", 1), strings.Replace(storedSpec(""), "{", "{ ", 1),
		strings.Replace(storedSpec(""), `"kind":"Widget",`, "", 1), `{"apiVersion":"example.com/v1","kind":"Widget"}`,
		storedWidget(storedMetadata, `,"unknown":1`), storedWidget(storedMetadata, `,"mode":{}`), storedWidget(storedMetadata, `,"mode":{"level":1}`),
		storedWidget(storedMetadata, `,"mode":{"level":1,"on":null}`), storedWidget(storedMetadata, `,"spec":null`),
		storedSpec(`"text":"a","text":"b"`), storedSpec(`"text":"a","list":[]`), storedSpec(`"unknown":{}`), storedSpec(`"text":null`),
		storedSpec(`"list":[{}]`), storedSpec(`"list":[{"a":"x","c":1}]`), storedSpec(`"list":[null]`), storedSpec(`"list":[{"a":null}]`),
		storedSpec(`"map":{"x":{"b":1}}`), storedSpec(`"map":{"x":null}`), storedSpec(`"text":{"a":1}`), storedSpec(`"text":[{"a":1}]`),
		storedSpec(`"a\"\u003cb":{"d":"x"}`),
		storedSpec(`"free":{"known":{"b":""}}`), storedSpec(`"free":{"known":null}`), storedSpec(`"freeItems":[{"a":{"b":1}}]`),
		storedSpec(`"template":{"apiVersion":1}`), storedSpec(`"template":{"metadata":{"creationTimestamp":null}}`), storedSpec(`"template":{"metadata":{"other":1}}`),
		storedSpec(`"owned":{"metadata":{"labels":{"a":"b"}}}`), storedSpec(`"template":{"metadata":{"labels":{}}}`), storedSpec(`"pruned":{"metadata":{},"status":{}}`),
		storedSpec(`"ratio":1.0`), storedSpec(`"ratio":1e3`), storedSpec(`"ratio":-0`), storedSpec(`"ratio":12345678901234567890`), storedSpec(`"ratio":0.0000001`),
		storedSpec(`"ratio":0.10000000000000000001`), storedSpec(`"ratio":01`), storedSpec(`"ratio":.5`), storedSpec(`"ratio":-`),
		storedSpec(`"text":"<"`), storedSpec(`"text":"\u003C"`), storedSpec(`"text":"\u0041"`), storedSpec(`"text":"\/"`), storedSpec(`"text":"\u000a"`),
		storedSpec(`"text":"\ufffd"`), storedSpec(`"text":"\ud83d\ude00"`), storedSpec("\"text\":\"\u2028\""), storedSpec("\"text\":\"\xff\""), storedSpec("\"text\":\"\n\""),
		storedSpec(`"text":"`), storedSpec(`"text":"\`),
		storedSpec(strings.Repeat(`"free":{`, 200) + strings.Repeat("}", 200)),
	} {
		if got := k.transcoded(t, []byte(stored)); got != "" {
			t.Errorf("%s is transcoded to\n%s", stored, got)
		}
	}
}

func TestCustom_MetadataChangedByDecoding_IsDeclined(t *testing.T) {
	k := widgets(t)
	for _, change := range [][2]string{
		{`"creationTimestamp":"2026-01-02T03:04:05Z",`, ""}, {`"2026-01-02T03:04:05Z"`, "null"}, {"05Z", "05.1Z"}, {"05Z", "05+00:00"}, {"2026-01-02T03:04:05Z", "0001-01-01T00:00:00Z"},
		{"2026-01-02", "2026-02-30"}, {`"generation":2,`, ""}, {`"generation":2`, `"generation":0`}, {`"generation":2`, `"generation":2.5`}, {`"generation":2`, `"generation":"2"`},
		{`["a","b"]`, "[]"}, {`["a","b"]`, `["a",1]`}, {`["a","b"]`, "{}"}, {`"a":""`, `"a":1`}, {`"a":""`, `"a":null`}, {`"uid":"5f7b"`, `"uid":""`}, {`,"uid":"5f7b"`, ""},
		{`"uid":"5f7b"`, `"resourceVersion":"7","uid":"5f7b"`}, {`"uid":"5f7b"`, `"selfLink":"a","uid":"5f7b"`}, {`"uid":"5f7b"`, `"other":"a","uid":"5f7b"`},
		{`"controller":false`, `"controller":1`}, {`"controller":false`, `"controller":null`}, {`"name":"",`, ""}, {`"fieldsV1":{}`, `"fieldsV1":[]`}, {`"fieldsV1":{}`, `"fieldsV1":null`},
		{`"manager":"kubectl"`, `"manager":""`}, {`"name":"é"`, `"name":1`}, {`"kind":"Pod"`, `"kind":"Pod","more":1`}, {`"operation":"Apply"`, `"more":1,"operation":"Apply"`},
		{`"k:{\"a\":\"x\"}"`, `"k:{\"a\":\"z\"}"`}, {`"deletionGracePeriodSeconds":0`, `"deletionGracePeriodSeconds":"0"`},
	} {
		stored := storedWidget(strings.Replace(storedMetadata, change[0], change[1], 1), "")
		if stored == storedWidget(storedMetadata, "") {
			t.Fatalf("no %s", change[0])
		}
		if got := k.transcoded(t, []byte(stored)); got != "" {
			t.Errorf("%s is transcoded to\n%s", stored, got)
		}
	}
}

// FuzzCustom transcodes arbitrary bytes. An item that is not declined has upstream's bytes; an
// object that upstream has encoded and that has usual metadata is not declined.
func FuzzCustom(f *testing.F) {
	k := widgets(f)
	for _, spec := range []string{
		`"free":{"a":[1,-1.5,"\u003c\n",null,{"b":true}]},"list":[{"a":"x"}],"map":{"x":{"a":"y"}},"size":"1"`,
		`"template":{"apiVersion":"v1","kind":"Pod","metadata":{"labels":{"a":"b"}}}`,
	} {
		f.Add([]byte(storedSpec(spec)))
		f.Add([]byte(storedWidget(storedMetadata, `,"mode":{"level":null,"on":false},"spec":{`+spec+`}`)))
	}
	f.Fuzz(func(t *testing.T, stored []byte) {
		k.transcoded(t, stored)
		item, ok := k.served(t, stored, 0)
		if !ok {
			return
		}
		item = item[:len(item)-1]
		again, ok := k.served(t, item, 0)
		if !ok || string(again[:len(again)-1]) != string(item) {
			return
		}
		k.transcoded(t, item)
	})
}
