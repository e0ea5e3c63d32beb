package readpath

import (
	"bufio"
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	restful "github.com/emicklei/go-restful/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/storage"
)

// readStrategy is the strategy of a registry whose resource is only read.
type readStrategy struct{ rest.RESTCreateStrategy }

func (readStrategy) NamespaceScoped() bool { return true }

// readRegistry is a registry without writes.
type readRegistry struct {
	rest.TableConvertor
	*genericregistry.Store
}

func (r readRegistry) ConvertToTable(ctx context.Context, obj, options runtime.Object) (*metav1.Table, error) {
	return r.TableConvertor.ConvertToTable(ctx, obj, options)
}

// reader is the part of a registry for which upstream's installer may create routes.
type reader struct {
	rest.Storage
	rest.Scoper
	rest.SingularNameProvider
	rest.Getter
	rest.Lister
	rest.Watcher
}

// routes returns upstream's routes of pods on a storage.
func routes(f *testing.F, s storage.Interface) http.Handler {
	store := &genericregistry.Store{
		NewFunc:                  func() runtime.Object { return &example.Pod{} },
		NewListFunc:              func() runtime.Object { return &example.PodList{} },
		DefaultQualifiedResource: example.Resource("pods"), SingularQualifiedResource: example.Resource("pod"),
		Storage:        genericregistry.DryRunnableStorage{Storage: s},
		CreateStrategy: readStrategy{},
		PredicateFunc: func(label labels.Selector, field fields.Selector) storage.SelectionPredicate {
			return storage.SelectionPredicate{Label: label, Field: field, GetAttrs: attrsOf}
		},
		KeyRootFunc: func(ctx context.Context) string { return genericregistry.NamespaceKeyRootFunc(ctx, "/pods") },
		KeyFunc: func(ctx context.Context, name string) (string, error) {
			return genericregistry.NamespaceKeyFunc(ctx, "/pods", name)
		},
		TableConvertor: rest.NewDefaultTableConvertor(example.Resource("pods")),
	}
	registry := readRegistry{store.TableConvertor, store}
	group := &endpoints.APIGroupVersion{
		Storage:         map[string]rest.Storage{"pods": reader{registry, registry, registry, registry, registry, registry}},
		Root:            genericapiserver.APIGroupPrefix,
		GroupVersion:    examplev1.SchemeGroupVersion,
		Serializer:      resolveCodecs,
		ParameterCodec:  scheme.ParameterCodec,
		Typer:           resolveScheme,
		Creater:         resolveScheme,
		Convertor:       resolveScheme,
		Defaulter:       resolveScheme,
		UnsafeConvertor: runtime.UnsafeObjectConvertor(resolveScheme),
		Namer:           runtime.Namer(meta.NewAccessor()),
		TypeConverter:   managedfields.NewDeducedTypeConverter(),

		ConvertabilityChecker:      resolveScheme,
		EquivalentResourceRegistry: runtime.NewEquivalentResourceRegistry(),
	}
	container := restful.NewContainer()
	container.Router(restful.CurlyRouter{}) // as in an API server, which dispatches without a mux
	if _, _, err := group.InstallREST(container); err != nil {
		f.Fatal(err)
	}
	return http.HandlerFunc(container.Dispatch)
}

// reached reports whether etcd has reached the revisions that a request names, so that no request
// waits for a revision that never comes.
func reached(req *http.Request, newest uint64) bool {
	query := req.URL.Query()
	for _, text := range query["resourceVersion"] {
		if rev, err := strconv.ParseUint(text, 10, 64); err == nil && rev > newest {
			return false
		}
	}
	for _, token := range query["continue"] {
		if _, rev, err := storage.DecodeContinue(token, "/registry/pods/"); err == nil && uint64(rev) > newest {
			return false
		}
	}
	return true
}

// addRequestSeeds adds the seeds of FuzzRequests: targets, media types and encodings.
func addRequestSeeds(f *testing.F) {
	const path = "/apis/example.apiserver.k8s.io/v1/"
	for _, target := range []string{
		"pods", "namespaces/ns/pods", "namespaces/ns/pods/a", "namespaces/ns/pods/large", "namespaces/ns/pods/none", "namespaces/other/pods",
		"pods?limit=1", "pods?limit=2&resourceVersion=0", "pods?labelSelector=name%3Da", "pods?fieldSelector=metadata.name%3Db",
		"namespaces/ns/pods?fieldSelector=metadata.name%3Db", "pods?pretty=true", "pods?pretty=0", "pods/", "pods//", "namespaces//pods", "namespaces/ns/pods/a/status",
		"namespaces/ns/pods/%61", "namespaces/ns/pods/..%2Fa", "namespaces/ns/pods/../pods/a", "namespaces/./pods", "./pods", "pods?resourceVersion=x",
		"namespaces/n%20s/pods", "namespaces/ns/pods/a?resourceVersion=1", "namespaces/pods", "proxy/pods", "watch/pods/x", "namespaces/ns/pods/A_",
		"pods?limit=-1", "pods?continue=x", "pods?resourceVersionMatch=Exact&resourceVersion=2", "pods;a=b", "pods%3Fx",
	} {
		f.Add(path+target, jsonType, "", "")
		f.Add(path+target, protobufType, "gzip", "kubectl")
	}
	for _, accept := range []string{
		"", "*/*", "application/*", "text/html", "application/yaml", "application/cbor", "application/json;q=0.1,application/vnd.kubernetes.protobuf",
		"application/json;pretty=1", "application/json;as=Table;g=meta.k8s.io;v=v1", "application/json;as=Table;g=meta.k8s.io;v=v1,application/json",
		jsonType + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", protobufType + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1beta1",
		jsonType + metadataV1, protobufType + metadataBeta, jsonType + ";as=PartialObjectMetadata;g=meta.k8s.io;v=v2", ";", "application/json;stream=watch",
		"application/json;profile=nominal", "application/json, */*;q=0.5", "application/JSON", "application/json;as=", ", ,", "application/json;charset=utf-8",
		"application/apidiscovery.k8s.io;as=x", "application/vnd.kubernetes.protobuf;type=x", "a/b;c=\"d,application/json\"",
	} {
		f.Add(path+"pods", accept, "gzip", "")
		f.Add(path+"namespaces/ns/pods/large", accept, "deflate,gzip ; q=1, gzip", "curl/8")
	}
	f.Add(path+"pods", jsonType, "gzip;q=0", "")
	f.Add(path+"pods", jsonType, "x-gzip,gzip;q=1", "Go")
}

// FuzzRequests sends GET requests with arbitrary paths, queries and headers that select the
// response format. The byte path returns exactly the bytes of upstream's routes, handlers and
// registry over the same storage, or passes the request on.
func FuzzRequests(f *testing.F) {
	pods := watchedPods(f)
	for _, name := range []string{"a", "b", "large"} {
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{"name": name}}}
		if name == "large" {
			pod.Annotations = map[string]string{"text": strings.Repeat("text ", gzipThreshold/5+1)}
		}
		pods.put(f, pod)
	}
	newest, err := strconv.ParseUint(pods.catchUp(f), 10, 64)
	if err != nil {
		f.Fatal(err)
	}
	upstream := routes(f, pods.resource.Store)
	resolver := NewResolver(ResolverOptions{
		Engine:  pods.engine,
		BuiltIn: []Kinds{{Scheme: resolveScheme, Serializer: resolveCodecs}},
	})
	server := New(Options{Resolver: resolver})
	bytePath := server.Handler(upstream)

	addRequestSeeds(f)
	f.Fuzz(func(t *testing.T, target, accept, encoding, agent string) {
		if strings.ContainsAny(target, " \r\n") || strings.ContainsAny(accept+encoding+agent, "\r\n\x00") {
			return
		}
		send := func(h http.Handler) (*http.Request, *httptest.ResponseRecorder) {
			head := "GET " + target + " HTTP/1.1\r\nHost: fuzz\r\n"
			for name, value := range map[string]string{"Accept": accept, "Accept-Encoding": encoding, "User-Agent": agent} {
				if value != "" {
					head += name + ": " + value + "\r\n"
				}
			}
			req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(head + "\r\n")))
			if err != nil {
				return nil, nil
			}
			info, err := fuzzInfo.NewRequestInfo(req)
			if err == nil && info.IsResourceRequest {
				if bytes, ok := server.cost(req, info); ok && bytes < 0 {
					t.Fatalf("%s costs %d bytes", req.URL, bytes)
				}
			}
			if err != nil || info.Verb == "watch" || req.URL.Query().Get("watch") != "" || !reached(req, newest) {
				return nil, nil
			}
			rw := httptest.NewRecorder()
			h.ServeHTTP(rw, req.WithContext(request.WithRequestInfo(context.Background(), info)))
			for n := 0; rw.Code == http.StatusTooManyRequests && n < 10; n++ { // memory is late
				rw = httptest.NewRecorder()
				h.ServeHTTP(rw, req.WithContext(request.WithRequestInfo(context.Background(), info)))
			}
			return req, rw
		}
		req, got := send(bytePath)
		if req == nil {
			return
		}
		_, want := send(upstream)
		if got.Code != want.Code || got.Body.String() != want.Body.String() {
			// Blocks compressed separately are a different compression of the same bytes.
			if got.Code != want.Code || got.Header().Get("Content-Encoding") != "gzip" || want.Header().Get("Content-Encoding") != "gzip" ||
				string(contentOf(t, got)) != string(contentOf(t, want)) {
				t.Fatalf("%s %q: %d %.500q; upstream: %d %.500q", req.URL, req.Header, got.Code, got.Body, want.Code, want.Body)
			}
		}
		for _, name := range []string{"Content-Type", "Content-Encoding", "Vary", "Retry-After", "Warning"} {
			if got, want := got.Header().Values(name), want.Header().Values(name); strings.Join(got, "|") != strings.Join(want, "|") {
				t.Fatalf("%s %q: %s %q, upstream has %q", req.URL, req.Header, name, got, want)
			}
		}
	})
}
