package chunks

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/test/harness"
)

// managedObjects are objects that three managers apply: one that is transcoded, one that is not,
// one that the registry changes when it is read, and a custom resource.
var managedObjects = []struct{ path, name, manifest string }{
	{"/api/v1/namespaces/managed/configmaps", "a", `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","annotations":{"a-%[1]s":"]}\"managedFields\""}},"data":{"d-%[1]s":"x"}}`},
	{"/apis/apps/v1/namespaces/managed/deployments", "a", `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"a","annotations":{"a-%[1]s":"x"}},
		"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`},
	{"/api/v1/namespaces/managed/services", "a", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"a","labels":{"l-%[1]s":"x"}},"spec":{"ports":[{"port":80}]}}`},
	{"/apis/managed.example.com/v1/namespaces/managed/things", "a", `{"apiVersion":"managed.example.com/v1","kind":"Thing","metadata":{"name":"a","annotations":{"a-%[1]s":"\\\\"}},"spec":{"s-%[1]s":{"managedFields":[1]}}}`},
}

const managedDefinition = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"things.managed.example.com"},
	"spec":{"group":"managed.example.com","scope":"Namespaced","names":{"plural":"things","singular":"thing","kind":"Thing","listKind":"ThingList"},
	"versions":[{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`

const dropManagedFields = ";drop=metadata.managedFields"

// TestManagedFields_Dropped_OthersAreEqual compares GETs, LISTs, pages and watches without managed
// fields with those that have them, in both orders.
func TestManagedFields_Dropped_OthersAreEqual(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	api := shared.replicas[len(shared.replicas)-1].api
	applyManaged(t, ctx, api)
	accepts := []string{
		"application/json", "application/vnd.kubernetes.protobuf", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
		"application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
		"application/yaml", "application/yaml;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
	}
	t.Run("objects", func(t *testing.T) {
		for i, o := range managedObjects {
			t.Run(o.path, func(t *testing.T) {
				t.Parallel() // each watch takes a second
				list, err := api.List(ctx, o.path, "")
				harness.Check(t, err)
				for j, accept := range accepts {
					if strings.Contains(o.path, "managed.example.com") && accept == "application/vnd.kubernetes.protobuf" {
						continue
					}
					listAs := strings.Replace(accept, "PartialObjectMetadata", "PartialObjectMetadataList", 1)
					for _, r := range []struct{ path, query, accept string }{
						{o.path + "/" + o.name, "", accept},
						{o.path, "", listAs},
						{o.path, "limit=1", listAs},
						{o.path, "resourceVersionMatch=Exact&resourceVersion=" + list.Metadata.ResourceVersion, listAs},
						{o.path, "watch=1&timeoutSeconds=1&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan", accept},
					} {
						first, second := r.accept, r.accept+dropManagedFields
						if (i+j)%2 == 1 {
							first, second = second, first
						}
						watch := strings.HasPrefix(r.query, "watch")
						if watch && strings.HasPrefix(accept, "application/yaml") {
							continue // watches have no YAML
						}
						bodies := map[string][]byte{}
						harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
							var again []byte
							for i, accept := range []string{first, second, first} {
								answer, err := api.DoAs(ctx, http.MethodGet, r.path, r.query, "", accept, nil)
								if err != nil {
									return false, err
								}
								if answer.Code != http.StatusOK {
									return false, fmt.Errorf("%s?%s as %s: %w", r.path, r.query, accept, answer.Err())
								}
								if watch && !bytes.Contains(answer.Body, []byte("k8s.io/initial-events-end")) {
									// the second was over before the objects were sent
									return false, fmt.Errorf("%s?%s as %s has not all initial events", r.path, r.query, accept)
								}
								if i == 2 {
									again = answer.Body
								} else if bodies[accept] = answer.Body; watch && i == 1 {
									return true, nil // its bookmark is not compared
								}
							}
							// both answers are of one revision, although other objects change
							return bytes.Equal(bodies[first], again), nil
						}))
						whole, cut := bodies[r.accept], bodies[r.accept+dropManagedFields]
						compareManaged(t, fmt.Sprintf("%s?%s as %s", r.path, r.query, r.accept), r.accept, watch, whole, cut)
					}
				}
			})
		}
	})
	for accept, want := range map[string]struct {
		code int
		has  bool
	}{
		"application/json;drop=": {http.StatusOK, true},
		"application/yaml" + dropManagedFields + ";q=0.1,application/json":                                 {http.StatusOK, true},
		"application/json;drop=metadata.labels,application/json":                                           {http.StatusOK, true},
		"application/json;q=0.5,application/json" + dropManagedFields:                                      {http.StatusOK, false},
		"application/json;drop=spec,application/json" + dropManagedFields:                                  {http.StatusOK, false},
		"application/json" + dropManagedFields + ",application/yaml":                                       {http.StatusOK, false},
		"application/json;as=Table;v=v0;g=x" + dropManagedFields + ",application/json" + dropManagedFields: {http.StatusOK, false},
		"application/json;drop=,application/yaml;q=0.1" + dropManagedFields:                                {http.StatusOK, true},
		"application/json;as=Table;v=v1;g=meta.k8s.io":                                                     {http.StatusOK, true},
		"application/json;as=Table;v=v1;g=meta.k8s.io" + dropManagedFields:                                 {http.StatusOK, false},
		"application/xml" + dropManagedFields:                                                              {http.StatusNotAcceptable, false},
		"application/json;drop=metadata/managedFields":                                                     {http.StatusNotAcceptable, false},
		"application/json;drop=spec[0]":                                                                    {http.StatusNotAcceptable, false},
		"application/json;x;drop=spec":                                                                     {http.StatusNotAcceptable, false},
		`application/json;drop="metadata.managedFields"`:                                                   {http.StatusNotAcceptable, false},
		"application/json" + dropManagedFields + ";drop=spec":                                              {http.StatusNotAcceptable, false},
		"application/json;drop=metadata.labels":                                                            {http.StatusNotAcceptable, false},
		"application/json;drop=metadata.labels+metadata.managedFields":                                     {http.StatusNotAcceptable, false},
	} {
		answer, err := api.DoAs(ctx, http.MethodGet, managedObjects[0].path+"/a", "", "", accept, nil)
		harness.Check(t, err)
		if has := bytes.Contains(answer.Body, []byte(`"managedFields":`)); answer.Code != want.code || has != want.has {
			t.Errorf("%s: %d, managed fields %v, want %v: %s", accept, answer.Code, has, want, answer.Body)
		}
	}
}

// TestManagedFields_GateOff_ParameterHasNoEffect requests the same from a server with defaults.
func TestManagedFields_GateOff_ParameterHasNoEffect(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	api := shared.replicas[0].api
	applyManaged(t, ctx, api)
	for _, o := range managedObjects {
		answer, err := api.DoAs(ctx, http.MethodGet, o.path+"/"+o.name, "", "", "application/json"+dropManagedFields, nil)
		harness.Check(t, err)
		if n := bytes.Count(answer.Body, []byte(`"manager":`)); n != 3 {
			t.Errorf("%s: %d managers: %s", o.path, n, answer.Body)
		}
	}
}

// applyManaged applies the objects through a server, and returns when it serves all of them.
func applyManaged(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	for path, manifest := range map[string]string{
		"/apis/apiextensions.k8s.io/v1/customresourcedefinitions": managedDefinition,
		// the server writes objects of its own to the namespace default
		"/api/v1/namespaces": `{"metadata":{"name":"managed"}}`,
	} {
		r, err := api.Do(ctx, http.MethodPost, path, "", manifest)
		harness.Check(t, err)
		if r.Code != http.StatusCreated && r.Code != http.StatusConflict { // of the other test
			t.Fatal(r.Err())
		}
	}
	for _, o := range managedObjects {
		for _, manager := range []string{"one", "two", "three"} {
			var answer *harness.Response
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
				// a definition is served after a moment
				answer, err = api.DoAs(ctx, http.MethodPatch, o.path+"/"+o.name, "fieldManager="+manager, "application/apply-patch+yaml", "", fmt.Sprintf(o.manifest, manager))
				return err == nil && answer.Code != http.StatusNotFound, err
			}))
			if answer.Code >= 300 {
				t.Fatal(answer.Err())
			}
		}
	}
}

// compareManaged requires that cut is equal to whole without managed fields, which whole has.
func compareManaged(t *testing.T, what, accept string, watch bool, whole, cut []byte) {
	t.Helper()
	if bytes.Contains(cut, []byte("f:metadata")) || !bytes.Contains(whole, []byte("f:metadata")) {
		t.Errorf("%s: the whole answer or the other one has the wrong fields:\n%q\n%q", what, whole, cut)
		return
	}
	if strings.HasPrefix(accept, "application/yaml") {
		var err error
		whole, err = yaml.YAMLToJSON(whole)
		harness.Check(t, err)
		cut, err = yaml.YAMLToJSON(cut)
		harness.Check(t, err)
	}
	if !strings.HasPrefix(accept, "application/vnd.kubernetes.protobuf") {
		wholeLines, cutLines := bytes.Split(whole, []byte("\n")), bytes.Split(cut, []byte("\n"))
		if !watch {
			wholeLines, cutLines = [][]byte{whole}, [][]byte{cut}
		}
		for i := range min(len(wholeLines), len(cutLines)) {
			var a, b any
			if errA, errB := json.Unmarshal(wholeLines[i], &a), json.Unmarshal(cutLines[i], &b); (errA == nil) != (errB == nil) {
				t.Errorf("%s: line %d: %v, %v", what, i, errA, errB)
			}
			if stripJSON(a); !reflect.DeepEqual(a, b) && !bytes.Contains(cutLines[i], []byte(`"BOOKMARK"`)) {
				t.Errorf("%s: line %d is\n%s, of\n%s", what, i, cutLines[i], wholeLines[i])
			}
		}
		if len(wholeLines) < 2 && watch || !watch && len(cut) == 0 {
			t.Errorf("%s: no events", what)
		}
		return
	}
	if watch || strings.Contains(accept, "as=") {
		return // JSON has compared the content; here are the bytes of managed fields only
	}
	a, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), whole)
	harness.Check(t, err)
	b, err := runtime.Decode(scheme.Codecs.UniversalDeserializer(), cut)
	harness.Check(t, err)
	strip := func(obj runtime.Object) error {
		m, err := meta.Accessor(obj)
		if err == nil {
			m.SetManagedFields(nil)
		}
		return err
	}
	if meta.IsListType(a) {
		err = meta.EachListItem(a, strip)
	} else {
		err = strip(a)
	}
	harness.Check(t, err)
	if !reflect.DeepEqual(a, b) {
		t.Errorf("%s: %#v, want %#v", what, b, a)
	}
}

// stripJSON removes managed fields from the metadata of objects, items and events.
func stripJSON(v any) {
	o, _ := v.(map[string]any)
	if m, ok := o["metadata"].(map[string]any); ok {
		delete(m, "managedFields")
	}
	if event, ok := o["object"]; ok && o["type"] != nil {
		stripJSON(event)
	}
	if items, ok := o["items"].([]any); ok {
		for _, item := range items {
			stripJSON(item)
		}
	}
}
