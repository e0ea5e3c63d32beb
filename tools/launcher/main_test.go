//go:build unix

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The test binary takes the place of the launcher: started as etcd, it launches.
func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "etcd" {
		main()
	}
	os.Exit(m.Run())
}

func copyOf(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	content, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "etcd")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	return exec.Command(path, "--data-dir=x")
}

func TestLauncher_StartsNeighbourUnderItsOwnName(t *testing.T) {
	dir := t.TempDir()
	shell, err := exec.LookPath("sh")
	if err != nil {
		t.Fatal(err)
	}
	if shell, err = filepath.EvalSymlinks(shell); err != nil {
		t.Fatal(err)
	}
	// A shell prints the name by which it was started, and that it does not know the flag.
	if err := os.Symlink(shell, filepath.Join(dir, "kube-apiserver")); err != nil {
		t.Fatal(err)
	}
	out, err := copyOf(t, dir).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "/etcd: ") {
		t.Errorf("output is %q (error %v), want that of a shell named etcd", out, err)
	}
}

func TestLauncher_WithoutNeighbour_NamesNextStep(t *testing.T) {
	out, err := copyOf(t, t.TempDir()).CombinedOutput()
	if err == nil || !strings.HasPrefix(string(out), "etcd: start ") || !strings.Contains(string(out), "unpack all files") {
		t.Errorf("output is %q (error %v)", out, err)
	}
}
