package openapi

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset/fake"
	"k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapi/builder"
	"k8s.io/apiextensions-apiserver/pkg/controller/openapiv3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/kube-openapi/pkg/spec3"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// builtInPath is the path of a document of another resource of the server.
const builtInPath = "apis/apiextensions.k8s.io/v1"

// servers are upstream's controller and handler, and a Documents with its handler, of the same
// definitions.
type servers struct {
	client         *fake.Clientset
	upstream, ours http.Handler
	documents      *Documents
}

// newServers starts both with definitions.
func newServers(t *testing.T, definitions ...*apiextensionsv1.CustomResourceDefinition) *servers {
	t.Helper()
	s := &servers{client: fake.NewClientset()}
	for _, d := range definitions {
		s.put(t, d)
	}
	informers := externalversions.NewSharedInformerFactory(s.client, 0)
	definitionInformer := informers.Apiextensions().V1().CustomResourceDefinitions()

	upstreamMux, oursMux := mux.NewPathRecorderMux("upstream"), mux.NewPathRecorderMux("ours")
	s.upstream, s.ours = upstreamMux, oursMux
	service, builtIn := handler3.NewOpenAPIService(), handler3.NewOpenAPIService()
	for mux, service := range map[*mux.PathRecorderMux]*handler3.OpenAPIService{upstreamMux: service, oursMux: builtIn} {
		service.UpdateGroupVersion(builtInPath, &spec3.OpenAPI{Version: "3.0.0"})
		testcheck.NoError(t, service.RegisterOpenAPIV3VersionedService(root, mux))
	}
	controller := openapiv3.NewController(definitionInformer)
	s.documents = NewDocuments(true)
	testcheck.NoError(t, s.documents.Follow(definitionInformer.Informer()))
	testcheck.NoError(t, s.documents.Install(oursMux, builtIn))
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { controller.Run(service, ctx.Done()) })
	informers.Start(ctx.Done())
	t.Cleanup(func() {
		cancel()
		running.Wait()
		informers.Shutdown()
	})
	return s
}

// put creates or replaces a definition.
func (s *servers) put(t *testing.T, d *apiextensionsv1.CustomResourceDefinition) {
	t.Helper()
	client := s.client.ApiextensionsV1().CustomResourceDefinitions()
	_, err := client.Update(t.Context(), d, metav1.UpdateOptions{})
	if err != nil {
		_, err = client.Create(t.Context(), d, metav1.CreateOptions{})
	}
	testcheck.NoError(t, err)
}

// await waits until want is true.
func await(t *testing.T, what string, want func() bool) {
	t.Helper()
	err := wait.PollUntilContextTimeout(t.Context(), 5*time.Millisecond, 30*time.Second, true, func(context.Context) (bool, error) { return want(), nil })
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// get requests path from a server. header has names and values in turn.
func get(server http.Handler, path string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodGet, path, nil)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	response := httptest.NewRecorder()
	server.ServeHTTP(response, req)
	return response
}

// paths returns the list of documents of a server.
func paths(t *testing.T, server http.Handler) map[string]handler3.OpenAPIV3DiscoveryGroupVersion {
	t.Helper()
	response := get(server, root)
	if got := response.Header().Get("Content-Type"); response.Code != http.StatusOK || got != "application/json" {
		t.Fatalf("list of documents: status %d, %s", response.Code, got)
	}
	var list handler3.OpenAPIV3Discovery
	testcheck.NoError(t, json.Unmarshal(response.Body.Bytes(), &list))
	return list.Paths
}

// etag returns the entity tag of a document in the list of a server, or "".
func etag(t *testing.T, server http.Handler, path string) string {
	t.Helper()
	_, tag, _ := strings.Cut(paths(t, server)[path].ServerRelativeURL, "?hash=")
	return tag
}

// definition returns an established definition of a kind in served versions, with a schema that has
// a field.
func definition(group, kind, field string, versions ...string) *apiextensionsv1.CustomResourceDefinition {
	plural := strings.ToLower(kind) + "s"
	d := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Singular: strings.ToLower(kind), Kind: kind, ListKind: kind + "List"},
		},
		Status: apiextensionsv1.CustomResourceDefinitionStatus{
			Conditions: []apiextensionsv1.CustomResourceDefinitionCondition{{Type: apiextensionsv1.Established, Status: apiextensionsv1.ConditionTrue}},
		},
	}
	for i, version := range versions {
		d.Spec.Versions = append(d.Spec.Versions, apiextensionsv1.CustomResourceDefinitionVersion{
			Name: version, Served: true, Storage: i == 0,
			Schema: &apiextensionsv1.CustomResourceValidation{OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{
				Type: "object",
				Properties: map[string]apiextensionsv1.JSONSchemaProps{"spec": {Type: "object", Properties: map[string]apiextensionsv1.JSONSchemaProps{
					field: {Type: "string", Description: "a field of " + version}, "count": {Type: "integer", Format: "int32"},
				}}},
			}},
		})
	}
	return d
}

// definitions returns definitions of all shapes that change a document.
func definitions() []*apiextensionsv1.CustomResourceDefinition {
	plain, two := definition("plain.example.com", "Widget", "color", "v1"), definition("two.example.com", "Gadget", "size", "v1", "v1beta1")
	cluster := definition("plain.example.com", "Machine", "zone", "v1")
	cluster.Spec.Scope = apiextensionsv1.ClusterScoped
	replicas := ".spec.count"
	cluster.Spec.Versions[0].Subresources = &apiextensionsv1.CustomResourceSubresources{
		Status: &apiextensionsv1.CustomResourceSubresourceStatus{},
		Scale:  &apiextensionsv1.CustomResourceSubresourceScale{SpecReplicasPath: replicas, StatusReplicasPath: replicas},
	}
	selectable := definition("selectable.example.com", "Thing", "color", "v1")
	selectable.Spec.Versions[0].SelectableFields = []apiextensionsv1.SelectableField{{JSONPath: ".spec.color"}}
	without := definition("old.example.com", "Legacy", "any", "v1")
	without.Spec.PreserveUnknownFields, without.Spec.Versions[0].Schema = true, nil
	unserved := definition("half.example.com", "Half", "side", "v1", "v2")
	unserved.Spec.Versions[1].Served = false
	pending := definition("pending.example.com", "Pending", "x", "v1")
	pending.Status.Conditions = nil
	return []*apiextensionsv1.CustomResourceDefinition{plain, two, cluster, selectable, without, unserved, pending}
}

// TestDocuments_AnyDefinition_EqualUpstream compares the list, each document in each form and the
// headers with upstream's.
func TestDocuments_AnyDefinition_EqualUpstream(t *testing.T) {
	s := newServers(t, definitions()...)
	const count = 7 // six group versions, and the other resources
	await(t, "documents", func() bool { return len(paths(t, s.upstream)) == count && len(paths(t, s.ours)) == count })
	// Upstream builds the document of a group with two definitions first with one of them.
	await(t, "upstream's second definition", func() bool {
		return strings.Contains(get(s.upstream, root+"/apis/plain.example.com/v1").Body.String(), "Widget") &&
			strings.Contains(get(s.upstream, root+"/apis/plain.example.com/v1").Body.String(), "Machine")
	})
	await(t, "our second definition", func() bool {
		return strings.Contains(get(s.ours, root+"/apis/plain.example.com/v1").Body.String(), "Widget") &&
			strings.Contains(get(s.ours, root+"/apis/plain.example.com/v1").Body.String(), "Machine")
	})
	for path, want := range paths(t, s.upstream) {
		got, ok := paths(t, s.ours)[path]
		if !ok {
			t.Errorf("%s: not in the list", path)
			continue
		}
		if path == builtInPath && got != want {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
		for _, accept := range []string{
			"", "*/*", "application/*", "application/json", "application/json;q=0.1, */*;q=0.01",
			"application/com.github.proto-openapi.spec.v3.v1.0+protobuf", "application/com.github.proto-openapi.spec.v3@v1.0+protobuf",
			"application/com.github.proto-openapi.spec.v3.v1.0+protobuf, application/json;q=0.9",
			"text/plain, application/json", "text/plain", "application/xml",
		} {
			for _, url := range []string{root + "/" + path, ""} {
				wantURL, gotURL := url, url
				if url == "" { // with the entity tag
					wantURL, gotURL = want.ServerRelativeURL, got.ServerRelativeURL
				}
				equalResponses(t, path+" "+accept, get(s.ours, gotURL, "Accept", accept), get(s.upstream, wantURL, "Accept", accept))
			}
		}
		equalResponses(t, path+" of an old hash", get(s.ours, root+"/"+path+"?hash=0"), get(s.upstream, root+"/"+path+"?hash=0"))
		for _, tag := range []string{`"%s"`, `W/"%s"`, `"x", "%s"`, `"x"`, "*", "%s", `"%s`} {
			conditional := func(server http.Handler) *httptest.ResponseRecorder {
				return get(server, root+"/"+path, "If-None-Match", strings.Replace(tag, "%s", etag(t, server, path), 1))
			}
			equalResponses(t, path+" if none match "+tag, conditional(s.ours), conditional(s.upstream))
		}
	}
	for _, header := range [][2]string{{"Range", "bytes=10-99"}, {"If-Modified-Since", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)},
		{"If-Modified-Since", "Mon, 02 Jan 2006 15:04:05 GMT"}, {"If-Match", `"x"`}} {
		const path = root + "/apis/plain.example.com/v1"
		equalResponses(t, header[0], get(s.ours, path, header[:]...), get(s.upstream, path, header[:]...))
	}
	for _, path := range []string{"/apis/none.example.com/v1", "/apis/pending.example.com/v1", "/apis/half.example.com/v2", "/api/v1", "/x", "/apis/plain.example.com/v1/x"} {
		equalResponses(t, path, get(s.ours, root+path), get(s.upstream, root+path))
	}
}

// equalResponses compares two responses. The values of entity tags are not compared.
func equalResponses(t *testing.T, what string, got, want *httptest.ResponseRecorder) {
	t.Helper()
	if got.Code != want.Code {
		t.Errorf("%s: status %d, want %d", what, got.Code, want.Code)
	}
	for _, name := range []string{"Content-Type", "Vary", "Cache-Control"} {
		if got.Header().Get(name) != want.Header().Get(name) {
			t.Errorf("%s: %s %q, want %q", what, name, got.Header().Get(name), want.Header().Get(name))
		}
	}
	for _, name := range []string{"Etag", "Last-Modified", "Expires", "Location"} {
		if (got.Header().Get(name) == "") != (want.Header().Get(name) == "") {
			t.Errorf("%s: %s %q, want one as in %q", what, name, got.Header().Get(name), want.Header().Get(name))
		}
	}
	if (got.Code == http.StatusOK || got.Code == http.StatusPartialContent) && !bytes.Equal(got.Body.Bytes(), want.Body.Bytes()) {
		t.Errorf("%s: another body: %d bytes, want %d", what, got.Body.Len(), want.Body.Len())
	}
}

// TestDocuments_Changes_AreFollowed: the list and the documents follow creations, changes and
// deletions of definitions.
func TestDocuments_Changes_AreFollowed(t *testing.T) {
	const path = "apis/a.example.com/v1"
	s := newServers(t, definition("a.example.com", "Widget", "color", "v1", "v2"))
	await(t, "the first definition", func() bool { return etag(t, s.ours, path) != "" })
	first := etag(t, s.ours, path)
	if body := get(s.ours, root+"/"+path).Body.String(); !strings.Contains(body, `"color"`) {
		t.Error("the document lacks a field of the definition")
	}

	changed := definition("a.example.com", "Widget", "colour", "v1")
	s.put(t, changed)
	await(t, "the end of version v2", func() bool { return etag(t, s.ours, "apis/a.example.com/v2") == "" })
	second := etag(t, s.ours, path)
	if body := get(s.ours, root+"/"+path).Body.String(); second == first || !strings.Contains(body, `"colour"`) {
		t.Errorf("after a change: tag %.9s, was %.9s; %d bytes", second, first, len(body))
	}
	if got := get(s.ours, root+"/"+path+"?hash="+first); got.Code != http.StatusMovedPermanently || !strings.HasSuffix(got.Header().Get("Location"), second) {
		t.Errorf("the old address: status %d, location %q", got.Code, got.Header().Get("Location"))
	}

	s.put(t, definition("a.example.com", "Gadget", "size", "v1"))
	await(t, "a second definition", func() bool { return etag(t, s.ours, path) != second })
	if body := get(s.ours, root+"/"+path).Body.String(); !strings.Contains(body, `"colour"`) || !strings.Contains(body, `"size"`) {
		t.Error("the document lacks a definition")
	}
	third := etag(t, s.ours, path)

	// A change of the status, of columns or of the conversion changes no document.
	same := changed.DeepCopy()
	same.Status.StoredVersions = []string{"v1"}
	same.Spec.Versions[0].AdditionalPrinterColumns = []apiextensionsv1.CustomResourceColumnDefinition{{Name: "Colour", Type: "string", JSONPath: ".spec.colour"}}
	same.Spec.Conversion = &apiextensionsv1.CustomResourceConversion{Strategy: apiextensionsv1.NoneConverter}
	s.put(t, same)
	s.put(t, definition("b.example.com", "Marker", "x", "v1"))
	await(t, "a later event", func() bool { return etag(t, s.ours, "apis/b.example.com/v1") != "" })
	if got := etag(t, s.ours, path); got != third {
		t.Error("a change that no document contains changes the document")
	}

	for _, name := range []string{"widgets.a.example.com", "gadgets.a.example.com"} {
		if err := s.client.ApiextensionsV1().CustomResourceDefinitions().Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	await(t, "the end of both definitions", func() bool { return etag(t, s.ours, path) == "" })
	if n := len(s.documents.versions); n != 1 {
		t.Errorf("%d definitions, want 1", n)
	}
}

// TestDocuments_TagOfTwoServers_IsEqual: the entity tag depends on the definitions only, not on the
// order of events.
func TestDocuments_TagOfTwoServers_IsEqual(t *testing.T) {
	a, b := NewDocuments(true), NewDocuments(true)
	one, two := definition("a.example.com", "Widget", "color", "v1"), definition("a.example.com", "Gadget", "size", "v1")
	a.set(one)
	a.set(two)
	b.set(two.DeepCopy())
	b.set(definition("a.example.com", "Widget", "colour", "v1"))
	b.set(one.DeepCopy())
	listA, errA := a.list(nil)
	listB, errB := b.list(nil)
	if errA != nil || errB != nil || listA.etag != listB.etag || !bytes.Equal(listA.data, listB.data) {
		t.Errorf("lists differ: %s and %s, %v, %v", listA.data, listB.data, errA, errB)
	}
	if withoutFields := NewDocuments(false); withoutFields.tag(one) == a.tag(one) {
		t.Error("the tag does not depend on selectable fields")
	}
}

// tag returns the entity tag of the document of a definition in version v1, after the definition
// was set.
func (d *Documents) tag(definition *apiextensionsv1.CustomResourceDefinition) string {
	d.set(definition)
	gv, _ := parsePath(root + "/apis/" + definition.Spec.Group + "/v1")
	document, _ := d.find(gv)
	return document.etag
}

// TestDocument_NotRequested_IsNotBuilt: lists and conditional requests build no document, and a
// document is built once.
func TestDocument_NotRequested_IsNotBuilt(t *testing.T) {
	const path = "apis/a.example.com/v1"
	s := newServers(t, definition("a.example.com", "Widget", "color", "v1"))
	await(t, "the definition", func() bool { return etag(t, s.ours, path) != "" })
	tag := etag(t, s.ours, path)
	gv, _ := parsePath(root + "/" + path)
	document, _ := s.documents.find(gv)
	for _, conditional := range []string{root + "/" + path, root + "/" + path + "?hash=" + tag} {
		if got := get(s.ours, conditional, "If-None-Match", strconv.Quote(tag)); got.Code != http.StatusNotModified || got.Body.Len() > 0 {
			t.Errorf("conditional request: status %d, %d bytes", got.Code, got.Body.Len())
		}
	}
	if document.forms[formJSON].compressed != nil || document.forms[formProtobuf].compressed != nil {
		t.Fatal("the document was built")
	}
	first := get(s.ours, root+"/"+path).Body.Bytes()
	stored := document.forms[formJSON].compressed
	if stored == nil || document.forms[formProtobuf].compressed != nil || len(stored) > len(first)/2 {
		t.Errorf("stored: %d bytes of JSON, %d of protobuf; the document has %d", len(stored), len(document.forms[formProtobuf].compressed), len(first))
	}
	if again := get(s.ours, root+"/"+path).Body.Bytes(); !bytes.Equal(first, again) || &document.forms[formJSON].compressed[0] != &stored[0] {
		t.Error("the second request built the document again")
	}
}

// TestDocuments_UnknownDeletion_IsFollowed: a deletion of which the informer did not see the last
// state.
func TestDocuments_UnknownDeletion_IsFollowed(t *testing.T) {
	d := NewDocuments(true)
	d.set(definition("a.example.com", "Widget", "color", "v1"))
	name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(cache.DeletedFinalStateUnknown{Key: "widgets.a.example.com"})
	testcheck.NoError(t, err)
	d.remove(name)
	d.remove(name) // twice
	if len(d.groups)+len(d.versions) > 0 {
		t.Errorf("%d groups, %d definitions", len(d.groups), len(d.versions))
	}
}

// TestDocument_ConflictingDefinition_IsLeftOut: the kind of a list was changed to a kind of another
// definition after both were established.
func TestDocument_ConflictingDefinition_IsLeftOut(t *testing.T) {
	first, second, third := definition("a.example.com", "Apple", "color", "v1"), definition("a.example.com", "Berry", "size", "v1"), definition("a.example.com", "Cherry", "taste", "v1")
	second.Spec.Names.ListKind = "Apple"
	gv, _ := parsePath(root + "/apis/a.example.com/v1")
	body, err := build(gv, []*apiextensionsv1.CustomResourceDefinition{first, second, third}, builder.Options{})
	testcheck.NoError(t, err)
	for text, want := range map[string]bool{`"color"`: true, `"size"`: false, `"taste"`: true} {
		if got := bytes.Contains(body, []byte(text)); got != want {
			t.Errorf("the document contains %s: %v", text, got)
		}
	}
}

// TestDocuments_Concurrent_ReadersAndChanges is for the race detector.
func TestDocuments_Concurrent_ReadersAndChanges(t *testing.T) {
	// upstream's builder makes documents of several at once
	groups := []string{"a.example.com", "b.example.com", "c.example.com"}
	var all []*apiextensionsv1.CustomResourceDefinition
	for _, group := range groups {
		all = append(all, definition(group, "Widget", "color", "v1"))
	}
	s := newServers(t, all...)
	await(t, "the definitions", func() bool { return len(paths(t, s.ours)) == 1+len(groups) })
	var running sync.WaitGroup
	defer running.Wait()
	for i, group := range groups {
		running.Go(func() {
			for n := range 10 {
				s.documents.set(definition(group, "Widget", "color"+strconv.Itoa(n), "v1"))
				get(s.ours, root)
			}
		})
		for _, accept := range []string{"application/json", mediaTypes[formProtobuf].response} {
			running.Go(func() {
				for range 10 {
					if got := get(s.ours, root+"/apis/"+groups[i]+"/v1", "Accept", accept); got.Code != http.StatusOK || !strings.Contains(got.Body.String(), "color") {
						t.Errorf("status %d", got.Code)
					}
				}
			})
		}
	}
}
