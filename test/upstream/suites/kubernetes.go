package main

import (
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// integrationRoots are the directories below k8s.io/kubernetes/test/integration whose packages are
// run, with those below.
var integrationRoots = []string{
	"apiserver", "apimachinery", "auth", "client", "controlplane", "dryrun", "etcd", "garbagecollector", "metrics", "namespace",
	"quota", "secrets", "serviceaccount", "staleness", "storageversion", "storageversionmigrator",
}

// integrationTimeout bounds one run of one package; the slowest takes a third of it on two
// processors.
const integrationTimeout = 40 * time.Minute

var kubernetesSuite = Suite{
	Name:  "kubernetes",
	Title: "Kubernetes: integration tests",
	About: "The packages below k8s.io/kubernetes/test/integration that test the API server and what stands directly on it. " +
		"One binary for each package runs on both engines.",
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		roots := make([]string, len(integrationRoots))
		for i, root := range integrationRoots {
			roots[i] = path.Join("k8s.io/kubernetes/test/integration", root)
		}
		return integrationUnits(ctx, env, "k8s.io/kubernetes", roots)
	},
}

var extensionsSuite = Suite{
	Name:  "apiextensions",
	Title: "Kubernetes: custom resources",
	About: "The integration tests of k8s.io/apiextensions-apiserver, against a server of custom resources that stands alone.",
	Quick: true,
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		return integrationUnits(ctx, env, "k8s.io/apiextensions-apiserver", []string{"k8s.io/apiextensions-apiserver/test/integration"})
	},
}

// integrationUnits copies the test packages below the roots and returns a unit for each.
func integrationUnits(ctx context.Context, env *Env, mod string, roots []string) ([]Unit, error) {
	tree, err := newTree(ctx, env, path.Base(mod))
	if err != nil {
		return nil, err
	}
	var packages []string
	for _, root := range roots {
		found, err := tree.testPackages(root)
		if err != nil {
			return nil, err
		}
		packages = append(packages, found...)
	}
	etcd, err := tree.prepare(ctx, packages)
	if err != nil {
		return nil, err
	}
	var units []Unit
	for _, pkg := range packages {
		name := strings.TrimPrefix(pkg, mod+"/")
		// Tests compare the name of the program: it is the one that go test would choose.
		binary := filepath.Join(env.Bin, "tests", filepath.FromSlash(pkg), path.Base(pkg)+".test")
		tests := &goTest{binary: binary, dir: tree.dirOf(pkg), timeout: integrationTimeout}
		units = append(units, Unit{
			Name:   name,
			Source: mod + " " + tree.modules[mod].Version,
			Quick:  quickTests[pkg],

			Exclusive:     slices.Contains(exclusiveTests, pkg),
			StartsServers: true,
			Build: func(ctx context.Context) error {
				return env.goRun(ctx, tree.dir, "test", "-mod=mod", "-c", "-vet=off", "-ldflags=-s -w", "-o", binary, tree.path(pkg))
			},
			Run: func(ctx context.Context, engine Engine, only []string, log string) (Verdicts, error) {
				server, err := startEtcd(ctx, etcd)
				if err != nil {
					return nil, err
				}
				defer server.stop()
				run := *tests
				run.environ = []string{
					"STRATA_ENGINE=" + string(engine),
					"KUBE_INTEGRATION_ETCD_URL=" + server.url,
					"PATH=" + filepath.Dir(etcd) + string(os.PathListSeparator) + os.Getenv("PATH"),
				}
				return run.run(ctx, env, only, log)
			},
			Clean: func() { os.Remove(binary) },
		})
	}
	return units, nil
}

// exclusiveTests are the packages whose tests listen on ports or abstract sockets with fixed names.
var exclusiveTests = []string{
	"k8s.io/kubernetes/test/integration/apiserver/tracing",
	"k8s.io/kubernetes/test/integration/controlplane/transformation",
	"k8s.io/kubernetes/test/integration/storageversionmigrator",
}

// quickTests are the tests of the subset, by package: reads, watches and writes of custom resources
// in all encodings, while their definitions change.
var quickTests = map[string][]string{
	"k8s.io/apiextensions-apiserver/test/integration": {
		"TestCBORServingEnablement", "TestCBORStorageEnablement", "TestChangeCRD", "TestCrossNamespaceListWatch",
		"TestCustomResourceItemsValidation", "TestFieldSelectorDropFields", "TestFieldSelectorOpenAPI", "TestInvalidObjectMetaInStorage",
		"TestNamespaceScopedCRUD", "TestClusterScopedCRUD", "TestPatch", "TestPruningCreate", "TestPruningFromStorage", "TestSelectableFields",
		"TestSameNameDiffNamespace", "TestStoragedVersionInNamespacedCRDStatus", "TestTableGet", "TestVersionedNamespacedScopedCRD", "TestYAML",
	},
}

// tree is a module below bin/suites with copies of packages of upstream. The copy of a package has
// the original's import path below treeModule, which lies in server/, so that copies may import its
// internal packages.
type tree struct {
	env     *Env
	dir     string
	modules map[string]module // by path: the modules that packages are copied from
	copied  map[string]bool   // import paths
}

const treeModule = "github.com/stratakube/strata/server/suites"

// copies are the packages that are replaced by copies wherever a copied package imports them:
// packages that start servers, and their importers.
var copies = []string{
	"k8s.io/kubernetes/test/integration",
	"k8s.io/kubernetes/cmd/kube-apiserver/app/testing",
	"k8s.io/kubernetes/pkg/controlplane/apiserver/samples/generic/server/testing",
	"k8s.io/apiextensions-apiserver/test/integration",
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/testing",
}

// isCopied reports whether the package, or one above it, is in copies.
func isCopied(pkg string) bool {
	return slices.ContainsFunc(copies, func(c string) bool { return pkg == c || strings.HasPrefix(pkg, c+"/") })
}

func newTree(ctx context.Context, env *Env, name string) (*tree, error) {
	t := &tree{env: env, dir: filepath.Join(env.Bin, "tree", name), modules: map[string]module{}, copied: map[string]bool{}}
	for _, path := range []string{"k8s.io/kubernetes", "k8s.io/apiextensions-apiserver", "k8s.io/api"} {
		m, err := env.serverModule(ctx, path)
		if err != nil {
			return nil, err
		}
		t.modules[path] = m
	}
	return t, os.MkdirAll(t.dir, 0o755)
}

// path returns the import path of the copy of a package.
func (t *tree) path(pkg string) string { return treeModule + "/" + pkg }

// dirOf returns the directory of the copy of a package.
func (t *tree) dirOf(pkg string) string { return filepath.Join(t.dir, filepath.FromSlash(pkg)) }

// sourceOf returns the directory of a package of upstream.
func (t *tree) sourceOf(pkg string) (string, error) {
	for path, m := range t.modules {
		if rest, ok := strings.CutPrefix(pkg, path+"/"); ok {
			return filepath.Join(m.Dir, filepath.FromSlash(rest)), nil
		}
	}
	return "", fmt.Errorf("package %s is of none of the modules %v", pkg, slices.Sorted(maps.Keys(t.modules)))
}

// testPackages returns the import paths of the packages at and below root that have tests, sorted.
func (t *tree) testPackages(root string) ([]string, error) {
	dir, err := t.sourceOf(root)
	if err != nil {
		return nil, err
	}
	found := map[string]bool{}
	err = filepath.WalkDir(dir, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		// A file may hold benchmarks only.
		if rel, err := filepath.Rel(dir, filepath.Dir(file)); err != nil {
			return err
		} else if strings.Contains(string(text), "\nfunc Test") && strings.Contains(strings.ReplaceAll(string(text), "func TestMain(", ""), "\nfunc Test") {
			found[path.Join(root, filepath.ToSlash(rel))] = true
		}
		return nil
	})
	return slices.Sorted(maps.Keys(found)), err
}

// prepare copies the packages and the copied packages that they import, writes the module, and
// builds etcd, whose path it returns.
func (t *tree) prepare(ctx context.Context, packages []string) (etcd string, err error) {
	// Files of an earlier run may be of another version. Build results are cached by content.
	for _, path := range []string{"k8s.io", "etcd", "go.mod", "go.sum"} {
		if err := os.RemoveAll(filepath.Join(t.dir, path)); err != nil {
			return "", err
		}
	}
	for _, pkg := range packages {
		if err := t.copyPackage(pkg); err != nil {
			return "", err
		}
	}
	// The tests of package etcd read fixtures where Kubernetes' repository has them.
	staging := filepath.Join(t.dir, "k8s.io/kubernetes/staging/src/k8s.io")
	if err := os.MkdirAll(staging, 0o755); err != nil {
		return "", err
	}
	if err := os.Symlink(t.modules["k8s.io/api"].Dir, filepath.Join(staging, "api")); err != nil {
		return "", err
	}
	if err := os.MkdirAll(filepath.Join(t.dir, "etcd"), 0o755); err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(t.dir, "etcd/main.go"), []byte(etcdMain), 0o644); err != nil {
		return "", err
	}
	if err := t.writeModule(ctx); err != nil {
		return "", err
	}
	// Versions follow from server/go.mod and upstream's go.mod files; this writes them down.
	paths := []string{treeModule + "/etcd"}
	for _, pkg := range packages {
		paths = append(paths, t.path(pkg))
	}
	if _, err := t.env.goOutput(ctx, t.dir, append([]string{"list", "-mod=mod", "-test", "-deps", "-f", "{{if .Error}}{{.Error}}{{end}}"}, paths...)...); err != nil {
		return "", err
	}
	etcd = filepath.Join(t.dir, "programs", "etcd")
	return etcd, t.env.goRun(ctx, t.dir, "build", "-mod=mod", "-ldflags=-s -w", "-o", etcd, treeModule+"/etcd")
}

// etcdMain is an etcd, which the integration tests start by themselves, and with the argument
// "loopback" one that prints its URL when it serves.
const etcdMain = `package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"go.etcd.io/etcd/server/v3/etcdmain"

	"github.com/stratakube/strata/server/internal/embedetcd"
)

func main() {
	if len(os.Args) < 2 || os.Args[1] != "loopback" {
		etcdmain.Main(os.Args)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cmd := embedetcd.NewCommand()
	cmd.SetArgs(os.Args[2:])
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
`

// writeModule writes go.mod and go.sum: those of server/, with the modules of this repository as
// they are on disk.
func (t *tree) writeModule(ctx context.Context) error {
	server := filepath.Join(t.env.Root, "server")
	text, err := os.ReadFile(filepath.Join(server, "go.mod"))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(t.dir, "go.mod"), text, 0o644); err != nil {
		return err
	}
	sums := map[string]bool{}
	for _, file := range []string{"server/go.sum", "test/upstream/conformance/go.sum"} {
		text, err := os.ReadFile(filepath.Join(t.env.Root, file))
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(text)) {
			sums[line] = true
		}
	}
	if err := os.WriteFile(filepath.Join(t.dir, "go.sum"), []byte(strings.Join(slices.Sorted(maps.Keys(sums)), "")), 0o644); err != nil {
		return err
	}
	const own = "github.com/stratakube/strata"
	return t.env.goRun(ctx, t.dir, "mod", "edit", "-module="+treeModule,
		"-require="+own+"/server@v0.0.0",
		"-replace="+own+"="+t.env.Root, "-replace="+own+"/kube="+filepath.Join(t.env.Root, "kube"), "-replace="+own+"/server="+server)
}
