package main

import (
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// copyPackage copies a package with its test data, and the packages that it imports as far as they
// are copied too. Licence notices and all else in the files are unchanged, except import paths and
// the changes of patches.
func (t *tree) copyPackage(pkg string) error {
	if t.copied[pkg] {
		return nil
	}
	t.copied[pkg] = true
	source, err := t.sourceOf(pkg)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(source)
	if err != nil {
		return err
	}
	dir := t.dirOf(pkg)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, entry := range entries {
		from, to := filepath.Join(source, entry.Name()), filepath.Join(dir, entry.Name())
		switch {
		case entry.IsDir():
			if err := copyData(from, to); err != nil {
				return err
			}
		case strings.HasSuffix(entry.Name(), ".go"):
			if err := t.copySource(pkg, from, to); err != nil {
				return err
			}
		default:
			if err := copyFile(from, to); err != nil {
				return err
			}
		}
	}
	return nil
}

// copySource copies a Go file of pkg and the packages that it imports.
func (t *tree) copySource(pkg, from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	rewritten, imports, err := rewriteImports(string(text), isCopied, t.path)
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if rewritten, err = patch(rewritten, patches[pkg+"/"+filepath.Base(from)]); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if err := os.WriteFile(to, []byte(rewritten), 0o644); err != nil {
		return err
	}
	for _, imported := range imports {
		if err := t.copyPackage(imported); err != nil {
			return err
		}
	}
	return nil
}

// rewriteImports replaces each import path that match selects by to(path), and returns the paths it
// has replaced.
func rewriteImports(text string, match func(string) bool, to func(string) string) (string, []string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, parser.ImportsOnly)
	if err != nil {
		return "", nil, err
	}
	var out strings.Builder
	var replaced []string
	written := 0
	for _, spec := range file.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return "", nil, err
		}
		if !match(path) {
			continue
		}
		replaced = append(replaced, path)
		start, end := files.Position(spec.Path.Pos()).Offset, files.Position(spec.Path.End()).Offset
		out.WriteString(text[written:start] + strconv.Quote(to(path)))
		written = end
	}
	out.WriteString(text[written:])
	return out.String(), replaced, nil
}

// copyData copies a directory that has no Go files, such as test data; of other directories
// nothing: they are packages.
func copyData(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if strings.HasSuffix(entry.Name(), ".go") {
			return nil
		}
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, entry := range entries {
		copyEntry := copyFile
		if entry.IsDir() {
			copyEntry = copyData
		}
		if err := copyEntry(filepath.Join(from, entry.Name()), filepath.Join(to, entry.Name())); err != nil {
			return err
		}
	}
	return nil
}

// copyAll copies a directory with all below it.
func copyAll(from, to string) error {
	return filepath.WalkDir(from, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, file)
		if err != nil {
			return err
		}
		if entry.IsDir() {
			return os.MkdirAll(filepath.Join(to, rel), 0o755)
		}
		return copyFile(file, filepath.Join(to, rel))
	})
}

// replaceCopy copies a directory with all below it in place of an earlier copy.
func replaceCopy(from, to string) error { return errors.Join(os.RemoveAll(to), copyAll(from, to)) }

// copyFile copies a file. Modules contain no permissions: a file that begins like a program becomes
// executable, except files whose names mark them as not executable.
func copyFile(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	mode := os.FileMode(0o644)
	if strings.HasPrefix(string(text), "#!") && !strings.Contains(filepath.Base(from), "not-executable") {
		mode = 0o755
	}
	return os.WriteFile(to, text, mode)
}

// edit inserts text before the only occurrence of an anchor.
type edit struct{ before, insert string }

// patch applies edits, and imports package apiserver of server/ as strata if there are any.
func patch(text string, edits []edit) (string, error) {
	if len(edits) == 0 {
		return text, nil
	}
	imports, rest, ok := strings.Cut(text, "\n)\n")
	if !ok {
		return "", errors.New("no list of imports: upstream has changed, and the patch must follow")
	}
	return insert(imports+"\n\n\tstrata \"github.com/stratakube/strata/server/internal/apiserver\"\n)\n"+rest, edits)
}

// insert applies edits.
func insert(text string, edits []edit) (string, error) {
	for _, e := range edits {
		if count := strings.Count(text, e.before); count != 1 {
			return "", fmt.Errorf("%d occurrences of %q, want 1: upstream has changed, and the patch must follow", count, e.before)
		}
		text = strings.Replace(text, e.before, e.insert+e.before, 1)
	}
	return text, nil
}

// patches are the edits, by file, that attach the engine that STRATA_ENGINE names to the servers
// that tests start, where `strata apiserver` attaches it. Close follows the end of the server.
var patches = map[string][]edit{
	"k8s.io/kubernetes/cmd/kube-apiserver/app/testing/testserver.go": {
		{"\tvar errCh chan error", attachment("return result, err")},
		{"\t\tos.RemoveAll(result.TmpDir)", "\t\tstrataEngine.Close()\n"},
		{"\tconfig, err := app.NewConfig(completedOptions)", "\tstrataEngine.Options(completedOptions.Etcd)\n"},
		{"\tcompleted, err := config.Complete()", "\tif err := strataEngine.Chain(config); err != nil {\n\t\treturn result, err\n\t}\n"},
		{"\terrCh = make(chan error)", "\tstrataEngine.Mount(server)\n"},
	},
	"k8s.io/kubernetes/pkg/controlplane/apiserver/samples/generic/server/testing/testserver.go": {
		{"\tcontrolplaneapiserver \"k8s.io/kubernetes/pkg/controlplane/apiserver/options\"\n",
			"\t\"k8s.io/kubernetes/cmd/kube-apiserver/app\"\n\t\"k8s.io/kubernetes/pkg/controlplane\"\n"},
		{"\tvar errCh chan error", attachment("return result, err")},
		{"\t\tos.RemoveAll(result.TmpDir)", "\t\tstrataEngine.Close()\n"},
		{"\tconfig, err := server.NewConfig(completedOptions)", "\tstrataEngine.Options(completedOptions.Etcd)\n"},
		// The servers are those of kube-apiserver without the registries of containers, which
		// controlplane.Config adds.
		{"\tcompleted, err := config.Complete()", "\tchain := &app.Config{Aggregator: config.Aggregator, ApiExtensions: config.APIExtensions,\n" +
			"\t\tKubeAPIs: &controlplane.Config{ControlPlane: *config.ControlPlane}}\n" +
			"\tif err := strataEngine.Chain(chain); err != nil {\n\t\treturn result, err\n\t}\n"},
		{"\terrCh = make(chan error)", "\tstrataEngine.Mount(s)\n"},
	},
	"k8s.io/kubernetes/test/integration/framework/test_server.go": {
		{"\tcertDir, err := os.MkdirTemp(", attachment("t.Fatal(err)")},
		{"\tgenericConfig, versionedInformers, storageFactory, err := ", "\tstrataEngine.Options(completedOptions.Etcd)\n"},
		{"\tkubeAPIServer, err := kubeAPIServerConfig.Complete()", "\tif err := strataEngine.ControlPlane(kubeAPIServerConfig); err != nil {\n\t\tt.Fatal(err)\n\t}\n"},
		{"\t\tif err := os.RemoveAll(certDir)", "\t\tstrataEngine.Close()\n"},
	},
	"k8s.io/kubernetes/test/integration/etcd/server.go": {
		{"\tcertDir, err := os.MkdirTemp(", attachment("t.Fatal(err)")},
		{"\tconfig, err := app.NewConfig(completedOptions)", "\tstrataEngine.Options(completedOptions.Etcd)\n"},
		{"\tcompleted, err := config.Complete()", "\tif err := strataEngine.Chain(config); err != nil {\n\t\tt.Fatal(err)\n\t}\n"},
		{"\terrCh := make(chan error)", "\tstrataEngine.Mount(kubeAPIServer)\n"},
		{"\t\trawClient.Close()", "\t\tstrataEngine.Close()\n"},
	},
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/testing/testserver.go": {
		{"\tvar errCh chan error", attachment("return result, err")},
		{"\t\t\tos.RemoveAll(result.TmpDir)", "\t\t\tstrataEngine.Close()\n"},
		{"\tconfig, err := s.Config()", "\tstrataEngine.Options(s.RecommendedOptions.Etcd)\n"},
		{"\tcompletedConfig := config.Complete()", "\tsetDefinitions, err := strataEngine.Extensions(config)\n\tif err != nil {\n\t\treturn result, err\n\t}\n"},
		{"\terrCh = make(chan error)", "\tsetDefinitions(server.Informers.Apiextensions().V1().CustomResourceDefinitions().Informer())\n"},
	},
}

// attachment returns the statements that make strataEngine; onError is the statement that handles
// an error.
func attachment(onError string) string {
	return "\tstrataEngine, err := strata.AttachmentFromEnvironment()\n\tif err != nil {\n\t\t" + onError + "\n\t}\n"
}
