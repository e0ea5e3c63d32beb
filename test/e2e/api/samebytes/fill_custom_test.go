package samebytes

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/stratakube/strata/test/harness"
)

// customGroup is the group of all custom resources of the tests.
const customGroup = "same.example.com"

//go:embed testdata/definitions.yaml
var definitionsYAML []byte

//go:embed testdata/created.yaml
var createdYAML []byte

// createDefinitions creates the definitions of the custom resources and returns when all of them
// are served.
func createDefinitions(ctx context.Context, api *harness.API) error {
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	definitions, err := documents(definitionsYAML)
	if err != nil {
		return err
	}
	for _, d := range definitions {
		if err := post(ctx, api, path, d); err != nil {
			return err
		}
	}
	for _, d := range definitions {
		crd := unstructured.Unstructured{Object: d}
		plural, _, _ := unstructured.NestedString(d, "spec", "names", "plural")
		versions, _, _ := unstructured.NestedSlice(d, "spec", "versions")
		for _, v := range versions {
			version := v.(map[string]any)
			if version["served"] != true {
				continue
			}
			served := fmt.Sprintf("/apis/%s/%s/%s", customGroup, version["name"], plural)
			if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				r, err := api.Do(ctx, http.MethodGet, served, "", nil)
				if err != nil {
					return false, err
				}
				return r.Code == http.StatusOK, fmt.Errorf("%s: %w", crd.GetName(), r.Err())
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// createObjects creates the objects of testdata/created.yaml, and larger generated ones.
func createObjects(ctx context.Context, api *harness.API) error {
	objects, err := documents(createdYAML)
	if err != nil {
		return err
	}
	const longestName = 253
	longest := strings.Repeat("long-name.", longestName/10+1)[:longestName]
	objects = append(objects,
		object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": longest, "labels": object{strings.Repeat("l", 63): strings.Repeat("v", 63)}}},
		object{"apiVersion": customGroup + "/v1", "kind": "Widget", "metadata": object{"name": longest}},
		object{"apiVersion": customGroup + "/v1", "kind": "Elephant", "metadata": object{"name": "big-1"}, "data": object{"text": megabyte("<")}},
		object{"apiVersion": customGroup + "/v1", "kind": "Elephant", "metadata": object{"name": "big-2"}, "data": object{"text": megabyte("ü")}},
		object{"apiVersion": customGroup + "/v1", "kind": "Elephant", "metadata": object{"name": "small"}},
		object{"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": object{"name": "big"}, "revision": 1, "data": object{"text": megabyte("x")}},
		object{"apiVersion": "v1", "kind": "Endpoints", "metadata": object{"name": "big"}, "subsets": manyAddresses()},
	)
	var errs []error
	for _, o := range objects {
		errs = append(errs, post(ctx, api, collection(o), o))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	// A field that only a controller sets.
	_, err = api.Patch(ctx, "/api/v1/namespaces/"+oddNamespace+"/pods/web-1/status",
		`{"status":{"phase":"Running","podIP":"10.1.2.3","podIPs":[{"ip":"10.1.2.3"}],"conditions":[{"type":"Ready","status":"True","lastTransitionTime":"2024-01-01T00:00:00Z"}]}}`)
	if err != nil {
		return err
	}
	_, err = api.Patch(ctx, "/apis/"+customGroup+"/v1/namespaces/"+oddNamespace+"/widgets/full/status", `{"status":{"phase":"<Ready>","replicas":2}}`)
	return err
}

// megabyte returns a text of about 1 MB as JSON stores it, made of one character and noise, so that
// it compresses to some extent.
func megabyte(character string) string {
	var b strings.Builder
	for i := uint32(1); b.Len() < 900_000; i = i*1664525 + 1013904223 {
		fmt.Fprintf(&b, "%08x%s", i, strings.Repeat("a", int(i>>28)))
	}
	return b.String() + character
}

// manyAddresses returns about 1,000 endpoint addresses.
func manyAddresses() []any {
	var addresses []any
	for i := range 1000 {
		addresses = append(addresses, object{"ip": fmt.Sprintf("10.%d.%d.%d", 1+i/62500, 1+i/250%250, 1+i%250), "hostname": fmt.Sprintf("host-%d", i)})
	}
	return []any{object{"addresses": addresses, "ports": []any{object{"port": 80}}}}
}

// clusterScoped are the cluster-scoped kinds in testdata/created.yaml.
var clusterScoped = map[string]bool{"APIService": true, "Planet": true}

// collection returns the path for the POST of o.
func collection(o object) string {
	u := unstructured.Unstructured{Object: o}
	gvr, _ := meta.UnsafeGuessKindToResource(u.GroupVersionKind())
	if u.GetKind() == "Endpoints" {
		gvr.Resource = "endpoints"
	}
	if clusterScoped[u.GetKind()] {
		return resource{gvr: gvr}.path()
	}
	return resource{gvr: gvr}.in(oddNamespace)
}

// bulkObjects is the number of ConfigMaps in namespace bulk. They make a list larger than the 128
// KiB from which responses are compressed.
const bulkObjects = 250

func createBulk(ctx context.Context, api *harness.API) error {
	for i := range bulkObjects {
		o := object{
			"metadata": object{"name": fmt.Sprintf("bulk-%03d", i), "labels": object{"tenth": fmt.Sprint(i % 10)}},
			"data":     object{"text": strings.Repeat(fmt.Sprintf("line %d of text\n", i), 25)},
		}
		if err := post(ctx, api, "/api/v1/namespaces/"+bulkNamespace+"/configmaps", o); err != nil {
			return err
		}
	}
	return nil
}
