package readpath

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	goruntime "runtime"
	"strings"
	"testing"
	"time"
	"weak"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	podsPath    = "/apis/example.apiserver.k8s.io/v1/pods"
	widgetsPath = "/apis/example.com/v1/widgets"
)

func TestResolver_BuiltInResource_IsBoundPermanently(t *testing.T) {
	t.Parallel()
	r := newResolving(t, decorated)
	pods := r.pods()
	var first *boundResource
	for _, path := range []string{
		podsPath, podsPath + "?watch=true", podsPath + "?fieldSelector=metadata.name%3Da",
		"/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods",
		"/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods/a",
		"/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods?watch=true",
	} {
		res := r.want(path, pods, -1)
		first = cmp.Or(first, res)
		if res != first {
			t.Errorf("%s has a separate resource", path)
		}
		r.clock = r.clock.Add(time.Hour)
		r.want(path, pods, 0)
	}
	if first == nil {
		t.Fatal("no resource is bound")
	}
	if first.Kind != examplev1.SchemeGroupVersion.WithKind("Pod") || first.ListKind != "PodList" || !first.Namespaced || first.Custom {
		t.Errorf("bound as %+v", first)
	}
	if len(first.IndexFields) != 1 || first.IndexFields[0] != "spec.nodeName" {
		t.Errorf("indexed fields are %q", first.IndexFields)
	}
	pod := &example.Pod{}
	if first.Decorate(pod); pod.Labels == nil {
		t.Error("the decorator is another")
	}
	if _, _, err := first.FieldLabel("spec.colour", "x"); err == nil {
		t.Error("a field that the scheme does not know is selectable")
	}
}

func TestResolver_ResourceNotServed_IsPassedOn(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.pods()
	// now the registry is one of nodes, say
	r.serves[example.GroupName+"/v1/pods"].namespaced = false
	r.want("/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods", nil, 1)
	if res := r.want(podsPath, r.serves[example.GroupName+"/v1/pods"], -1); res != nil && res.Namespaced {
		t.Error("bound as namespaced")
	}
	r.want(podsPath+"/a", r.serves[example.GroupName+"/v1/pods"], 1)

	places := len(*r.resolver.routes.Load())
	for _, path := range []string{
		"/apis/example.apiserver.k8s.io/v1/nonsense", "/apis/example.apiserver.k8s.io/v7/pods", "/apis/other/v1/pods", "/api/v3/pods", widgetsPath,
	} {
		r.want(path, nil, 0)
	}
	if n := len(*r.resolver.routes.Load()); n != places {
		t.Errorf("paths that lead nowhere take %d places", n-places)
	}
}

func TestResolver_UnusualKeyPrefix_IsPassedOn(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.pods().prefix = "/pods/special"
	r.want(podsPath, nil, 1)
}

func TestResolver_UncachedResource_ProbeDoesNotRead(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.define("1", 0, "v1")
	r.definitions["uncached.example.com"] = r.definitions["widgets.example.com"]
	e := r.open("example.com/uncached", func() runtime.Object { return &unstructured.Unstructured{} }, func() runtime.Object { return &unstructured.UnstructuredList{} })
	r.serve("example.com", "v1", "uncached", true, e)
	for _, query := range []string{"", "?watch=true"} {
		r.want("/apis/example.com/v1/uncached"+query, nil, 1) // ServeHTTP fails the test on a read
	}
}

func TestResolver_VersionOfOtherServer_IsPassedOn(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	pods := r.pods()
	r.want(podsPath, pods, -1)
	r.remote[examplev1.SchemeGroupVersion] = true
	if _, why, asked := r.read(podsPath); why != reasonRemote || asked != 0 {
		t.Errorf("reason %q after %d probes", why, asked)
	}
	r.remote[examplev1.SchemeGroupVersion] = false
	r.want(podsPath, pods, 0)
}

func TestResolver_RouteWithoutStorage_IsProbedAgain(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	pods := r.pods()
	saved := maps.Clone(r.serves)
	clear(r.serves) // the server is still starting
	r.want(podsPath, nil, 1)
	r.serves = saved
	r.want(podsPath, nil, 0)
	r.clock = r.clock.Add(retryAfter)
	r.want(podsPath, pods, -1)
}

// TestResolver_NewDefinition_IsNotBoundToOldStorage: the definition is seen before upstream's
// handler replaces the storage.
func TestResolver_NewDefinition_IsNotBoundToOldStorage(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.define("1", 0, "v1")
	old := r.widgets("v1")
	r.want(widgetsPath, old, 1)
	r.clock = r.clock.Add(settleTime)
	r.want(widgetsPath, old, 1)
	r.want(widgetsPath, old, 0)

	r.define("1", 1, "v1")
	for range 3 {
		// upstream still serves it; so does the byte path, and probes again
		r.want(widgetsPath, old, 1)
	}
	replaced := r.widgets("v1")
	r.want(widgetsPath, replaced, 1)
	r.clock = r.clock.Add(settleTime)
	r.want(widgetsPath, replaced, 1)
	r.want(widgetsPath, replaced, 0)

	// Conditions may change whether the resource is served, but do not replace the storage.
	same := r.define("1", 1, "v1")
	same.Status.Conditions = append(same.Status.Conditions, apiextensionsv1.CustomResourceDefinitionCondition{Type: apiextensionsv1.Terminating})
	r.want(widgetsPath, replaced, 1)
	r.want(widgetsPath, replaced, 0)
	if first, second := r.want(widgetsPath, replaced, 0), r.want(widgetsPath+"?watch=true", replaced, -1); first != second {
		t.Error("one storage has two Resources")
	}
}

// TestResolver_DefinitionChangesDuringProbe_UsesNewForm: the definition changes during the probe,
// and the storage is created from the new form.
func TestResolver_DefinitionChangesDuringProbe_UsesNewForm(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.define("1", 0, "v1")
	replaced := r.widgets("v1")
	r.meanwhile = func() {
		d := r.define("1", 1, "v1")
		d.Spec.Versions[0].SelectableFields[0].JSONPath = ".spec.size"
		d.Spec.Versions[0].Deprecated = true
	}
	r.want(widgetsPath, nil, 1)
	r.meanwhile = nil
	res := r.want(widgetsPath, replaced, 1)
	if res == nil {
		return
	}
	if _, _, err := res.FieldLabel("spec.size", "x"); err != nil || res.Deprecation == nil {
		t.Errorf("the storage is described as it was before: %v, deprecated %t", err, res.Deprecation != nil)
	}
}

func TestResolver_DefinitionAddedOrDeleted_IsFollowed(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.want(widgetsPath, nil, 0)
	r.define("1", 0, "v1")
	r.want(widgetsPath, nil, 1) // it is not established
	r.define("1", 0, "v1")
	first := r.widgets("v1")
	r.want(widgetsPath, first, 1)

	r.define("1", 0, "v2") // v1 is not served any more
	r.want(widgetsPath, nil, 0)
	r.define("1", 0, "v1")
	r.want(widgetsPath, first, 1)

	delete(r.definitions, "widgets.example.com")
	r.want(widgetsPath, nil, 0)
	// another definition of this name, whose first storage is still being created
	r.define("2", 0, "v1")
	delete(r.serves, "example.com/v1/widgets")
	r.want(widgetsPath, nil, 1)
	r.clock = r.clock.Add(retryAfter)
	second := r.widgets("v1")
	r.want(widgetsPath, second, 1)

	// Cells of deleted definitions are removed.
	delete(r.definitions, "widgets.example.com")
	r.want(podsPath, r.pods(), -1)
	for place := range *r.resolver.routes.Load() {
		if place.resource == "widgets" {
			t.Errorf("the route entry %v still exists", place)
		}
	}
}

func TestResolver_DestroyedStorage_IsReleased(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	r.define("1", 0, "v1")
	first := r.widgets("v1")
	r.want(widgetsPath, first, 1)
	r.clock = r.clock.Add(settleTime)
	r.want(widgetsPath, first, 1)
	first.destroy()
	second := r.widgets("v1")
	r.want(widgetsPath, second, 1)
	deadline := time.Now().Add(time.Minute)
	for known := 2; known != 1; {
		if time.Now().After(deadline) {
			t.Fatal("the resource of the destroyed storage still exists")
		}
		time.Sleep(time.Millisecond)
		r.resolver.mu.Lock()
		known = len(r.resolver.resources)
		r.resolver.mu.Unlock()
	}
}

func TestResolver_CustomResource_FollowsDefinition(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	d := r.define("1", 0, "v1", "v2beta1", "v2", "v3")
	d.Spec.Versions[0].Deprecated = true
	d.Spec.Versions[3].Deprecated = true
	own := "use something else"
	d.Spec.Versions[1].Deprecated, d.Spec.Versions[1].DeprecationWarning = true, &own
	for version, want := range map[string]string{
		"v1":      "example.com/v1 Widget is deprecated; use example.com/v2 Widget",
		"v2beta1": own,
		"v2":      "",
		"v3":      "example.com/v3 Widget is deprecated",
	} {
		res := r.want("/apis/example.com/"+version+"/widgets", r.widgets(version), 1)
		if res == nil {
			continue
		}
		if got := cmp.Or(res.Deprecation, &versionDeprecation{}).Warning; got != want {
			t.Errorf("%s: the warning is %q, want %q", version, got, want)
		}
		if res.Kind.Kind != "Widget" || res.Kind.Version != version || res.ListKind != "WidgetCollection" || !res.Namespaced || !res.Custom {
			t.Errorf("%s: bound as %+v", version, res)
		}
		for label, selectable := range map[string]bool{"metadata.name": true, "metadata.namespace": true, "spec.color": true, "spec.size": false} {
			_, _, err := res.FieldLabel(label, "x")
			if selectable != (err == nil) || err != nil && err.Error() != "field label not supported: "+label {
				t.Errorf("%s: selecting by %s: %v", version, label, err)
			}
		}
		if !res.scope().AllowsMediaTypeTransform("application", "json", nil) || res.scope().AllowsMediaTypeTransform("application", "vnd.kubernetes.protobuf", nil) {
			t.Error("whole objects are not offered as JSON alone")
		}
	}
	d.Spec.Scope = apiextensionsv1.ClusterScoped
	cluster := r.widgets("v2")
	cluster.namespaced = false
	if res := r.want("/apis/example.com/v2/widgets", cluster, 1); res != nil {
		if _, _, err := res.FieldLabel("metadata.namespace", "x"); err == nil || res.Namespaced {
			t.Error("something without namespaces is bound as if it had them")
		}
	}
}

// TestProbe_CarriesNoDataOfRequest: the probe carries no data of the request that triggered it.
func TestProbe_CarriesNoDataOfRequest(t *testing.T) {
	t.Parallel()
	r := newResolving(t)
	pods := r.pods()
	seen := 0
	next := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		seen++
		if _, ok := request.UserFrom(req.Context()); ok {
			t.Error("the probe has a user")
		}
		if strings.Contains(req.URL.Path, "secret-name") {
			t.Errorf("the probe requests %s", req.URL.Path)
		}
		r.ServeHTTP(w, req)
	})
	info := &request.RequestInfo{Verb: "get", APIGroup: example.GroupName, APIVersion: "v1", Resource: "pods", Namespace: "ns", Name: "secret-name"}
	res, why := r.resolver.resolve(info, next)
	if res == nil || res.Store != pods.Interface || seen == 0 {
		t.Errorf("after %d probes: %v, %q", seen, res, why)
	}
}

func TestResolver_WarmLookup_DoesNotAllocate(t *testing.T) {
	r := newResolving(t)
	r.pods()
	r.define("1", 0, "v1")
	r.widgets("v1")
	r.read(widgetsPath)
	r.clock = r.clock.Add(settleTime)
	for _, path := range []string{podsPath, widgetsPath} {
		r.read(path)
		allocates := true
		for range 10 { // the engine may allocate meanwhile
			allocates = allocates && testing.AllocsPerRun(100, r.lookup(path)) != 0
		}
		if allocates {
			t.Errorf("%s: a lookup allocates", path)
		}
	}
}

// lookup returns a function that resolves path.
func (r *resolving) lookup(path string) func() {
	parts := strings.Split(path, "/")
	info := &request.RequestInfo{Verb: "list", APIGroup: parts[2], APIVersion: parts[3], Resource: parts[4]}
	return func() {
		if res, _ := r.resolver.resolve(info, r); res == nil {
			r.t.Fatalf("%s is passed on", path)
		}
	}
}

// TestResolver_UnreadDefinitions_AreNotHeld: of many definitions, the resolver holds that of the
// resource that was read, and none of the others, after requests that name them in another group or
// version too.
func TestResolver_UnreadDefinitions_AreNotHeld(t *testing.T) {
	r := newResolving(t)
	widgets := r.widgets("v1")
	read := r.define("1", 0, "v1")
	var unread []weak.Pointer[apiextensionsv1.CustomResourceDefinition]
	for i := range 1000 {
		d := read.DeepCopy()
		d.Name, d.Spec.Group = fmt.Sprintf("widgets.group-%d", i), fmt.Sprintf("group-%d", i)
		r.definitions[d.Name] = d
		unread = append(unread, weak.Make(d))
	}
	if routes, resources := len(*r.resolver.routes.Load()), len(r.resolver.resources); routes+resources > 0 {
		t.Errorf("%d routes and %d resources before the first read", routes, resources)
	}
	r.want(widgetsPath, widgets, -1)
	r.want("/apis/group-1001/v1/widgets", nil, 0)
	r.want("/apis/example.com/v1/gadgets", nil, 0)
	if routes, resources := len(*r.resolver.routes.Load()), len(r.resolver.resources); routes != 1 || resources != 1 {
		t.Errorf("%d routes and %d resources after reads of one resource, want one each", routes, resources)
	}
	for name := range r.definitions { // the informer drops them
		if name != read.Name {
			delete(r.definitions, name)
		}
	}
	goruntime.GC()
	held := 0
	for _, d := range unread {
		if d.Value() != nil {
			held++
		}
	}
	if held > 0 {
		t.Errorf("%d unread definitions are held", held)
	}
}
