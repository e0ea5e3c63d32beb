package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// informerTimeout bounds a run: tests of client-go sleep for seconds.
const informerTimeout = 10 * time.Minute

// informerSource is a test file of package informer: the source of pods that client-go's tests use,
// and the unexported names of their package.
//
//go:embed adapters/informer_source.txt
var informerSource []byte

// sourceTests are tests of what an informer of the engine does not have, and the functions that
// informerSource defines. The rest of client-go's file is unchanged.
var sourceTests = []string{
	"TestResyncCheckPeriod",             // fields of the processor
	"TestSharedInformerWatchDisruption", // a list and a watch of a Reflector, on its clock
	"TestSharedInformerErrorHandling",   // the error of a list
	"eventHandlerCount", "isStarted", "isRegistered",
}

var informerSuite = Suite{
	Name:  "informer",
	Title: "client-go: tests of shared informers",
	About: "`shared_informer_test.go` of k8s.io/client-go/tools/cache, compiled into package `kube/informer`: the source of pods is a mirror. " +
		"Three tests are left out, which test the fields of client-go's processor, and the list and watch of its Reflector.",
	Quick:   true,
	Engines: []Engine{Strata},
	Prepare: func(ctx context.Context, env *Env) ([]Unit, error) {
		client, err := env.serverModule(ctx, "k8s.io/client-go")
		if err != nil {
			return nil, err
		}
		tree, err := newTree(ctx, env, "informer")
		if err != nil {
			return nil, err
		}
		dir, binary := filepath.Join(env.Root, "kube", "informer"), filepath.Join(env.Bin, "tests", "informer.test")
		tests := &goTest{binary: binary, dir: dir, timeout: informerTimeout}
		return []Unit{{
			Name:   "tools/cache/shared_informer_test.go",
			Source: "k8s.io/client-go " + client.Version,
			Quick:  []string{mainTest},
			Build: func(ctx context.Context) error {
				overlay, err := informerOverlay(tree, dir, filepath.Join(client.Dir, "tools/cache/shared_informer_test.go"))
				if err != nil {
					return err
				}
				if err := tree.writeModule(ctx); err != nil {
					return err
				}
				return env.goRun(ctx, tree.dir, "test", "-mod=mod", "-race", "-c", "-vet=off", "-overlay", overlay, "-o", binary, "github.com/stratakube/strata/kube/informer")
			},
			Run: func(ctx context.Context, _ Engine, only []string, log string) (Verdicts, error) {
				return tests.run(ctx, env, only, log)
			},
			Clean: func() { os.Remove(binary) },
		}}, nil
	},
}

// informerOverlay writes the files that replace the tests of package informer in dir, and the list
// of them for go, whose path it returns.
func informerOverlay(t *tree, dir, upstream string) (string, error) {
	text, err := os.ReadFile(upstream)
	if err != nil {
		return "", err
	}
	adapted, err := adaptInformerTests(string(text))
	if err != nil {
		return "", fmt.Errorf("%s: %w", upstream, err)
	}
	replace := map[string]string{}
	own, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return "", err
	}
	for _, file := range own {
		replace[file] = ""
	}
	for name, content := range map[string][]byte{"shared_informer_test.go": []byte(adapted), "source_test.go": informerSource} {
		file := filepath.Join(t.dir, name)
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return "", err
		}
		replace[filepath.Join(dir, name)] = file
	}
	list, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(t.dir, "overlay.json")
	return overlay, os.WriteFile(overlay, list, 0o644)
}

// adaptInformerTests moves client-go's test file into package informer: without the functions of
// sourceTests, and with the names of informerSource.
func adaptInformerTests(text string) (string, error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "", text, parser.ParseComments)
	if err != nil {
		return "", err
	}
	type span struct{ from, to int }
	var cut []span
	left := slices.Clone(sourceTests)
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || !slices.Contains(sourceTests, f.Name.Name) {
			continue
		}
		left = slices.DeleteFunc(left, func(name string) bool { return name == f.Name.Name })
		from := f.Pos()
		if f.Doc != nil {
			from = f.Doc.Pos()
		}
		cut = append(cut, span{files.Position(from).Offset, files.Position(f.End()).Offset})
	}
	if len(left) > 0 {
		return "", fmt.Errorf("no functions %q: upstream has changed, and the list must follow", left)
	}
	for _, c := range slices.Backward(cut) {
		text = text[:c.from] + text[c.to:]
	}
	for _, change := range []struct{ from, to string }{
		{"\npackage cache\n", "\npackage informer\n"},
		{" NewSharedInformer(", " newSharedInformer("},
		{"*fcache.FakeControllerSource", "*fakeControllerSource"},
	} {
		if !strings.Contains(text, change.from) {
			return "", fmt.Errorf("no %q: upstream has changed, and the change must follow", change.from)
		}
		text = strings.ReplaceAll(text, change.from, change.to)
	}
	return withoutUnusedImports(text, file)
}

var majorVersion = regexp.MustCompile(`/v[0-9]+$`)

// withoutUnusedImports removes the imports of file whose names text does not use.
func withoutUnusedImports(text string, file *ast.File) (string, error) {
	for _, spec := range file.Imports {
		imported, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			return "", err
		}
		name, line := path.Base(majorVersion.ReplaceAllString(imported, "")), spec.Path.Value
		if spec.Name != nil {
			name, line = spec.Name.Name, spec.Name.Name+" "+spec.Path.Value
		}
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(strings.Replace(text, line, "", 1)) {
			continue
		}
		if !strings.Contains(text, "\t"+line+"\n") {
			return "", errors.New("no import " + line)
		}
		text = strings.Replace(text, "\t"+line+"\n", "", 1)
	}
	return text, nil
}
