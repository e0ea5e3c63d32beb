package datadir

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestWriteFile_ReplacesWholeFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	testcheck.NoError(t, os.WriteFile(path, []byte("a longer text than the next"), 0o644))
	testcheck.NoError(t, WriteFile(path, []byte("next")))
	got, err := os.ReadFile(path)
	if err != nil || string(got) != "next" {
		t.Errorf("read %q, %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v; want 0600", info.Mode(), err)
	}
}

func TestWriteFile_Failed_LeavesNoTemporaryFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	if err := os.Mkdir(path, 0o700); err != nil { // a file cannot replace a directory
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("x")); err == nil {
		t.Fatal("wrote over a directory")
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("%v, %v; want only the directory", entries, err)
	}
}
