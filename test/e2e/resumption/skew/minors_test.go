package skew

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// three are servers on one etcd: the stock kube-apiservers of both minor versions, and Strata.
type three struct {
	older, newer, strata *harness.Server
	env                  *harness.Env
	client               *clientv3.Client
}

// startThree starts the three servers, the older one first. The flags are for the two newer ones.
func startThree(t *testing.T, ctx context.Context, flags ...string) *three {
	t.Helper()
	programs := []string{program(t, older), program(t, newer)}
	env := harness.New(t)
	etcd := env.StockEtcd(t, "3.7")
	// The service account that pods of a namespace need is created by a controller, which does not
	// run here.
	common := slices.Clip([]string{"--runtime-config=api/all=true", "--disable-admission-plugins=ServiceAccount"})
	s := &three{env: env, client: etcd.Client()}
	s.older = startPeer(env, programs[0], etcd, append(common, "--feature-gates=ClusterTrustBundle=true,StorageVersionMigrator=true")...)
	harness.Check(t, s.older.Await(ctx, "/readyz"))
	s.newer = startPeer(env, programs[1], etcd, append(common, flags...)...)
	s.strata = startStrata(env, etcd, append(common, flags...)...)
	harness.Check(t, s.newer.Await(ctx, "/readyz"))
	harness.Check(t, s.strata.Await(ctx, "/readyz"))
	return s
}

// TestMinorVersions_StoredObjects_AreInterchangeable fills an etcd through kube-apiserver 1.36.
// Strata's answers equal those of kube-apiserver 1.37, byte by byte. Then either of these two
// updates all objects: both store them in the same versions, of which several differ from those of
// 1.36, and kube-apiserver 1.36 reads all of them.
func TestMinorVersions_StoredObjects_AreInterchangeable(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	s := startThree(t, ctx)
	s.fill(t, ctx)
	objects := s.resources(t, ctx)
	if len(objects) < 60 {
		t.Fatalf("%d resources: this test compares too little", len(objects))
	}
	stored := map[string]map[string]string{"filled": s.stored(t, ctx)}
	s.requireSameBytes(t, ctx, "filled by "+older, objects)

	views := map[string]map[string]string{}
	for _, writer := range []struct {
		name string
		api  *harness.API
	}{{"stock", s.newer.API()}, {"strata", s.strata.API()}, {"older", s.older.API()}} {
		s.touch(t, ctx, writer.name, writer.api)
		stored[writer.name] = s.stored(t, ctx)
		views[writer.name] = s.view(t, ctx, s.older.API())
		s.requireSameBytes(t, ctx, "updated by "+writer.name, objects)
	}
	requireEqual(t, "forms stored by strata", stored["strata"], stored["stock"])
	requireEqual(t, "objects that strata updated, as "+older+" shows them", views["strata"], views["stock"])
	requireEqual(t, "forms stored by "+older+" after both", stored["older"], stored["filled"])
	changed := map[string]bool{}
	for key, form := range stored["filled"] {
		if now := stored["strata"][key]; now != form {
			changed[form+" becomes "+now] = true
		}
	}
	t.Log("storage versions: ", strings.Join(slices.Sorted(maps.Keys(changed)), "; "))
	if want := "admissionregistration.k8s.io/v1beta1 MutatingAdmissionPolicy becomes admissionregistration.k8s.io/v1 MutatingAdmissionPolicy"; !changed[want] {
		t.Errorf("no storage version has changed as in %q", want)
	}
}

// fill creates objects of many kinds through the older server.
func (s *three) fill(t *testing.T, ctx context.Context) {
	t.Helper()
	testdata, err := filepath.Abs("../dropin/testdata")
	harness.Check(t, err)
	kubectl := func(args ...string) {
		t.Helper()
		r, err := s.older.Kubectl(ctx, "", args...)
		harness.Check(t, err)
		if r.Code != 0 {
			t.Fatalf("kubectl %s: %s", strings.Join(args, " "), r.Stderr)
		}
	}
	kubectl("create", "-f", filepath.Join(testdata, "objects.yaml"))
	kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// discovery has the kinds a moment after their definitions are established
		r, err := s.older.Kubectl(ctx, "", "create", "--dry-run=client", "-f", filepath.Join(testdata, "custom.yaml"))
		return err == nil && r.Code == 0, err
	}))
	kubectl("create", "-f", filepath.Join(testdata, "custom.yaml"))
	api := s.older.API()
	request := object{"name": "request", "exactly": object{"deviceClassName": "class", "allocationMode": "ExactCount", "count": 1}}
	match := object{"resourceRules": []any{object{"apiGroups": []any{"none.example.com"}, "apiVersions": []any{"*"}, "operations": []any{"CREATE"}, "resources": []any{"*"}}}}
	for path, body := range map[string]object{
		"/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies": {"spec": object{"matchConstraints": match,
			"reinvocationPolicy": "Never", "mutations": []any{object{"patchType": "ApplyConfiguration", "applyConfiguration": object{"expression": "Object{}"}}}}},
		"/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings": {"spec": object{"policyName": "stored"}},
		"/apis/certificates.k8s.io/v1beta1/clustertrustbundles":                 {"spec": object{"trustBundle": string(s.env.Authority().CertPEM)}},
		"/apis/storagemigration.k8s.io/v1beta1/storageversionmigrations":        {"spec": object{"resource": object{"group": "none.example.com", "resource": "none"}}},
		"/apis/resource.k8s.io/v1beta2/devicetaintrules":                        {"spec": object{"taint": object{"key": "example.com/taint", "effect": "NoSchedule"}}},
		"/apis/resource.k8s.io/v1/deviceclasses":                                {"spec": object{}},
		"/apis/resource.k8s.io/v1/namespaces/stock/resourceclaims":              {"spec": object{"devices": object{"requests": []any{request}}}},
		"/apis/resource.k8s.io/v1/namespaces/stock/resourceclaimtemplates":      {"spec": object{"spec": object{"devices": object{"requests": []any{request}}}}},
		"/apis/resource.k8s.io/v1/resourceslices": {"spec": object{"nodeName": "node-1", "driver": "example.com",
			"pool": object{"name": "node-1", "resourceSliceCount": 1}}},
		"/apis/storage.k8s.io/v1/volumeattributesclasses": {"driverName": "example.com", "parameters": object{"a": "b"}},
		"/apis/storage.k8s.io/v1/csinodes":                {"spec": object{"drivers": []any{object{"name": "driver", "nodeID": "node"}}}},
		"/apis/coordination.k8s.io/v1beta1/namespaces/stock/leasecandidates": {"spec": object{"leaseName": "lease", "binaryVersion": "1.36.3",
			"emulationVersion": "1.36.0", "strategy": "OldestEmulationVersion"}},
	} {
		body["metadata"] = object{"name": "stored"}
		create(t, ctx, api, path, body)
	}
}

// resources returns the paths of all listable resources of the newer servers, in all versions.
func (s *three) resources(t *testing.T, ctx context.Context) []string {
	t.Helper()
	paths := discover(t, ctx, s.strata.API())
	if stock := discover(t, ctx, s.newer.API()); !slices.Equal(paths, stock) {
		t.Errorf("strata serves\n%v\nand kube-apiserver %s\n%v", paths, newer, stock)
	}
	return paths
}

// discover returns the paths of all listable resources of a server, sorted.
func discover(t *testing.T, ctx context.Context, api *harness.API) []string {
	t.Helper()
	groups := []string{"/api/v1"}
	var discovered struct {
		Groups []struct {
			Versions []struct{ GroupVersion string }
		}
		Resources []struct {
			Name  string
			Verbs []string
		}
	}
	read := func(path string) {
		t.Helper()
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		harness.Check(t, err)
		if r.Code == http.StatusNotFound {
			return // /apis has the versions of all servers on an etcd, whose APIServices they share
		}
		if r.Code != http.StatusOK {
			t.Fatalf("get %s: %v", path, r.Err())
		}
		harness.Check(t, json.Unmarshal(r.Body, &discovered))
	}
	read("/apis")
	for _, g := range discovered.Groups {
		for _, v := range g.Versions {
			groups = append(groups, "/apis/"+v.GroupVersion)
		}
	}
	var paths []string
	for _, group := range groups {
		discovered.Resources = nil
		read(group)
		for _, r := range discovered.Resources {
			if slices.Contains(r.Verbs, "list") && r.Name != "componentstatuses" {
				// componentstatuses are not stored
				paths = append(paths, group+"/"+r.Name)
			}
		}
	}
	slices.Sort(paths)
	return paths
}

// requireSameBytes compares lists of all resources at one revision between Strata and
// kube-apiserver of the same version.
func (s *three) requireSameBytes(t *testing.T, ctx context.Context, what string, paths []string) {
	t.Helper()
	at := exact(fmt.Sprint(etcdRevision(t, ctx, s.client)))
	differences := 0
	for _, path := range paths {
		for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf, application/json",
			"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", "application/json;as=Table;g=meta.k8s.io;v=v1"} {
			got, want := readAs(t, ctx, s.strata.API(), path, at, accept), readAs(t, ctx, s.newer.API(), path, at, accept)
			if got.Code == want.Code && (bytes.Equal(got.Body, want.Body) || strings.Contains(accept, "Table") && sameButAges(got.Body, want.Body)) {
				continue
			}
			if differences++; differences <= 3 {
				t.Errorf("%s: list %s?%s as %s: %d, want %d:\n%q\nwant\n%q", what, path, at, accept, got.Code, want.Code, got.Body, want.Body)
			}
		}
	}
	if differences > 0 {
		t.Errorf("%s: %d lists of %d resources differ", what, differences, len(paths))
	}
}

// readAs gets a path, and retries until the server has loaded the resource.
func readAs(t *testing.T, ctx context.Context, api *harness.API, path, query, accept string) *harness.Response {
	t.Helper()
	var response *harness.Response
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.DoAs(ctx, http.MethodGet, path, query, "", accept, nil)
		if err != nil {
			return false, err
		}
		response = r
		return r.Code != http.StatusTooManyRequests, r.Err()
	}))
	return response
}

// sameButAges reports whether tables have the same rows with the same objects: a cell may be an
// age, which grows.
func sameButAges(a, b []byte) bool {
	var tables [2]struct {
		ColumnDefinitions json.RawMessage
		Rows              []struct {
			Cells  []any
			Object json.RawMessage
		}
	}
	if json.Unmarshal(a, &tables[0]) != nil || json.Unmarshal(b, &tables[1]) != nil ||
		!bytes.Equal(tables[0].ColumnDefinitions, tables[1].ColumnDefinitions) || len(tables[0].Rows) != len(tables[1].Rows) {
		return false
	}
	for i, row := range tables[0].Rows {
		if other := tables[1].Rows[i]; len(row.Cells) != len(other.Cells) || !bytes.Equal(row.Object, other.Object) {
			return false
		}
	}
	return true
}

// touch patches all objects through one server.
func (s *three) touch(t *testing.T, ctx context.Context, by string, api *harness.API) {
	t.Helper()
	touched := 0
	for path, objects := range listed(t, ctx, api) {
		prefix, resource := path[:strings.LastIndexByte(path, '/')], path[strings.LastIndexByte(path, '/')+1:]
		for _, o := range objects {
			namespace := ""
			if o.Metadata.Namespace != "" {
				namespace = "/namespaces/" + o.Metadata.Namespace
			}
			if changesByItself(path, o.Metadata) {
				continue
			}
			r, err := api.DoAs(ctx, http.MethodPatch, prefix+namespace+"/"+resource+"/"+o.Metadata.Name, "", "application/merge-patch+json", "",
				fmt.Sprintf(`{"metadata":{"annotations":{"touched":%q}}}`, by))
			harness.Check(t, err)
			if r.Code != http.StatusOK {
				t.Errorf("%s: patch of %s: %v", by, o.Metadata.Name, r.Err())
			}
			touched++
		}
	}
	if touched < 200 {
		t.Fatalf("%d objects were updated: this test compares too little", touched)
	}
}

// changesByItself reports whether servers write an object by themselves.
func changesByItself(path string, o metav1.ObjectMeta) bool {
	return strings.HasSuffix(path, "/leases") && o.Labels["apiserver.kubernetes.io/identity"] != "" ||
		strings.HasSuffix(path, "/apiservices") || strings.HasSuffix(path, "/storageversions")
}

// partial is an object of any kind.
type partial struct{ Metadata metav1.ObjectMeta }

// listed lists all resources of a server in one version of each, by their paths.
func listed(t *testing.T, ctx context.Context, api *harness.API) map[string][]partial {
	t.Helper()
	seen := map[string]bool{}
	all := map[string][]partial{}
	for _, path := range discover(t, ctx, api) {
		parts := strings.Split(path, "/") // "", apis, group, version, resource
		key := parts[1] + parts[2] + parts[len(parts)-1]
		if parts[1] == "api" {
			key = parts[len(parts)-1]
		}
		if !seen[key] {
			seen[key] = true
			var list struct{ Items []partial }
			r := readAs(t, ctx, api, path, "", "application/json")
			if r.Code != http.StatusOK {
				t.Fatalf("list %s: %v", path, r.Err())
			}
			harness.Check(t, json.Unmarshal(r.Body, &list))
			all[path] = list.Items
		}
	}
	return all
}

// view returns a server's view of all objects, without the fields that each update changes.
func (s *three) view(t *testing.T, ctx context.Context, api *harness.API) map[string]string {
	t.Helper()
	view := map[string]string{}
	for _, path := range discover(t, ctx, api) {
		r := readAs(t, ctx, api, path, "", "application/json")
		var list struct{ Items []object }
		if r.Code != http.StatusOK || json.Unmarshal(r.Body, &list) != nil {
			t.Errorf("list %s: %v", path, r.Err())
			continue
		}
		for _, item := range list.Items {
			var o partial
			data, err := json.Marshal(item)
			harness.Check(t, err)
			harness.Check(t, json.Unmarshal(data, &o))
			if changesByItself(path, o.Metadata) {
				continue
			}
			metadata := item["metadata"].(object)
			delete(metadata, "resourceVersion")
			delete(metadata, "managedFields")
			delete(metadata, "generation") // an annotation increases a Deployment's generation
			annotations, _ := metadata["annotations"].(object)
			delete(annotations, "touched")
			data, err = json.Marshal(item)
			harness.Check(t, err)
			view[path+" "+o.Metadata.Namespace+"/"+o.Metadata.Name] = string(data)
		}
	}
	return view
}

// stored returns the API version and kind of each stored object, by its key.
func (s *three) stored(t *testing.T, ctx context.Context) map[string]string {
	t.Helper()
	resp, err := s.client.Get(ctx, "/registry/", clientv3.WithPrefix())
	harness.Check(t, err)
	forms := map[string]string{}
	for _, kv := range resp.Kvs {
		var o runtime.Unknown
		if rest, ok := bytes.CutPrefix(kv.Value, []byte("k8s\x00")); ok {
			harness.Check(t, o.Unmarshal(rest))
		} else if err := json.Unmarshal(kv.Value, &o.TypeMeta); err != nil {
			t.Errorf("%s: %v", kv.Key, err)
		}
		if key := string(kv.Key); !strings.HasPrefix(key, "/registry/apiregistration.k8s.io/") && !strings.HasPrefix(key, "/registry/masterleases/") {
			forms[key] = o.APIVersion + " " + o.Kind
		}
	}
	return forms
}

// requireEqual compares texts by key.
func requireEqual(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	if !maps.Equal(got, want) {
		t.Errorf("%s: %s", what, difference(got, want))
	}
}

// difference lists the keys with different values.
func difference(got, want map[string]string) string {
	var text strings.Builder
	for key, value := range want {
		if got[key] != value {
			fmt.Fprintf(&text, "%s at %q, want %q; ", key, got[key], value)
		}
	}
	for key := range got {
		if _, ok := want[key]; !ok {
			fmt.Fprintf(&text, "%s is too much; ", key)
		}
	}
	return text.String()
}

// TestMinorVersions_NewField_IsDroppedByOlder writes a field that exists in 1.37 only, through
// Strata and through kube-apiserver 1.37. A kube-apiserver 1.36 does not return it and drops it at
// the next update; then no server returns it.
func TestMinorVersions_NewField_IsDroppedByOlder(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	s := startThree(t, ctx)
	const field = "runningInUserNamespace"
	shown := func(name string, apis ...*harness.API) (shown []bool) {
		t.Helper()
		for _, api := range apis {
			for _, path := range []string{"/api/v1/nodes/" + name, "/api/v1/nodes"} {
				query := ""
				if !strings.HasSuffix(path, name) {
					query = "fieldSelector=metadata.name%3D" + name
				}
				r, err := api.Do(ctx, http.MethodGet, path, query, nil)
				harness.Check(t, err)
				if r.Code != http.StatusOK || !strings.Contains(string(r.Body), name) {
					t.Fatalf("get %s?%s: %v", path, query, r.Err())
				}
				shown = append(shown, strings.Contains(string(r.Body), `"`+field+`":true`))
			}
		}
		return shown
	}
	for name, writer := range map[string]*harness.API{"stock": s.newer.API(), "strata": s.strata.API()} {
		newerOnes := []*harness.API{s.newer.API(), s.strata.API()}
		created := create(t, ctx, writer, "/api/v1/nodes", object{"metadata": object{"name": name}})
		w := watchFrom(t, ctx, s.strata.API(), "/api/v1/nodes", created.Metadata.ResourceVersion)
		patched, err := writer.Patch(ctx, "/api/v1/nodes/"+name+"/status", `{"status":{"nodeInfo":{"`+field+`":true}}}`)
		harness.Check(t, err)
		expectEvent(t, ctx, w, "MODIFIED", patched)
		if got := shown(name, newerOnes...); slices.Contains(got, false) {
			t.Errorf("%s has written the field; it is shown: %v", name, got)
		}
		if got := shown(name, s.older.API()); slices.Contains(got, true) {
			t.Errorf("%s has written the field; %s shows it: %v", name, older, got)
		}
		patched, err = s.older.API().Patch(ctx, "/api/v1/nodes/"+name, `{"metadata":{"labels":{"updated":"yes"}}}`)
		harness.Check(t, err)
		expectEvent(t, ctx, w, "MODIFIED", patched)
		w.Close()
		if got := shown(name, append(newerOnes, s.older.API())...); slices.Contains(got, true) {
			t.Errorf("%s has written the field, %s has updated the object; it is shown: %v", name, older, got)
		}
	}
}

// TestEmulatedVersion_MatchesUpstream compares Strata that emulates 1.36 with a kube-apiserver 1.37
// that emulates 1.36: they serve the same resources, have the same features, and store objects in
// the same versions.
func TestEmulatedVersion_MatchesUpstream(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	s := startThree(t, ctx, "--emulated-version="+older)
	s.fill(t, ctx)
	paths := s.resources(t, ctx)
	s.requireSameBytes(t, ctx, "emulated "+older, paths)
	for _, path := range paths {
		if strings.HasPrefix(path, "/apis/certificates.k8s.io/v1/clustertrustbundles") {
			t.Errorf("%s is served, which is new in %s", path, newer)
		}
	}
	features := func(server *harness.Server) map[string]string {
		t.Helper()
		r, err := server.API().DoAs(ctx, http.MethodGet, "/metrics", "", "", "text/plain", nil)
		harness.Check(t, err)
		enabled := map[string]string{}
		for line := range strings.Lines(string(r.Body)) {
			if series, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && strings.HasPrefix(series, "kubernetes_feature_enabled{") {
				enabled[series] = value
			}
		}
		return enabled
	}
	want := features(s.newer)
	if len(want) < 100 {
		t.Fatalf("%d features: this test compares too little", len(want))
	}
	requireEqual(t, "features", features(s.strata), want)
	forms := map[string]map[string]string{}
	for name, server := range map[string]*harness.Server{"stock": s.newer, "strata": s.strata} {
		s.touch(t, ctx, name, server.API())
		forms[name] = s.stored(t, ctx)
	}
	requireEqual(t, "forms stored by strata", forms["strata"], forms["stock"])
	version := func(server *harness.Server) (v map[string]string) {
		t.Helper()
		r, err := server.API().Do(ctx, http.MethodGet, "/version", "", nil)
		harness.Check(t, err)
		harness.Check(t, json.Unmarshal(r.Body, &v))
		return v
	}
	ours, theirs := version(s.strata), version(s.newer)
	for _, key := range []string{"major", "minor", "emulationMajor", "emulationMinor", "minCompatibilityMajor", "minCompatibilityMinor"} {
		if ours[key] != theirs[key] || key == "emulationMinor" && ours[key] != "36" {
			t.Errorf("%s is %q, want %q", key, ours[key], theirs[key])
		}
	}
}
