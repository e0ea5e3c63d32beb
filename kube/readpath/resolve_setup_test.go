package readpath

import (
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/grpclog"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/test/testetcd"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/kube/kubestorage"
)

var (
	resolveScheme = runtime.NewScheme()
	resolveCodecs = serializer.NewCodecFactory(resolveScheme)
)

func init() {
	utilruntime.Must(example.AddToScheme(resolveScheme))
	utilruntime.Must(examplev1.AddToScheme(resolveScheme))
	resolveScheme.AddKnownTypes(example.SchemeGroupVersion, &example.PodList{})
	resolveScheme.AddKnownTypes(examplev1.SchemeGroupVersion, &examplev1.PodList{})
	// etcd and its clients are closed while connections are active, which would be logged.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))
}

// resolving is a Resolver in front of a server whose storages a test creates and replaces.
type resolving struct {
	t        testing.TB
	engine   *kubestorage.Engine
	etcd     string
	resolver *Resolver
	clock    time.Time

	// The server: the storage of each path, and the number of requests.
	serves      map[string]*endpoint // by group/version/resource
	asked       int
	meanwhile   func() // called while the server handles a request; may be nil
	definitions map[string]*apiextensionsv1.CustomResourceDefinition
	remote      map[schema.GroupVersion]bool
}

// endpoint is a resource in one version as a registry serves it.
type endpoint struct {
	storage.Interface
	prefix     string
	namespaced bool
	destroy    func()
}

func newResolving(t testing.TB, options ...func(*kubestorage.Options)) *resolving {
	t.Helper()
	etcd := testetcd.Start(t, testetcd.Config{})
	opts := kubestorage.Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Uncached: isUncached}
	for _, set := range options {
		set(&opts)
	}
	r := &resolving{
		t:           t,
		etcd:        etcd.Endpoint(),
		engine:      kubestorage.New(opts),
		clock:       time.Unix(1e9, 0),
		serves:      map[string]*endpoint{},
		definitions: map[string]*apiextensionsv1.CustomResourceDefinition{},
		remote:      map[schema.GroupVersion]bool{},
	}
	t.Cleanup(r.engine.Close)
	r.resolver = NewResolver(ResolverOptions{
		Engine:     r.engine,
		BuiltIn:    []Kinds{{Scheme: resolveScheme, Serializer: resolveCodecs}},
		Definition: func(name string) *apiextensionsv1.CustomResourceDefinition { return r.definitions[name] },
		Local:      func(gv schema.GroupVersion) bool { return !r.remote[gv] },
	})
	r.resolver.now = func() time.Time { return r.clock }
	return r
}

// decorated are the options of an engine whose pods are decorated.
func decorated(o *kubestorage.Options) { o.Kinds = decoratedPods }

func decoratedPods(resource schema.GroupResource, _ runtime.Object) (f kind.Form) {
	if resource.Resource == "pods" {
		f.Decorate = func(obj runtime.Object) { obj.(*example.Pod).Labels = map[string]string{"decorated": ""} }
	}
	return f
}

func isUncached(r schema.GroupResource) bool { return r.Resource == "uncached" }

// pods serves the built-in pods.
func (r *resolving) pods() *endpoint {
	return r.serve(example.GroupName, "v1", "pods", true, r.open("pods", func() runtime.Object { return &example.Pod{} }, func() runtime.Object { return &example.PodList{} }))
}

// widgets serves the custom resource widgets in a version.
func (r *resolving) widgets(version string) *endpoint {
	gv := schema.GroupVersion{Group: "example.com", Version: version}
	return r.serve(gv.Group, version, "widgets", true, r.open("example.com/widgets", func() runtime.Object {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(gv.WithKind("Widget"))
		return u
	}, func() runtime.Object {
		u := &unstructured.UnstructuredList{}
		u.SetGroupVersionKind(gv.WithKind("WidgetCollection"))
		return u
	}))
}

func (r *resolving) serve(group, version, resource string, namespaced bool, e *endpoint) *endpoint {
	e.namespaced = namespaced
	r.serves[group+"/"+version+"/"+resource] = e
	return e
}

// open creates a storage.
func (r *resolving) open(prefix string, newFunc, newListFunc func() runtime.Object) *endpoint {
	r.t.Helper()
	group, resource, found := strings.Cut(prefix, "/")
	if !found {
		group, resource = "", prefix
	}
	config := &storagebackend.ConfigForResource{
		Config: storagebackend.Config{
			Prefix:    "/registry",
			Codec:     unstructured.UnstructuredJSONScheme,
			Transport: storagebackend.TransportConfig{ServerList: []string{r.etcd}},
		},
		GroupResource: schema.GroupResource{Group: group, Resource: resource},
	}
	s, destroy, err := upstream.Open(r.engine.Decorator(), config, "/"+prefix, newFunc, newListFunc, storage.DefaultNamespaceScopedAttr, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(destroy)
	return &endpoint{Interface: s, prefix: "/" + prefix, destroy: destroy}
}

// define installs the definition of widgets with the given versions.
func (r *resolving) define(uid types.UID, generation int64, versions ...string) *apiextensionsv1.CustomResourceDefinition {
	d := &apiextensionsv1.CustomResourceDefinition{}
	d.Name, d.UID = "widgets.example.com", uid
	d.Spec.Group, d.Spec.Scope, d.Spec.Names.Kind = "example.com", apiextensionsv1.NamespaceScoped, "Widget"
	for _, v := range versions {
		d.Spec.Versions = append(d.Spec.Versions, apiextensionsv1.CustomResourceDefinitionVersion{
			Name: v, Served: true, SelectableFields: []apiextensionsv1.SelectableField{{JSONPath: ".spec.color"}},
		})
	}
	// a change of the spec without an effect on the test
	d.Spec.Names.ShortNames = make([]string, generation)
	r.definitions[d.Name] = d
	return d
}

// ServeHTTP is the handler to which the byte path passes requests on.
func (r *resolving) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.asked++
	if r.meanwhile != nil {
		r.meanwhile()
	}
	ctx := req.Context()
	info, _ := request.RequestInfoFrom(ctx)
	e := r.serves[info.APIGroup+"/"+info.APIVersion+"/"+info.Resource]
	if e == nil || (info.Namespace != "" || info.Verb == "get") && (info.Namespace != "") != e.namespaced {
		http.NotFound(w, req)
		return
	}
	key := e.prefix
	for _, part := range []string{info.Namespace, info.Name} {
		if part != "" {
			key += "/" + part
		}
	}
	pred := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), IndexFields: []string{"spec.nodeName"}}
	var err error
	switch info.Verb {
	case "get":
		err = e.Get(ctx, key, storage.GetOptions{}, &example.Pod{})
	case "list":
		err = e.GetList(ctx, key, storage.ListOptions{Predicate: pred, Recursive: true}, &example.PodList{})
	case "watch":
		_, err = e.Watch(ctx, key, storage.ListOptions{Predicate: pred, Recursive: true})
	}
	if err == nil {
		r.t.Errorf("%s %s was executed", info.Verb, info.Path)
	}
	http.Error(w, "probed", http.StatusNotFound)
}

// read resolves a request for path, and returns the number of requests to the server.
func (r *resolving) read(path string) (res *boundResource, why reason, asked int) {
	r.t.Helper()
	u, err := url.Parse(path)
	if err != nil {
		r.t.Fatal(err)
	}
	factory := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	info, err := factory.NewRequestInfo(&http.Request{Method: http.MethodGet, URL: u})
	if err != nil {
		r.t.Fatal(err)
	}
	before := r.asked
	res, why = r.resolver.resolve(info, r)
	return res, why, r.asked - before
}

// want resolves path and fails unless it is bound to the storage of e (nil: passed on) after
// exactly the given number of probes; a negative number stands for any.
func (r *resolving) want(path string, e *endpoint, probes int) *boundResource {
	r.t.Helper()
	res, why, asked := r.read(path)
	switch {
	case e == nil && (res != nil || why == ""):
		r.t.Errorf("%s is bound, want it passed on", path)
	case e != nil && res == nil:
		r.t.Fatalf("%s is passed on: %s", path, why)
	case e != nil && res.Store != e.Interface:
		r.t.Errorf("%s is bound to another storage", path)
	}
	if probes >= 0 && asked != probes {
		r.t.Errorf("%s: %d probes, want %d", path, asked, probes)
	}
	return res
}
