// Package testbin builds the strata command for tests that run it as a process of its own.
package testbin

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// EnvVar names a binary to test in place of one built from the source.
const EnvVar = "STRATA_BINARY"

const commandPackage = "github.com/stratakube/strata/server/cmd/strata"

var (
	buildDir string // set by Main
	build    = sync.OnceValues(func() (string, error) {
		if path := os.Getenv(EnvVar); path != "" {
			return filepath.Abs(path)
		}
		path := filepath.Join(buildDir, "strata")
		if out, err := exec.Command("go", "build", "-o", path, commandPackage).CombinedOutput(); err != nil {
			return "", fmt.Errorf("go build %s: %w\n%s", commandPackage, err, out)
		}
		return path, nil
	})
)

// Main is the TestMain of a package whose tests call Strata:
//
//	func TestMain(m *testing.M) { os.Exit(testbin.Main(m)) }
func Main(m *testing.M) int {
	dir, err := os.MkdirTemp("", "strata-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "testbin:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // tests may run the command as another user
		fmt.Fprintln(os.Stderr, "testbin:", err)
		return 1
	}
	buildDir = dir
	return m.Run()
}

// Strata returns the path of the command. The first call builds it, unless EnvVar names one.
func Strata(t testing.TB) string {
	t.Helper()
	path, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return path
}
