package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// project is a module with definitions, and one of their resources, which the test fills.
type project struct {
	module     string
	manifests  string // directory in the module
	group      string
	resource   string
	kind       string
	versions   []string // served; the first is the stored one
	definition string   // file of the resource's definition
	spec       func(i int) object
}

var projects = []project{
	{
		module:     "github.com/cert-manager/cert-manager",
		manifests:  "deploy/crds",
		group:      "cert-manager.io",
		resource:   "certificates",
		kind:       "Certificate",
		versions:   []string{"v1"},
		definition: "cert-manager.io_certificates.yaml",
		spec: func(i int) object {
			return object{
				"secretName": fmt.Sprintf("tls-%d", i),
				"dnsNames":   []any{fmt.Sprintf("host-%d.example.com", i)},
				"issuerRef":  object{"name": "issuer", "kind": "ClusterIssuer"},
			}
		},
	},
	{
		module:     "sigs.k8s.io/gateway-api",
		manifests:  "config/crd/standard",
		group:      "gateway.networking.k8s.io",
		resource:   "httproutes",
		kind:       "HTTPRoute",
		versions:   []string{"v1beta1", "v1alpha2"},
		definition: "gateway.networking.k8s.io_httproutes.yaml",
		spec: func(i int) object {
			return object{
				"parentRefs": []any{object{"name": "gateway"}},
				"hostnames":  []any{fmt.Sprintf("host-%d.example.com", i)},
				"rules":      []any{object{"backendRefs": []any{object{"name": "backend", "port": 8080}}}},
			}
		},
	},
}

// download returns the directory of the project's module at the version that testdata/projects
// pins.
func (p project) download(t *testing.T, ctx context.Context) string {
	t.Helper()
	cmd := exec.CommandContext(ctx, "go", "mod", "download", "-json", p.module)
	cmd.Dir = filepath.Join("testdata", "projects")
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=readonly")
	out, err := cmd.Output()
	var module struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(out, &module); jsonErr != nil || err != nil || module.Dir == "" {
		t.Fatalf("download %s: %v\n%s", p.module, err, out)
	}
	return filepath.Join(module.Dir, filepath.FromSlash(p.manifests))
}

func (p project) path(version, namespace string) string {
	if namespace == "" {
		return fmt.Sprintf("/apis/%s/%s/%s", p.group, version, p.resource)
	}
	return fmt.Sprintf("/apis/%s/%s/namespaces/%s/%s", p.group, version, namespace, p.resource)
}

// awaitServed returns when the resource is served in all versions and is in discovery.
func (p project) awaitServed(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, version := range p.versions {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			_, err := api.List(ctx, p.path(version, ""), "")
			return err == nil, err
		}))
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, "/apis/"+p.group+"/"+version, "", nil)
			return err == nil && strings.Contains(string(r.Body), `"name":"`+p.resource+`"`), err
		}))
	}
}

// TestCRD_ProjectDefinitions_ServeEveryVersion installs the definitions of a project, fills a
// resource with 200 objects, or 1,000 in the long form, reads and watches it in each served
// version, deletes the definition and creates it again.
func TestCRD_ProjectDefinitions_ServeEveryVersion(t *testing.T) {
	t.Parallel()
	for _, p := range projects {
		t.Run(p.group, func(t *testing.T) {
			t.Parallel()
			p.test(t)
		})
	}
}

// Counts of each project's objects, which are in several namespaces:
var objectCount = harness.Pick(200, 1000)

const (
	namespaceCount = 4
	updateCount    = 100
)

func (p project) test(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	manifests := p.download(t, ctx)
	install := func(path string) {
		t.Helper()
		r, err := cluster.Kubectl(ctx, "", "apply", "--server-side", "-f", path)
		harness.Check(t, err)
		if r.Code != 0 {
			t.Fatalf("apply %s: %s", path, r.Stderr)
		}
		p.awaitServed(t, ctx)
	}
	install(manifests)

	namespace := func(i int) string { return fmt.Sprintf("%s-%d", p.resource, i%namespaceCount) }
	name := func(i int) string { return fmt.Sprintf("object-%04d", i) }
	for i := range namespaceCount {
		harness.Namespace(t, ctx, api, namespace(i))
	}
	create := func(ctx context.Context, i int) error {
		version := p.versions[i%len(p.versions)]
		_, err := api.Create(ctx, p.path(version, namespace(i)), object{
			"apiVersion": p.group + "/" + version, "kind": p.kind,
			"metadata": object{"name": name(i), "labels": object{"tenth": fmt.Sprint(i % 10)}},
			"spec":     p.spec(i),
		})
		return err
	}
	harness.Check(t, harness.InParallel(ctx, objectCount, create))

	all, err := api.List(ctx, p.path(p.versions[0], ""), "")
	harness.Check(t, err)
	if len(all.Items) != objectCount {
		t.Fatalf("listed %d objects, want %d", len(all.Items), objectCount)
	}
	for _, version := range p.versions {
		t.Run("list "+version, func(t *testing.T) { p.testList(t, ctx, version, all, namespace(0)) })
	}
	t.Run("watch", func(t *testing.T) { p.testWatch(t, ctx, all, namespace, name) })
	t.Run("delete", func(t *testing.T) {
		p.testDelete(t, ctx)
		install(filepath.Join(manifests, p.definition))
		list, err := api.List(ctx, p.path(p.versions[0], ""), "")
		harness.Check(t, err)
		if len(list.Items) != 0 {
			t.Fatalf("%d objects after the definition was created again, want none", len(list.Items))
		}
		if harness.Revision(t, list.Metadata.ResourceVersion) <= harness.Revision(t, all.Metadata.ResourceVersion) {
			t.Errorf("list at %s after one at %s", list.Metadata.ResourceVersion, all.Metadata.ResourceVersion)
		}
		last := p.versions[len(p.versions)-1]
		w := harness.StartWatch(t, ctx, api, p.path(last, ""), "resourceVersion="+list.Metadata.ResourceVersion)
		harness.Check(t, create(ctx, 0))
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" || e.Object.Metadata.Name != name(0) || e.Object.APIVersion != p.group+"/"+last {
			t.Errorf("got %s of %s in %s", e.Type, e.Object.Key(), e.Object.APIVersion)
		}
	})
}

// testList lists all objects in one version, in every way, and compares them with the list in
// another version.
func (p project) testList(t *testing.T, ctx context.Context, version string, all *harness.List, namespace string) {
	path := p.path(version, "")
	list := func(path, query string) *harness.List {
		t.Helper()
		list, err := api.List(ctx, path, query)
		harness.Check(t, err)
		return list
	}
	whole := list(path, "")
	equalObjects(t, "whole", whole.Items, all.Items)
	for _, o := range whole.Items {
		if o.APIVersion != p.group+"/"+version || o.Kind != p.kind {
			t.Fatalf("%s is %s %s in version %s", o.Key(), o.APIVersion, o.Kind, version)
		}
	}
	if want := p.kind + "List"; whole.Kind != want {
		t.Errorf("list is a %s, want %s", whole.Kind, want)
	}
	equalObjects(t, "any resource version", list(path, "resourceVersion=0").Items, all.Items)
	equalObjects(t, "exactly", list(path, "resourceVersionMatch=Exact&resourceVersion="+all.Metadata.ResourceVersion).Items, all.Items)

	items, chunks, err := api.ListAll(ctx, path, "", 137)
	harness.Check(t, err)
	equalObjects(t, "in chunks", items, all.Items)
	if want := (objectCount + 136) / 137; len(chunks) != want {
		t.Errorf("%d chunks, want %d", len(chunks), want)
	}
	// A token of one version is valid in every version.
	first := list(p.path(p.versions[0], ""), "limit=10")
	rest := list(path, "continue="+first.Metadata.Continue)
	equalObjects(t, "continued", append(slices.Clone(first.Items), rest.Items...), all.Items)

	var here, tenth []harness.Object
	for _, o := range all.Items {
		if o.Metadata.Namespace == namespace {
			here = append(here, o)
		}
		if o.Metadata.Labels["tenth"] == "7" {
			tenth = append(tenth, o)
		}
	}
	equalObjects(t, "one namespace", list(p.path(version, namespace), "").Items, here)
	equalObjects(t, "by label", list(path, "labelSelector=tenth%3D7").Items, tenth)
	selected, _, err := api.ListAll(ctx, path, "labelSelector=tenth%3D7", 13)
	harness.Check(t, err)
	equalObjects(t, "by label in chunks", selected, tenth)
	equalObjects(t, "by name", list(p.path(version, namespace), "fieldSelector=metadata.name%3D"+here[5].Metadata.Name).Items, here[5:6])

	r, err := api.Read(ctx, path, "", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1")
	harness.Check(t, err)
	metadata, err := r.List()
	harness.Check(t, err)
	equalObjects(t, "metadata", metadata.Items, all.Items)

	kubectl, err := cluster.Kubectl(ctx, "", "get", p.resource+"."+version+"."+p.group, "-A", "--chunk-size=150", "--no-headers")
	harness.Check(t, err)
	if rows := strings.Count(kubectl.Stdout, "\n"); rows != objectCount {
		t.Errorf("kubectl shows %d rows, want %d\n%s", rows, objectCount, kubectl.Stderr)
	}
}

// testWatch watches in every version during updates through every version and some deletions.
func (p project) testWatch(t *testing.T, ctx context.Context, all *harness.List, namespace, name func(int) string) {
	const deleteCount = 10
	watches := map[string]*harness.Watch{}
	for _, version := range p.versions {
		w := harness.StartWatch(t, ctx, api, p.path(version, ""), "resourceVersion="+all.Metadata.ResourceVersion)
		watches[version] = w
	}
	// by version and key: the resource version of the update
	seenBy := map[string]map[string]string{}
	reading, readCtx := errgroup.WithContext(ctx)
	for version, w := range watches {
		seen := map[string]string{}
		seenBy[version] = seen
		reading.Go(func() error {
			deleted := 0
			last := int64(0)
			for len(seen) < updateCount || deleted < deleteCount {
				e, err := w.Next(readCtx)
				if err != nil {
					return fmt.Errorf("version %s after %d updates and %d deletions: %w", version, len(seen), deleted, err)
				}
				var at int64
				if _, err := fmt.Sscan(e.Object.Metadata.ResourceVersion, &at); err != nil || at <= last {
					return fmt.Errorf("version %s: event at %s after one at %d", version, e.Object.Metadata.ResourceVersion, last)
				}
				last = at
				if e.Object.APIVersion != p.group+"/"+version {
					return fmt.Errorf("version %s: event in %s", version, e.Object.APIVersion)
				}
				switch e.Type {
				case "MODIFIED":
					seen[e.Object.Key()] = e.Object.Metadata.ResourceVersion
				case "DELETED":
					deleted++
				default:
					return fmt.Errorf("version %s: %s of %s", version, e.Type, e.Object.Key())
				}
			}
			return nil
		})
	}
	written := make([]string, updateCount) // resource versions
	harness.Check(t, harness.InParallel(ctx, updateCount, func(ctx context.Context, i int) error {
		o, err := api.Patch(ctx, p.path(p.versions[i%len(p.versions)], namespace(i))+"/"+name(i), `{"metadata":{"annotations":{"updated":"yes"}}}`)
		written[i] = o.Metadata.ResourceVersion
		return err
	}))
	harness.Check(t, harness.InParallel(ctx, deleteCount, func(ctx context.Context, i int) error {
		return api.Delete(ctx, p.path(p.versions[0], namespace(updateCount+i))+"/"+name(updateCount+i))
	}))
	harness.Check(t, reading.Wait())
	for version, seen := range seenBy {
		for i, want := range written {
			if got := seen[namespace(i)+"/"+name(i)]; got != want {
				t.Errorf("version %s: update of %s seen at %q, want %q", version, name(i), got, want)
			}
		}
	}
}

// testDelete deletes the definition: watchers receive the deletion of all objects, then the API is
// not served.
func (p project) testDelete(t *testing.T, ctx context.Context) {
	list, err := api.List(ctx, p.path(p.versions[0], ""), "")
	harness.Check(t, err)
	var watching errgroup.Group
	for _, version := range p.versions {
		w := harness.StartWatch(t, ctx, api, p.path(version, ""), "resourceVersion="+list.Metadata.ResourceVersion)
		watching.Go(func() error {
			for i := range list.Items {
				e, err := w.Next(ctx)
				if err != nil {
					return fmt.Errorf("version %s after %d deletions: %w", version, i, err)
				}
				if e.Type != "DELETED" {
					return fmt.Errorf("version %s: %s of %s, want DELETED", version, e.Type, e.Object.Key())
				}
			}
			return nil
		})
	}
	const definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"
	harness.Check(t, api.Delete(ctx, definitions+p.resource+"."+p.group))
	harness.Check(t, watching.Wait())
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, definitions+p.resource+"."+p.group, "", nil)
		return err == nil && r.Code == http.StatusNotFound, err
	}))
	for _, version := range p.versions {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, p.path(version, ""), "", nil)
			if err != nil {
				return false, err
			}
			return r.Code == http.StatusNotFound, r.Err()
		}))
	}
	// The project's other resources are still served.
	r, err := api.Do(ctx, http.MethodGet, "/apis/"+p.group, "", nil)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Errorf("the group %s was removed too: %v", p.group, r.Err())
	}
}

// atVersions returns the keys of objects with their resource versions.
func atVersions(objects []harness.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key()+"@"+o.Metadata.ResourceVersion)
	}
	return keys
}

func equalObjects(t *testing.T, what string, got, want []harness.Object) {
	t.Helper()
	harness.RequireEqual(t, what, atVersions(got), atVersions(want))
}

func name(i int) string { return fmt.Sprintf("object-%05d", i) }
