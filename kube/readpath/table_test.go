package readpath

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/endpoints/handlers"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
)

// registryList implements the list of a registry.
type registryList struct {
	rest.TableConvertor
	w *watched
}

var _ rest.Lister = registryList{}

func (r registryList) NewList() runtime.Object { return r.w.resource.Store.Kind().NewListFunc() }

func (r registryList) List(ctx context.Context, opts *metainternalversion.ListOptions) (runtime.Object, error) {
	pred := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: attrsOf, Limit: opts.Limit, Continue: opts.Continue}
	if opts.LabelSelector != nil {
		pred.Label = opts.LabelSelector
	}
	if opts.FieldSelector != nil {
		pred.Field = opts.FieldSelector
	}
	ns, _ := request.NamespaceFrom(ctx)
	list := r.NewList()
	err := r.w.resource.Store.GetList(ctx, "/"+r.w.resource.GVR.Resource+"/"+ns, storage.ListOptions{
		ResourceVersion: opts.ResourceVersion, ResourceVersionMatch: opts.ResourceVersionMatch, Predicate: pred, Recursive: true,
	}, list)
	return list, err
}

// versions converts objects to a version as the scheme of the handlers does.
type versions struct{ anyField }

func (versions) ConvertToVersion(obj runtime.Object, gv runtime.GroupVersioner) (runtime.Object, error) {
	if _, ok := obj.(runtime.Unstructured); ok {
		return obj, nil
	}
	return resolveScheme.ConvertToVersion(obj, gv)
}

// tablesOf makes upstream's handler answer lists, and both sides make tables with the convertor.
func tablesOf(w *watched, convertor rest.TableConvertor) {
	w.resource.Table = func() rest.TableConvertor { return convertor }
	scope := *w.resource.scope()
	scope.Namer = handlers.ContextBasedNaming{Namer: meta.NewAccessor()}
	scope.Convertor, scope.TableConvertor = versions{}, convertor
	w.lister = handlers.ListResource(registryList{convertor, w}, nil, &scope, false, w.minimum)
}

// list returns the answer to a list of ns.
func (w *watched) list(t *testing.T, engine, query, accept string, compressed bool) (*http.Response, string) {
	t.Helper()
	gvr := w.resource.GVR
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet,
		fmt.Sprintf("%s/apis/%s/%s/namespaces/ns/%s?%s", w.server.URL, gvr.Group, gvr.Version, gvr.Resource, query), nil)
	testcheck.NoError(t, err)
	req.Header.Set("Accept", accept)
	req.Header.Set("Engine", engine)
	client := w.server.Client()
	client.Transport.(*http.Transport).DisableCompression = !compressed
	resp, err := client.Do(req)
	// Again while memory is late.
	for n := 0; err == nil && resp.StatusCode == http.StatusTooManyRequests && n < 10; n++ {
		resp.Body.Close()
		resp, err = client.Do(req)
	}
	testcheck.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	testcheck.NoError(t, err)
	return resp, string(body)
}

// statusConvertor adds a condition and a cell with characters that JSON escapes.
type statusConvertor struct{ rest.TableConvertor }

func (c statusConvertor) ConvertToTable(ctx context.Context, obj, opts runtime.Object) (*metav1.Table, error) {
	table, err := c.TableConvertor.ConvertToTable(ctx, obj, opts)
	if err != nil {
		return nil, err
	}
	for i := range table.Rows {
		row := &table.Rows[i]
		m, err := meta.Accessor(row.Object.Object)
		if err != nil {
			return nil, err
		}
		row.Cells = append(row.Cells, "<none> & \u2028", int64(len(m.GetAnnotations())), nil)
		row.Conditions = []metav1.TableRowCondition{{Type: metav1.RowCompleted, Status: metav1.ConditionTrue, Reason: "a<b"}}
	}
	return table, nil
}

// TestTable_Lists_EqualUpstream compares tables byte by byte with those of upstream's handlers.
func TestTable_Lists_EqualUpstream(t *testing.T) {
	pods, widgets := watchedPods(t), watchedWidgets(t)
	tablesOf(pods, statusConvertor{rest.NewDefaultTableConvertor(pods.resource.GVR.GroupResource())})
	tablesOf(widgets, tableOfColumns([]apiextensionsv1.CustomResourceColumnDefinition{
		{Name: "Size", Type: "integer", JSONPath: ".spec.size"}, {Name: "Odd", Type: "string", JSONPath: ".spec.missing"},
	}))
	var managed []metav1.ManagedFieldsEntry
	stored := `[{"manager":"test","operation":"Update","apiVersion":"v1","fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{}}}]`
	testcheck.NoError(t, json.Unmarshal([]byte(stored), &managed))
	for name, w := range map[string]*watched{"pods": pods, "widgets": widgets} {
		t.Run(name, func(t *testing.T) {
			compare := func(t *testing.T) {
				rev := w.catchUp(t)
				for _, version := range []string{"v1", "v1beta1"}[:testrace.Count(2, 1)] {
					for _, query := range []string{
						"", "includeObject=Object", "includeObject=Metadata", "includeObject=None", "limit=2", "limit=1000", "resourceVersion=0",
						"resourceVersionMatch=Exact&resourceVersion=" + rev, "fieldSelector=metadata.name%3Dobject-01", "labelSelector=a%3Db",
						"labelSelector=odd%3D1&limit=1", "labelSelector=odd%3D1", "includeObject=Object&limit=1&labelSelector=odd%3D1",
					} {
						for _, compressed := range []bool{false, true} {
							accept := "application/json;as=Table;g=meta.k8s.io;v=" + version
							got, body := w.list(t, "", query, accept, compressed)
							want, wantBody := w.list(t, "upstream", query, accept, compressed)
							if got.StatusCode != want.StatusCode || got.Header.Get("Content-Type") != want.Header.Get("Content-Type") || got.Uncompressed != want.Uncompressed {
								t.Errorf("%s %q: %s %v, upstream %s %v", version, query, got.Status, got.Header, want.Status, want.Header)
							}
							if body != wantBody {
								t.Errorf("%s %q:\n%.2000s\nupstream:\n%.2000s", version, query, body, wantBody)
							}
						}
					}
				}
			}
			t.Run("empty", compare)
			for i := range 5 {
				obj := w.object(fmt.Sprintf("object-%02d", i), map[string]string{"text": "<a> & \u2028 \"quoted\""})
				m, err := meta.Accessor(obj)
				testcheck.NoError(t, err)
				m.SetLabels(map[string]string{"odd": fmt.Sprint(i % 2)})
				m.SetManagedFields(managed)
				w.put(t, obj)
			}
			t.Run("few", compare)
			for i := range 3 { // more than gzipThreshold
				w.put(t, w.object(fmt.Sprintf("large-%d", i), map[string]string{"text": strings.Repeat("x<", gzipThreshold/4)}))
			}
			t.Run("large", compare)
		})
	}
}

// TestTable_OtherOptions_ArePassedOn checks which tables upstream's handlers answer.
func TestTable_OtherOptions_ArePassedOn(t *testing.T) {
	w := watchedPods(t)
	tablesOf(w, rest.NewDefaultTableConvertor(schema.GroupResource{Resource: "pods"}))
	const accept = "application/json;as=Table;g=meta.k8s.io;v=v1"
	for query, passed := range map[string]bool{"": false, "includeObject=Everything": true, "watch=1&timeoutSeconds=1": true} {
		resp, body := w.list(t, "", query, accept, false)
		if got := resp.StatusCode == http.StatusNotImplemented; got != passed {
			t.Errorf("%q: passed on: %v, want %v: %s", query, got, passed, body)
		}
	}
	w.resource.Table = nil
	w.resource.accepted.list = acceptCache{}
	if resp, _ := w.list(t, "", "", accept, false); resp.StatusCode != http.StatusNotImplemented {
		t.Errorf("a table without a convertor: %s", resp.Status)
	}
}

// failing is a convertor that fails at one object.
type failing struct{ rest.TableConvertor }

func (f failing) ConvertToTable(ctx context.Context, obj, opts runtime.Object) (*metav1.Table, error) {
	if pod, ok := obj.(*example.Pod); ok && strings.HasPrefix(pod.Name, "bad") {
		return nil, errors.New("cannot be printed")
	}
	return f.TableConvertor.ConvertToTable(ctx, obj, opts)
}

// TestTable_FailedRow_IsNotACompleteAnswer checks that a table whose row cannot be made is an error
// as long as the header was not sent, that later it is broken off, and that its admitted bytes are
// released.
func TestTable_FailedRow_IsNotACompleteAnswer(t *testing.T) {
	w := watchedPods(t)
	tablesOf(w, failing{rest.NewDefaultTableConvertor(schema.GroupResource{Resource: "pods"})})
	for i := range 3 {
		w.put(t, w.object(fmt.Sprintf("a-%d", i), map[string]string{"text": strings.Repeat("x", gzipThreshold)}))
	}
	w.put(t, w.object("bad", nil))
	w.catchUp(t)
	const accept = "application/json;as=Table;g=meta.k8s.io;v=v1"
	got, body := w.list(t, "", "fieldSelector=metadata.name%3Dbad", accept, false)
	if got.StatusCode != http.StatusInternalServerError || !strings.Contains(body, "cannot be printed") {
		t.Errorf("a short table: %s, %s", got.Status, body)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.server.URL+"/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods?resourceVersion=0", nil)
	testcheck.NoError(t, err)
	req.Header.Set("Accept", accept)
	resp, err := w.server.Client().Do(req)
	if err == nil {
		var body []byte
		body, err = io.ReadAll(resp.Body)
		resp.Body.Close()
		if err == nil && json.Valid(body) {
			t.Errorf("a complete answer: %d bytes, %s", len(body), resp.Status)
		}
	}
	eventually(t, "the bytes are released", func() bool { return w.lists.InFlight() == 0 })
}
