// Package testbin builds the strata command for tests that run it as a separate process.
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

// EnvVar is the environment variable with the path of a binary to test in place of one built from
// source.
const EnvVar = "STRATA_BINARY"

// HashEnvVar returns the environment variable with a hash of a program that tools/testrun built
// before the tests. Build reads it: go test then takes no result of a test that runs the program
// from its cache after the program changed. Go's cache does not know files outside of the module
// of the test.
func HashEnvVar(name string) string {
	return "STRATA_TEST_HASH_" + strings.ToUpper(strings.NewReplacer("/", "_", "-", "_", ".", "_").Replace(name))
}

// Path returns the path of the command. The first call in a process builds it, unless EnvVar names
// a binary. Linking takes most of a minute of processor time, so all test packages share one file,
// bin/test/strata, which go build does not rewrite if it is up to date.
var Path = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(EnvVar); path != "" {
		return filepath.Abs(path)
	}
	return Build("test/strata", "server", "./cmd/strata")
})

// Build builds a program from a module below the top of the repository, with environment variables
// of the form key=value, and returns its path, bin/name. A file lock serializes processes that
// build the same program.
func Build(name, module, pkg string, env ...string) (string, error) {
	_ = os.Getenv(HashEnvVar(name))
	top, err := top()
	if err != nil {
		return "", err
	}
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

// top returns the top of the repository: the directory of go.work. Tests run in the directory of
// their package.
func top() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for at := dir; ; at = filepath.Dir(at) {
		if _, err := os.Stat(filepath.Join(at, "go.work")); err == nil {
			return at, nil
		}
		if at == filepath.Dir(at) {
			return "", fmt.Errorf("no directory above %s has a go.work", dir)
		}
	}
}

// Strata is Path for a test; it fails the test if the command cannot be built.
func Strata(t testing.TB) string {
	t.Helper()
	path, err := Path()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
