package samebytes

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/stratakube/strata/test/harness"
)

// Namespaces created by fill.
const (
	stubNamespace   = "stubs"  // an object of each kind, created through the API
	oddNamespace    = "odd"    // objects that the API allows, and others that etcd may contain
	storedNamespace = "stored" // every field of every kind, in every stored form
	bulkNamespace   = "bulk"   // a list large enough to be compressed
	liveNamespace   = "live"   // for tests of watches
)

// object is an object to write; its shape is that of the API.
type object = map[string]any

// fill writes all objects of the tests.
func fill(ctx context.Context, api *harness.API, kv *clientv3.Client) error {
	for _, namespace := range []string{stubNamespace, oddNamespace, storedNamespace, bulkNamespace, liveNamespace} {
		if _, err := api.Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": namespace}}); err != nil {
			return err
		}
	}
	resources, err := discover(ctx, api)
	if err != nil {
		return err
	}
	for _, step := range []func() error{
		func() error { return createStubs(ctx, api, resources) },
		func() error { return storeFixtures(ctx, kv, resources, false) },
		func() error { return createDefinitions(ctx, api) },
		func() error { return createObjects(ctx, api) },
		func() error { return createBulk(ctx, api) },
		func() error { return storeOdd(ctx, kv) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// fillLate writes the objects with which no server starts, and changes some existing objects.
func fillLate(ctx context.Context, api *harness.API, kv *clientv3.Client, resources []resource) error {
	if err := storeFixtures(ctx, kv, resources, true); err != nil {
		return err
	}
	for key, value := range oldServices() {
		if err := put(ctx, kv, "/registry/"+key, value); err != nil {
			return err
		}
	}
	for _, s := range subjects {
		if s.name == "none" {
			continue
		}
		if _, err := api.Patch(ctx, s.object(), `{"metadata":{"annotations":{"changed":"since"}}}`); err != nil {
			return err
		}
		o := object{"metadata": object{"name": "gone"}}
		switch s.gvr.Resource {
		case "configmaps", "secrets":
		case "widgets", "planets":
			o["apiVersion"], o["kind"] = s.gvr.GroupVersion().String(), map[string]string{"widgets": "Widget", "planets": "Planet"}[s.gvr.Resource]
		default:
			continue
		}
		if err := post(ctx, api, s.in(s.namespace), o); err != nil {
			return err
		}
		if err := api.Delete(ctx, s.in(s.namespace)+"/gone"); err != nil {
			return err
		}
	}
	return nil
}

// documents returns the YAML documents in data.
func documents(data []byte) ([]object, error) {
	var all []object
	for decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096); ; {
		var o object
		if err := decoder.Decode(&o); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, err
		}
		if o != nil {
			all = append(all, o)
		}
	}
}

// post creates an object through the API.
func post(ctx context.Context, api *harness.API, path string, body any) error {
	r, err := api.Do(ctx, http.MethodPost, path, "", body)
	if err != nil {
		return err
	}
	if r.Code != http.StatusCreated {
		return fmt.Errorf("create %s: %w", path, r.Err())
	}
	return nil
}

// put writes a raw value to etcd.
func put(ctx context.Context, kv *clientv3.Client, key, value string) error {
	_, err := kv.Put(ctx, key, value)
	return err
}

// segment escapes s as a segment of a path.
func segment(s string) string { return strings.ReplaceAll(url.PathEscape(s), "+", "%2B") }

// encoded returns v as JSON.
func encoded(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err) // made of maps, strings and numbers
	}
	return string(data)
}
