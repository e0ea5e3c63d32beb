package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

var commitTime = time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)

func TestPack_SameFilesInAnyOrder_MakeSameBytes(t *testing.T) {
	files := []file{{"strata", []byte("program"), 0o755}, {"licenses/b/LICENSE", []byte("b"), 0o644}, {"LICENSE", []byte("own"), 0o644}}
	first, err := pack("strata-1.2.3", files, commitTime)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(files)
	second, err := pack("strata-1.2.3", files, commitTime)
	if err != nil || !bytes.Equal(first, second) {
		t.Errorf("two archives of the same files differ (%v)", err)
	}
	uncompressed, err := gzip.NewReader(bytes.NewReader(first))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	archive := tar.NewReader(uncompressed)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if h.Uid != 0 || h.Gid != 0 || h.Uname != "" || !h.ModTime.Equal(commitTime) {
			t.Errorf("%s belongs to %d:%d %q at %v", h.Name, h.Uid, h.Gid, h.Uname, h.ModTime)
		}
		names = append(names, h.Name)
	}
	want := []string{"strata-1.2.3/", "strata-1.2.3/LICENSE", "strata-1.2.3/licenses/", "strata-1.2.3/licenses/b/", "strata-1.2.3/licenses/b/LICENSE", "strata-1.2.3/strata"}
	if !slices.Equal(names, want) {
		t.Errorf("the archive has %q, want %q", names, want)
	}
	if _, err := pack("x", append(files, files[0]), commitTime); err == nil {
		t.Error("two files of one path were packed")
	}
}

// modules writes modules in a temporary directory and returns their packages and build information.
func modules(t *testing.T, texts map[string]string) (*buildinfo.BuildInfo, []goPackage) {
	t.Helper()
	root := t.TempDir()
	for path, text := range texts {
		full := filepath.Join(root, path)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	standard := goPackage{ImportPath: "fmt", Standard: true, Dir: filepath.Join(root, "go/src/fmt"), Root: filepath.Join(root, "go")}
	p := goPackage{ImportPath: "example.com/m/forked/p", Dir: filepath.Join(root, "m/forked/p")}
	p.Module = &struct {
		Path    string
		Version string
		Dir     string
		Replace *struct{ Path, Version string }
	}{Path: "example.com/m", Version: "v1.0.0", Dir: filepath.Join(root, "m")}
	return &buildinfo.BuildInfo{Deps: []*debug.Module{{Path: "example.com/m", Version: "v1.0.0"}}}, []goPackage{standard, p}
}

func TestCollectLicences_TextsOfModulesAndCopiedCode_AreFound(t *testing.T) {
	info, packages := modules(t, map[string]string{
		"go/LICENSE": "go", "go/src/fmt/print.go": "", "m/LICENSE.txt": "m", "m/NOTICE": "n", "m/license.go": "package m", "m/forked/p/LICENSE": "p", "m/forked/p/p.go": "",
	})
	found, err := collectLicences(info, packages)
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range map[string]string{
		"go/LICENSE": "go", "example.com/m@v1.0.0/LICENSE.txt": "m", "example.com/m@v1.0.0/NOTICE": "n", "example.com/m@v1.0.0/forked/p/LICENSE": "p",
	} {
		if string(found[path]) != text {
			t.Errorf("%s is %q, want %q", path, found[path], text)
		}
		delete(found, path)
	}
	if len(found) > 0 {
		t.Errorf("further files: %v", found)
	}
}

func TestCollectLicences_Missing_Fails(t *testing.T) {
	for _, test := range []struct {
		name  string
		texts map[string]string
		want  string
	}{
		{"of a module", map[string]string{"go/LICENSE": "go", "m/NOTICE": "n", "m/forked/p/LICENSE": "p"}, "module example.com/m@v1.0.0 has no licence"},
		{"empty", map[string]string{"go/LICENSE": "go", "m/LICENSE": "\n", "m/forked/p/p.go": ""}, "module example.com/m@v1.0.0 has no licence"},
		{"of Go", map[string]string{"go/README": "go", "m/LICENSE": "m", "m/forked/p/p.go": ""}, "Go distribution has no licence"},
	} {
		t.Run(test.name, func(t *testing.T) {
			info, packages := modules(t, test.texts)
			if _, err := collectLicences(info, packages); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
	info, packages := modules(t, map[string]string{"go/LICENSE": "go", "m/LICENSE": "m", "m/forked/p/p.go": ""})
	info.Deps = append(info.Deps, &debug.Module{Path: "example.com/other", Version: "v1.0.0"})
	if _, err := collectLicences(info, packages); err == nil || !strings.Contains(err.Error(), "example.com/other") {
		t.Errorf("error %v for a module of the binary without packages", err)
	}
}

func TestBillOfMaterials_HasEveryModule(t *testing.T) {
	const sum = "h1:K6j46C81hXtZQfuX60cVWQFBJahKSE2gfRbNuvr5bFs="
	info := &buildinfo.BuildInfo{GoVersion: "go1.26.0", Path: "example.com/server/cmd/kubectl-strata", Main: debug.Module{Path: "github.com/stratakube/strata/server"}, Deps: []*debug.Module{
		{Path: "cel.dev/expr", Version: "v0.25.2", Sum: sum},
		{Path: "k8s.io/api", Version: "v0.0.0", Replace: &debug.Module{Path: "k8s.io/api", Version: "v0.37.2", Sum: sum}},
		{Path: "github.com/stratakube/strata", Version: "(devel)"},
	}}
	made, err := billOfMaterials(info, "1.2.3", "linux/arm64", []byte("program"), commitTime)
	if err != nil {
		t.Fatal(err)
	}
	again, err := billOfMaterials(info, "1.2.3", "linux/arm64", []byte("program"), commitTime)
	if err != nil || !bytes.Equal(made, again) {
		t.Errorf("two bills of the same binary differ (%v)", err)
	}
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(made), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range *bom.Components {
		got = append(got, c.PackageURL)
	}
	want := []string{"pkg:golang/std@go1.26.0", "pkg:golang/cel.dev/expr@v0.25.2", "pkg:golang/k8s.io/api@v0.37.2",
		"pkg:golang/github.com/stratakube/strata@v1.2.3"}
	if !slices.Equal(got, want) || bom.Metadata.Component.Name != "kubectl-strata" || bom.Metadata.Component.Version != "v1.2.3" || bom.Metadata.Timestamp != "2026-11-22T10:00:00Z" {
		t.Errorf("bill of %v %v %v: %q, want %q", bom.Metadata.Component.Name, bom.Metadata.Component.Version, bom.Metadata.Timestamp, got, want)
	}
	npm, err := npmComponents(filepath.Join("..", ".."))
	if err != nil || len(npm) != 1 || !strings.HasPrefix(npm[0].PackageURL, "pkg:npm/uplot@1.") || (*npm[0].Licenses)[0].License.ID != "MIT" {
		t.Fatalf("the embedded packages of npm: %+v (%v), want uplot", npm, err)
	}
	with, err := billOfMaterials(info, "1.2.3", "linux/arm64", []byte("program"), commitTime, npm...)
	if err != nil || !bytes.Contains(with, []byte(npm[0].PackageURL)) {
		t.Errorf("the bill has no %s (%v)", npm[0].PackageURL, err)
	}
	info.Deps[0].Sum = ""
	if _, err := billOfMaterials(info, "1.2.3", "linux/arm64", nil, commitTime); err == nil {
		t.Error("a module without a checksum was accepted")
	}
}

func TestWriteProvenance_NamesEveryFileAndCommit(t *testing.T) {
	o := options{version: "1.2.3", platforms: []string{"linux/amd64"}, out: t.TempDir()}
	for _, name := range []string{"b.tar.gz", "a.tar.gz"} {
		if err := os.WriteFile(filepath.Join(o.out, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	const commit = "0123456789abcdef0123456789abcdef01234567"
	if err := writeProvenance(o, commit); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(o.out, provenanceFile))
	if err != nil {
		t.Fatal(err)
	}
	var s statement
	if err := json.Unmarshal(text, &s); err != nil {
		t.Fatal(err)
	}
	want := []resource{
		{Name: "a.tar.gz", Digest: map[string]string{"sha256": fmt.Sprintf("%x", sha256.Sum256([]byte("a.tar.gz")))}},
		{Name: "b.tar.gz", Digest: map[string]string{"sha256": fmt.Sprintf("%x", sha256.Sum256([]byte("b.tar.gz")))}},
	}
	if !reflect.DeepEqual(s.Subject, want) {
		t.Errorf("subjects %v, want %v", s.Subject, want)
	}
	build := s.Predicate.BuildDefinition
	if len(build.Dependencies) != 1 || build.Dependencies[0].Digest["gitCommit"] != commit || build.ExternalParameters["version"] != "1.2.3" {
		t.Errorf("definition of the build %+v, want commit %s and version 1.2.3", build, commit)
	}
}

func TestRelease_InvalidVersion_IsRefused(t *testing.T) {
	for _, version := range []string{"", "v1.2.3", "1.2", "1.2.3+build", "01.2.3", "1.2.3 -X x=y"} {
		if err := release(options{version: version, out: t.TempDir(), root: "../.."}); err == nil || !strings.Contains(err.Error(), "VERSION=") {
			t.Errorf("version %q: error %v", version, err)
		}
	}
}

// TestModulesMatch_OtherVersionOfEngine_IsRefused: importers of kube/ get the engine that its
// go.mod requires, the changelog begins with the release, and a patch version keeps the API.
func TestModulesMatch_OtherVersionOfEngine_IsRefused(t *testing.T) {
	root := t.TempDir()
	for _, args := range [][]string{{"init", "-q"}, {"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-q", "--allow-empty", "-m", "first"}} {
		if out, err := exec.Command("git", append([]string{"-C", root}, args...)...).CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
	}
	if err := os.Mkdir(filepath.Join(root, "kube"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		newest, version string
		want            bool
	}{
		{"1.2.3] - Kubernetes v1.37.2\n", "1.2.3", true}, {"1.2.4]\n", "1.2.4", false}, {"9.9.9]\n", "9.9.9", false},
		{"1.2.3]\n\n### Incompatible changes\n", "1.2.3", false}, {"1.3.0]\n\n### Incompatible changes\n", "1.3.0", true},
		{"Unreleased]\n", "1.2.3", false}, {"Unreleased]\n", "1.2.4-rc.1", true},
	} {
		changes := "# Changelog\n\nAll releases.\n\n## [" + test.newest + "\n## [1.2.2]\n\n### Incompatible changes\n"
		engine := "1.2.3"
		if test.version == "1.3.0" {
			engine = test.version
		}
		mod := "module github.com/stratakube/strata/kube\n\nrequire (\n\tgithub.com/stratakube/strata v" + engine + "\n\texample.com/m v9.9.9\n)\n"
		for path, text := range map[string]string{"CHANGELOG.md": changes, "kube/go.mod": mod} {
			if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := modulesMatch(options{root: root, version: test.version}); (err == nil) != test.want {
			t.Errorf("%s after a section of %s: %v", test.version, test.newest, err)
		}
	}
}

// TestModulesMatch_WithoutTags_IsNotSigned: a signed release is one that importers reach.
func TestModulesMatch_WithoutTags_IsNotSigned(t *testing.T) {
	root := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		args = append([]string{"-C", root, "-c", "user.name=t", "-c", "user.email=t@example.com"}, args...)
		if out, err := exec.Command("git", args...).CombinedOutput(); err != nil {
			t.Fatal(err, string(out))
		}
	}
	git("init", "-q")
	for path, text := range map[string]string{
		"CHANGELOG.md": "## [1.2.3] - Kubernetes v1.37.2\n",
		"kube/go.mod":  "module github.com/stratakube/strata/kube\n\nrequire github.com/stratakube/strata v1.2.3\n",
	} {
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	git("add", ".")
	git("commit", "-q", "-m", "first")
	unsigned, signed := options{root: root, version: "1.2.3"}, options{root: root, version: "1.2.3", key: "key"}
	for _, tag := range []string{"", "v1.2.3", "kube/v1.2.3"} {
		if tag != "" {
			git("tag", tag)
		}
		if err := modulesMatch(unsigned); err != nil {
			t.Errorf("after the tag %q, without a key: %v", tag, err)
		}
		if err := modulesMatch(signed); err == nil || !strings.Contains(err.Error(), "has no tag") {
			t.Errorf("after the tag %q, with a key: %v", tag, err)
		}
	}
	git("tag", "stratatest/v1.2.3")
	if err := modulesMatch(signed); err != nil {
		t.Errorf("with all tags: %v", err)
	}
}

// TestEmpty_ExistingFiles_AreRemoved: an archive of another version must not stand beside the new.
func TestEmpty_ExistingFiles_AreRemoved(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "archive")
	for range 2 {
		if err := empty(dir); err != nil {
			t.Fatal(err)
		}
		if found, err := os.ReadDir(dir); err != nil || len(found) > 0 {
			t.Fatalf("%v, %v", found, err)
		}
		if err := os.WriteFile(filepath.Join(dir, "strata-envtest-0.0.0-dev.tar.gz"), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
