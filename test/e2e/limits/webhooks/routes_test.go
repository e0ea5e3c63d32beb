package webhooks

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

const (
	definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	group           = "webhooks.example.com"
)

// routes is a definition of the kind Route with a conversion webhook. Version v1, the storage
// version, has one field data.address, "host:port"; version v2 has data.host and data.port instead.
type routes struct {
	plural    string
	namespace string
}

// newRoutes creates a namespace and a definition with the conversion webhook hook. It returns when
// v1 is served and creations have their usual latency, without a read of v2. The name is that of
// the namespace and the prefix of the plural.
func newRoutes(t *testing.T, ctx context.Context, name string, hook *webhook) routes {
	t.Helper()
	harness.Namespace(t, ctx, api, name)
	d := routes{plural: name + "routes", namespace: name}
	version := func(name string, storage bool, fields ...string) object {
		data := object{}
		for _, field := range fields {
			data[field] = object{"type": "string"}
		}
		return object{"name": name, "served": true, "storage": storage, "schema": object{"openAPIV3Schema": object{
			"type": "object", "properties": object{"data": object{"type": "object", "properties": data}}}}}
	}
	_, err := api.Create(ctx, definitionsPath, object{
		"metadata": object{"name": d.plural + "." + group},
		"spec": object{
			"group": group, "scope": "Namespaced",
			"names":    object{"plural": d.plural, "singular": name + "route", "kind": d.kind(), "listKind": d.kind() + "List"},
			"versions": []any{version("v1", true, "address"), version("v2", false, "host", "port")},
			"conversion": object{"strategy": "Webhook", "webhook": object{
				"conversionReviewVersions": []string{"v1"},
				"clientConfig":             object{"url": hook.url, "caBundle": base64.StdEncoding.EncodeToString(hook.ca)},
			}},
		},
	})
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, d.path("v1"), "", nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusOK, r.Err()
	}))
	// A server delays the first creations of a new definition: do them here, before answers are
	// timed.
	r, err := api.Do(ctx, http.MethodPost, d.path("v1"), "dryRun=All", d.route(0))
	harness.Check(t, err)
	if r.Code != http.StatusCreated {
		t.Fatal(r.Err())
	}
	return d
}

func (d routes) kind() string { return "Route" + d.namespace }

// path returns the path of the namespace's routes.
func (d routes) path(version string) string {
	return fmt.Sprintf("/apis/%s/%s/namespaces/%s/%s", group, version, d.namespace, d.plural)
}

// address returns the v1 address of route i before any update.
func address(i int) string { return fmt.Sprintf("host-%d:%d", i, 8000+i) }

func routeName(i int) string { return fmt.Sprintf("route-%04d", i) }

// route returns route i in v1.
func (d routes) route(i int) object {
	return object{"apiVersion": group + "/v1", "kind": d.kind(),
		"metadata": object{"name": routeName(i)}, "data": object{"address": address(i)}}
}

// create creates the routes from first up to, but not including, end through v1.
func (d routes) create(ctx context.Context, first, end int) error {
	for i := first; i < end; i++ {
		if _, err := api.Create(ctx, d.path("v1"), d.route(i)); err != nil {
			return err
		}
	}
	return nil
}

// wrong returns an error unless the objects have the version and, in order, the names and addresses
// given alternately in addresses.
func (d routes) wrong(version string, objects []harness.Object, addresses ...string) error {
	var errs []error
	if len(objects)*2 != len(addresses) {
		errs = append(errs, fmt.Errorf("got %d objects, want %d", len(objects), len(addresses)/2))
	}
	for i, o := range objects {
		if i*2 >= len(addresses) {
			break
		}
		name, want := addresses[i*2], addresses[i*2+1]
		got, fields := o.Data["address"], 1
		if version == "v2" {
			got, fields = o.Data["host"]+":"+o.Data["port"], 2
		}
		if o.APIVersion != group+"/"+version || o.Kind != d.kind() || o.Metadata.Name != name || got != want || len(o.Data) != fields {
			errs = append(errs, fmt.Errorf("number %d is %s %s %s with %v, want %s with %s in %s",
				i, o.APIVersion, o.Kind, o.Metadata.Name, o.Data, name, want, version))
		}
	}
	return errors.Join(errs...)
}

// numbered returns names and addresses of the routes from first up to, but not including, end.
func numbered(first, end int) []string {
	var addresses []string
	for i := first; i < end; i++ {
		addresses = append(addresses, routeName(i), address(i))
	}
	return addresses
}
