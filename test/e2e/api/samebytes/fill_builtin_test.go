package samebytes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	upstream "k8s.io/kubernetes/test/integration/etcd"

	"github.com/stratakube/strata/test/harness"
)

// createStubs creates an object of every built-in resource through the API, with the data of
// upstream's test of storage paths.
func createStubs(ctx context.Context, api *harness.API, resources []resource) error {
	stubs := upstream.GetEtcdStorageDataForNamespace(stubNamespace)
	var errs []error
	for _, r := range resources {
		stub, ok := stubs[r.gvr]
		if !ok {
			// objects of this version are created through another one;
			// TestList_EveryResource_MatchesUpstream detects a missing one
			continue
		}
		o := object{}
		if err := json.Unmarshal([]byte(stub.Stub), &o); err != nil {
			return err
		}
		o["apiVersion"], o["kind"] = r.gvr.GroupVersion().String(), r.kind
		namespace := ""
		if r.namespaced {
			namespace = stubNamespace
		}
		errs = append(errs, post(ctx, api, r.in(namespace), o))
	}
	return errors.Join(errs...)
}

// releases are the directories of k8s.io/api/testdata. Each contains an object of every kind and
// version with every field set, encoded by that release.
var releases = []string{"HEAD", "v1.33.0", "v1.35.0"}

// tooOddToStartWith are the resources that a server repairs when it starts; it exits if it cannot.
var tooOddToStartWith = map[string]bool{"services": true, "servicecidrs": true, "ipaddresses": true}

// storeFixtures writes these objects to etcd as they might have been stored: by every release, in
// every version that can still be decoded, as protobuf and as JSON. Admission would reject them.
//
// Without late it omits the objects with which a server does not start; with late it writes only
// those.
func storeFixtures(ctx context.Context, kv *clientv3.Client, resources []resource, late bool) error {
	dir, err := moduleDir("k8s.io/api")
	if err != nil {
		return err
	}
	prefixes := storagePrefixes()
	for _, release := range releases {
		files, err := filepath.Glob(filepath.Join(dir, "testdata", release, "*"))
		if err != nil {
			return err
		}
		for _, file := range files {
			group, version, kind, encoding, ok := fixtureName(filepath.Base(file))
			r := storedBy(resources, group, kind)
			if !ok || r == nil || prefixes[r.gvr.GroupResource().String()] == "" || tooOddToStartWith[r.gvr.Resource] != late {
				continue
			}
			name := strings.ToLower(strings.Join([]string{release, version, encoding}, "-"))
			key := prefixes[r.gvr.GroupResource().String()] + "/"
			namespace := ""
			if r.namespaced {
				namespace = storedNamespace
				key += storedNamespace + "/"
			}
			data, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if data, err = renamed(data, encoding, namespace, name); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			// Versions that this release no longer knows would make lists fail.
			if _, err := runtime.Decode(legacyscheme.Codecs.UniversalDecoder(), data); err != nil {
				continue
			}
			if err := put(ctx, kv, key+name, string(data)); err != nil {
				return err
			}
		}
	}
	return nil
}

// fixtureName parses a name such as apps.v1.Deployment.pb or
// rbac.authorization.k8s.io.v1.Role.json.
func fixtureName(name string) (group, version, kind, encoding string, ok bool) {
	parts := strings.Split(name, ".")
	n := len(parts)
	if n < 4 || parts[n-1] != "pb" && parts[n-1] != "json" {
		return "", "", "", "", false
	}
	if group = strings.Join(parts[:n-3], "."); group == "core" {
		group = ""
	}
	return group, parts[n-3], parts[n-2], parts[n-1], true
}

// storedBy returns the resource that stores objects of the kind. Resources of group extensions have
// moved to other groups.
func storedBy(resources []resource, group, kind string) *resource {
	for _, r := range resources {
		if r.kind == kind && !r.custom && (r.gvr.Group == group || group == "extensions" && (r.gvr.Group == "apps" || r.gvr.Group == "networking.k8s.io")) {
			return &r
		}
	}
	return nil
}

// storagePrefixes returns the key prefix of each resource; namespace and name follow it.
func storagePrefixes() map[string]string {
	const namespace = "n"
	prefixes := map[string]string{}
	for gvr, data := range upstream.GetEtcdStorageDataForNamespace(namespace) {
		prefix := filepath.Dir(data.ExpectedEtcdPath)
		prefixes[gvr.GroupResource().String()] = strings.TrimSuffix(prefix, "/"+namespace)
	}
	return prefixes
}

// renamed returns an encoded object with another name and namespace.
func renamed(data []byte, encoding, namespace, name string) ([]byte, error) {
	if encoding == "json" {
		var o struct {
			Metadata object `json:"metadata"`
		}
		all := object{}
		if err := errors.Join(json.Unmarshal(data, &o), json.Unmarshal(data, &all)); err != nil {
			return nil, err
		}
		o.Metadata["name"], o.Metadata["namespace"] = name, namespace
		all["metadata"] = o.Metadata
		return json.Marshal(all)
	}
	serializer := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	o, err := runtime.Decode(serializer, data)
	if runtime.IsNotRegisteredError(err) {
		return data, nil // cannot be decoded
	}
	if err != nil {
		return nil, err
	}
	accessor, err := meta.Accessor(o)
	if err != nil {
		return nil, err
	}
	accessor.SetName(name)
	accessor.SetNamespace(namespace)
	return runtime.Encode(serializer, o)
}

// moduleDir returns the source directory of a module.
func moduleDir(module string) (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		return "", fmt.Errorf("find module %s: %w", module, err)
	}
	return strings.TrimSpace(string(out)), nil
}
