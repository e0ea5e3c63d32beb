package embedetcd

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckSpace_FullFileSystem_NamesDirectoryAndNeed(t *testing.T) {
	fresh, used := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(used, "member", "wal"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		dir  string
		free int64
		err  error
		want string // "" for no error
	}{
		"new, enough":       {fresh, newBytes, nil, ""},
		"new, little":       {fresh, 3 << 20, nil, fresh + ": 3 MiB are free on its file system, and etcd needs 80 MiB to start; free space"},
		"existing, enough":  {used, 3 << 20, nil, ""},
		"existing, nothing": {used, 0, nil, "0 MiB are free on its file system, and etcd needs 1 MiB"},
		"unknown":           {fresh, 0, errors.ErrUnsupported, ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkSpace(test.dir, func(string) (int64, error) { return test.free, test.err })
			if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q", err, test.want)
			}
		})
	}
}

func TestFreeBytes_Directory_IsPositive(t *testing.T) {
	if free, err := freeBytes(t.TempDir()); !errors.Is(err, errors.ErrUnsupported) && (err != nil || free <= 0) {
		t.Errorf("%d, %v", free, err)
	}
}
