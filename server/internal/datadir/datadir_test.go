package datadir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func mustOpen(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Open(path)
	testcheck.NoError(t, err)
	return d
}

func TestOpen_MissingDirectory_IsNewOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "below", "data")
	for i, wantNew := range []bool{true, false, false} {
		d := mustOpen(t, path)
		if d.New != wantNew {
			t.Errorf("open %d: New is %t", i, d.New)
		}
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
			t.Errorf("open %d: mode %v (%v), want 0700", i, info.Mode(), err)
		}
		testcheck.NoError(t, d.Close())
	}
}

func TestOpen_EmptyDirectory_IsNew(t *testing.T) {
	d := mustOpen(t, t.TempDir())
	defer d.Close()
	if !d.New {
		t.Error("an empty directory is not new")
	}
}

func TestOpen_AccessibleToOthers_RestrictsModes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	d := mustOpen(t, path)
	outside := filepath.Join(t.TempDir(), "outside")
	for name, mode := range map[string]os.FileMode{outside: 0o644, d.join("private"): 0o600, d.Kubeconfig(): 0o644} {
		testcheck.NoError(t, os.WriteFile(name, nil, mode))
	}
	testcheck.NoError(t, os.Mkdir(d.PKI(), 0o755))
	key := filepath.Join(d.PKI(), "key")
	testcheck.NoError(t, os.WriteFile(key, nil, 0o640))
	testcheck.NoError(t, os.Symlink(outside, d.join("link")))
	testcheck.NoError(t, d.Close())
	for i, want := range [][]string{{"kubeconfig", "pki", "pki/key"}, nil} {
		d := mustOpen(t, path)
		if !slices.Equal(d.Closed, want) {
			t.Errorf("open %d: closed %q, want %q", i, d.Closed, want)
		}
		for name, mode := range map[string]os.FileMode{path: 0o700, d.PKI(): 0o700, key: 0o600, d.Kubeconfig(): 0o600, d.join("private"): 0o600, outside: 0o644} {
			if info, err := os.Stat(name); err != nil || info.Mode().Perm() != mode {
				t.Errorf("open %d: %s has mode %v (%v), want %v", i, name, info.Mode(), err, mode)
			}
		}
		testcheck.NoError(t, d.Close())
	}
}

func TestOpen_InUse_NamesProcess(t *testing.T) {
	path := t.TempDir()
	first := mustOpen(t, path)
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("in use by another strata up (process %d)", os.Getpid())) {
		t.Errorf("second open: %v", err)
	}
	if err := CheckFree(path); err == nil {
		t.Error("a directory in use passes for free")
	}
	testcheck.NoError(t, first.Close())
	if err := CheckFree(path); err != nil {
		t.Error(err)
	}
	mustOpen(t, path).Close()
}

func TestOpen_ForeignDirectory_IsRejectedUnchanged(t *testing.T) {
	path := t.TempDir()
	testcheck.NoError(t, os.Chmod(path, 0o755))
	testcheck.NoError(t, os.WriteFile(filepath.Join(path, "something"), nil, 0o600))
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "was not created by strata up") {
		t.Errorf("open: %v", err)
	}
	if entries, err := os.ReadDir(path); err != nil || len(entries) != 1 {
		t.Errorf("entries %v, %v; want one, the entry from before", entries, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v (%v), want 0755 as before", info.Mode(), err)
	}
}

func TestCheckFree_MissingDirectory_CreatesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data")
	if err := CheckFree(path); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("%s: %v, want that there is none", path, err)
	}
}

func TestDefault_UsesEnvironmentVariable(t *testing.T) {
	if got := Default(func(string) string { return "" }); got != "strata-data" {
		t.Errorf("without a variable: %q", got)
	}
	env := map[string]string{"STRATA_DATA": "/elsewhere"}
	if got := Default(func(name string) string { return env[name] }); got != "/elsewhere" {
		t.Errorf("with STRATA_DATA: %q", got)
	}
}

func TestCheckKind_DataOfOtherKind_NamesNextStep(t *testing.T) {
	for name, test := range map[string]struct {
		path string
		ha   bool
		want string // "" for no error
	}{
		"no data":             {"", true, ""},
		"one process":         {"etcd", false, ""},
		"several":             {"ha/layout.json", true, ""},
		"one, then several":   {"etcd", true, "without --ha: omit --ha"},
		"several, then one":   {"ha/layout.json", false, "of strata up --ha: add --ha"},
		"failed, then single": {"ha", false, ""},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := Open(filepath.Join(t.TempDir(), "data"))
			testcheck.NoError(t, err)
			defer d.Close()
			if test.path != "" {
				testcheck.NoError(t, os.MkdirAll(d.join(test.path), 0o700))
			}
			err = d.CheckKind(test.ha)
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestOpen_DirectoryOfAnotherOwner_IsRefusedUnchanged(t *testing.T) {
	path := t.TempDir()
	testcheck.NoError(t, os.Chmod(path, 0o755))
	stranger := os.Geteuid() + 1
	d, err := open(path, func(info fs.FileInfo) error { return CheckOwner(info, stranger) })
	if err == nil {
		d.Close()
		t.Fatal("opened")
	}
	want := fmt.Sprintf("%s: its owner is user %d, not user %d; choose another directory with --data-dir", path, os.Geteuid(), stranger)
	if !strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want %q", err, want)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v (%v), want 0755 as before", info.Mode(), err)
	}
	if entries, err := os.ReadDir(path); err != nil || len(entries) > 0 {
		t.Errorf("entries %v, %v; want none", entries, err)
	}
}

func TestOpen_FileOfAnotherOwner_IsRefused(t *testing.T) {
	path := t.TempDir()
	d := mustOpen(t, path)
	foreign := filepath.Join(d.PKI(), "ca.crt")
	for _, err := range []error{os.Mkdir(d.PKI(), 0o700), os.WriteFile(foreign, nil, 0o600), os.Symlink(foreign, d.join("link")), d.Close()} {
		testcheck.NoError(t, err)
	}
	for _, name := range []string{"pki", "pki/ca.crt", "link"} {
		d, err := open(path, func(info fs.FileInfo) error {
			if info.Name() == filepath.Base(name) {
				return errors.New("of another owner")
			}
			return nil
		})
		if err == nil {
			d.Close()
			t.Errorf("%s: opened", name)
		} else if want := filepath.Join(path, name) + ": of another owner; "; !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
		if err := CheckFree(path); err != nil {
			t.Errorf("%s: the directory is locked: %v", name, err)
		}
	}
	mustOpen(t, path).Close()
}
