package main

import (
	"os"
	"testing"

	"golang.org/x/mod/modfile"
)

// TestModuleVersions_EqualServerGoMod: the tests and the controllers are of the release that the
// server is built from, and shared modules are compiled once: a module that both go.mod files name
// has the same version in both.
func TestModuleVersions_EqualServerGoMod(t *testing.T) {
	ours, server := versions(t, "go.mod"), versions(t, "../../../server/go.mod")
	if ours["k8s.io/kubernetes"] == "" {
		t.Error("k8s.io/kubernetes is not pinned")
	}
	for path, version := range ours {
		if want := server[path]; want != "" && version != want {
			t.Errorf("%s %s: the server has %s", path, version, want)
		}
	}
}

// versions returns the version of each module that a go.mod file requires or replaces by another
// version.
func versions(t *testing.T, path string) map[string]string {
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file, err := modfile.Parse(path, data, nil)
	if err != nil {
		t.Fatal(err)
	}
	versions := map[string]string{}
	for _, r := range file.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	for _, r := range file.Replace {
		if r.New.Version != "" {
			versions[r.Old.Path] = r.New.Version
		}
	}
	return versions
}
