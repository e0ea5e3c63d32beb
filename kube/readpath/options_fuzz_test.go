package readpath

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/kube/kubestorage"
)

var fuzzInfo = &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}

// asked is one call of a storage.
type asked struct {
	method, key string
	opts        storage.ListOptions
	resource    string        // version of a GET
	timeout     time.Duration // of a watch
}

func (a *asked) String() string {
	if a == nil {
		return "nothing"
	}
	p := a.opts.Predicate
	shard := "none"
	if p.ShardSelector != nil {
		shard = p.ShardSelector.String()
	}
	return fmt.Sprintf("%s %s version %q%q match %q recursive %v initial %v; labels %v %v, fields %v %v, shard %s, indexed %q %q, limit %d, continue %q, bookmarks %v",
		a.method, a.key, a.resource, a.opts.ResourceVersion, a.opts.ResourceVersionMatch, a.opts.Recursive, pointed(a.opts.SendInitialEvents),
		p.Label, p.Label.Empty(), p.Field, p.Field.Empty(), shard, p.IndexFields, p.IndexLabels, p.Limit, p.Continue, p.AllowWatchBookmarks)
}

func pointed(b *bool) string {
	if b == nil {
		return "nil"
	}
	return fmt.Sprint(*b)
}

// recorder is a storage that records its calls.
type recorder struct {
	storage.Interface
	asked *asked
}

var errRecorded = apierrors.NewServiceUnavailable("recorded")

func (r *recorder) Get(_ context.Context, key string, opts storage.GetOptions, _ runtime.Object) error {
	r.asked = &asked{method: "get", key: key, resource: opts.ResourceVersion, opts: storage.ListOptions{Predicate: storage.Everything}}
	return errRecorded
}

func (r *recorder) GetList(_ context.Context, key string, opts storage.ListOptions, _ runtime.Object) error {
	r.asked = &asked{method: "list", key: key, opts: opts}
	return errRecorded
}

func (r *recorder) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	r.asked = &asked{method: "watch", key: key, opts: opts}
	if deadline, ok := ctx.Deadline(); ok {
		r.asked.timeout = time.Until(deadline)
	}
	return nil, errRecorded
}

// fieldLabels supports spec.color in addition to the labels of every kind.
type fieldLabels struct{ runtime.ObjectConvertor }

func (fieldLabels) ConvertFieldLabel(_ schema.GroupVersionKind, label, value string) (string, string, error) {
	switch label {
	case "metadata.name", "metadata.namespace", "spec.color":
		return label, value, nil
	case "old.color":
		return "spec.color", value, nil
	}
	return "", "", fmt.Errorf("%q is not a known field selector", label)
}

// optionsRegistry is a registry with upstream's handlers for it, and its resource for the byte
// path.
type optionsRegistry struct {
	registry *genericregistry.Store
	storage  *recorder
	resource *boundResource
}

func newOptionsRegistry(namespaced bool) *optionsRegistry {
	resource := &boundResource{
		GVR:         examplev1.SchemeGroupVersion.WithResource("pods"),
		Kind:        examplev1.SchemeGroupVersion.WithKind("Pod"),
		Namespaced:  namespaced,
		Store:       &kubestorage.Store{}, // with an empty key prefix
		Serializer:  resolveCodecs,
		IndexFields: []string{"spec.color"},
		IndexLabels: []string{"color"},
	}
	resource.FieldLabel = func(label, value string) (string, string, error) {
		return fieldLabels{}.ConvertFieldLabel(resource.Kind, label, value)
	}
	o := &optionsRegistry{storage: &recorder{}, resource: resource}
	o.registry = &genericregistry.Store{
		NewFunc:                  func() runtime.Object { return &example.Pod{} },
		NewListFunc:              func() runtime.Object { return &example.PodList{} },
		DefaultQualifiedResource: resource.GVR.GroupResource(),
		Storage:                  genericregistry.DryRunnableStorage{Storage: o.storage},
		PredicateFunc: func(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
			return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: attrsOf,
				IndexFields: resource.IndexFields, IndexLabels: resource.IndexLabels}
		},
		KeyRootFunc: func(context.Context) string { return "" },
		KeyFunc: func(ctx context.Context, name string) (string, error) {
			return genericregistry.NoNamespaceKeyFunc(ctx, "", name)
		},
	}
	if namespaced {
		o.registry.KeyRootFunc = func(ctx context.Context) string { return genericregistry.NamespaceKeyRootFunc(ctx, "") }
		o.registry.KeyFunc = func(ctx context.Context, name string) (string, error) {
			return genericregistry.NamespaceKeyFunc(ctx, "", name)
		}
	}
	return o
}

// upstream returns the registry's storage call, or else the response to the client.
func (o *optionsRegistry) upstream(req *http.Request, verb string) (*asked, *httptest.ResponseRecorder) {
	scope := *o.resource.scope()
	scope.Namer = handlers.ContextBasedNaming{Namer: meta.NewAccessor(), ClusterScoped: !o.resource.Namespaced}
	scope.Convertor = fieldLabels{}
	scope.ParameterCodec = metav1.ParameterCodec
	o.storage.asked = nil
	rw := httptest.NewRecorder()
	if verb == "get" {
		handlers.GetResource(o.registry, &scope)(rw, req)
	} else {
		handlers.ListResource(o.registry, o.registry, &scope, false, 0)(rw, req)
	}
	return o.storage.asked, rw
}

// byBytes is upstream for the byte path. passed is the reason for which it passes the request on.
func (o *optionsRegistry) byBytes(req *http.Request, info *request.RequestInfo) (a *asked, rw *httptest.ResponseRecorder, passed reason) {
	rw = httptest.NewRecorder()
	r := &readRequest{server: &Server{}, resource: o.resource, info: info, scope: o.resource.scope(), w: rw, req: req}
	if info.Verb == "get" {
		opts, err := r.getOptions()
		var key string
		if err == nil {
			key, err = r.key(info.Namespace, info.Name)
		}
		if err != nil {
			r.fail(err)
			return nil, rw, ""
		}
		return &asked{method: "get", key: key, resource: opts.ResourceVersion, opts: storage.ListOptions{Predicate: storage.Everything}}, rw, ""
	}
	opts, err := r.listOptions()
	if err != nil {
		r.fail(err)
		return nil, rw, ""
	}
	if opts.Watch != (info.Verb == "watch") {
		return nil, rw, reasonOptions
	}
	key, o2, err := r.storageOptions(opts)
	if err != nil {
		r.fail(err)
		return nil, rw, ""
	}
	a = &asked{method: info.Verb, key: key, opts: o2}
	// These have no effect: upstream's registry does not even set them.
	a.opts.Predicate.AllowWatchBookmarks = opts.Watch && opts.AllowWatchBookmarks
	if opts.Watch {
		a.opts.ResourceVersionMatch, a.opts.Predicate.Limit, a.opts.Predicate.Continue = "", 0, ""
		a.timeout = r.server.watchTimeout(&opts)
	}
	return a, rw, ""
}

// FuzzOptions sends arbitrary queries. The byte path makes the same storage call as upstream's
// handlers and registry, selectors included, or rejects the query with their error, or passes the
// request on.
func FuzzOptions(f *testing.F) {
	featuregatetesting.SetFeatureGateDuringTest(f, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	registries := map[bool]*optionsRegistry{true: newOptionsRegistry(true), false: newOptionsRegistry(false)}
	paths := []struct {
		path       string
		namespaced bool
	}{{"pods", true}, {"namespaces/ns/pods", true}, {"namespaces/ns/pods/p", true}, {"pods", false}, {"pods/p", false}, {"namespaces/ns/pods/.%", true}}
	for i, query := range []string{
		"",
		"limit=500",
		"limit=5&continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiJhIn0",
		"resourceVersion=5&resourceVersionMatch=Exact",
		"resourceVersion=0&resourceVersionMatch=NotOlderThan&limit=1",
		"resourceVersionMatch=Exact",
		"resourceVersion=x&limit=x",
		"labelSelector=" + url.QueryEscape("color in (red, blue),!old,size!=3,n>5"),
		"labelSelector=color%3Dred&labelSelector=size%3D3",
		"labelSelector=" + url.QueryEscape("in in (in,notin)"),
		"labelSelector=,",
		"fieldSelector=metadata.name%3Dp",
		"fieldSelector=metadata.name%3Dp,metadata.namespace%3Dns",
		"fieldSelector=metadata.namespace%3Dns,spec.color%21%3Dred",
		"fieldSelector=metadata.namespace%3D..%2Fother",
		"fieldSelector=metadata.name%3D..%2F..%2Fother",
		"fieldSelector=old.color%3D%5C%2Cred%5C%3D",
		"fieldSelector=unknown%3Dx",
		"watch=1&timeoutSeconds=5&allowWatchBookmarks=true&resourceVersion=7",
		"watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=1",
		"watch=true&sendInitialEvents=true",
		"watch=0&sendInitialEvents=false&resourceVersionMatch=NotOlderThan",
		"watch=&watch=true",
		"watch=true&watch=false",
		"watch=maybe",
		"watch=true&fieldSelector=metadata.name%3Dp",
		"watch=true&timeoutSeconds=-1",
		"watch=true&timeoutSeconds=99999999999999",
		"resourceVersion=3&export=true",
		"export=false&export=true",
		"export=yes",
		"pretty=true&limit=1;continue=x",
		"%zz=1&limit=%31",
		"shardSelector=shardRange(object.metadata.uid,'0x0','0x8')",
		"shardSelector=shardRange(object.metadata.uid,'0x0000000000000000','0x8000000000000000')",
		"watch=true&shardSelector=" + url.QueryEscape("shardRange(object.metadata.namespace,'0x8000000000000000','0x10000000000000000') || shardRange(object.metadata.namespace,'0x0000000000000000','0x1000000000000000')"),
		"labelSelector=a&limit=3&shardSelector=" + url.QueryEscape("shardRange(object.metadata.uid,'0x8000000000000000','0x0000000000000000')"),
		"shardSelector=shardRange(object.metadata.name,'0x0000000000000000','0x8000000000000000')",
		"shardSelector=%20",
		"kind=x&apiVersion=y&includeUninitialized=1&timeout=5s",
	} {
		for _, path := range []int{i % len(paths), 0, 2} {
			f.Add(byte(path), query)
		}
	}
	f.Fuzz(func(t *testing.T, path byte, query string) {
		at := paths[int(path)%len(paths)]
		req := &http.Request{Method: http.MethodGet, Header: http.Header{"Accept": {jsonType}}, Host: "fuzz", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
			URL: &url.URL{Path: "/apis/" + examplev1.SchemeGroupVersion.String() + "/" + at.path, RawQuery: query}}
		info, err := fuzzInfo.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		req = req.WithContext(request.WithRequestInfo(context.Background(), info))
		o := registries[at.namespaced]
		got, answer, passed := o.byBytes(req, info)
		if passed != "" {
			return
		}
		want, wantAnswer := o.upstream(req, info.Verb)
		if (got == nil) != (want == nil) || got != nil && got.String() != want.String() {
			t.Fatalf("%s %s?%s: requests\n%s, and answers %d %s; upstream requests\n%s, and answers %d %s", info.Verb, at.path, query,
				got, answer.Code, answer.Body, want, wantAnswer.Code, wantAnswer.Body)
		}
		if got == nil && (answer.Code != wantAnswer.Code || answer.Body.String() != wantAnswer.Body.String()) {
			t.Fatalf("%s %s?%s: answers %d %s; upstream answers %d %s", info.Verb, at.path, query, answer.Code, answer.Body, wantAnswer.Code, wantAnswer.Body)
		}
		if got != nil && (got.timeout-want.timeout).Abs() > time.Minute {
			t.Fatalf("%s?%s: ends after %s, upstream after %s", at.path, query, got.timeout, want.timeout)
		}
	})
}
