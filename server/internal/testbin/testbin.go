// Package testbin builds the strata command for tests that run it as a process of its own.
package testbin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"
)

// EnvVar names a binary to test in place of one built from the source.
const EnvVar = "STRATA_BINARY"

// Path returns the path of the command, after the first call of a process has built it, unless EnvVar names one. Linking
// takes most of a minute of processor time, so all test packages share one file, bin/test/strata: go build leaves it
// untouched if it is what it would write.
var Path = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(EnvVar); path != "" {
		return filepath.Abs(path)
	}
	return Build("test/strata", "server", "./cmd/strata")
})

// Build builds a program from a module below the top of the repository, with environment variables of the form key=value,
// and returns its path, name below bin. Processes that build the same program wait for each other.
func Build(name, module, pkg string, env ...string) (string, error) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/stratakube/strata/server").Output()
	if err != nil {
		return "", fmt.Errorf("find the server module: %w", err)
	}
	top := filepath.Dir(strings.TrimSpace(string(out)))
	path := filepath.Join(top, "bin", name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	lock, err := fileutil.LockFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", path, err)
	}
	defer lock.Close()
	build := exec.Command("go", "build", "-o", path, pkg)
	build.Dir = filepath.Join(top, module)
	build.Env = append(os.Environ(), env...)
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", name, err, out)
	}
	return path, nil
}

// Strata is Path for a test, which ends if the command cannot be built.
func Strata(t testing.TB) string {
	t.Helper()
	path, err := Path()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
