package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"

	"github.com/stratakube/strata/server/internal/testbin"
)

const (
	engineEnv = "STRATA_TEST_ENGINE"

	// Strata and Upstream are the values of --engine.
	Strata   = "strata"
	Upstream = "upstream"
)

// Engine is the engine under test.
func Engine() string {
	if engine := os.Getenv(engineEnv); engine != "" {
		return engine
	}
	return Strata
}

// Binary returns the path of the command, which it builds first. Test packages that run at the same time share one file.
var Binary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(testbin.EnvVar); path != "" {
		return filepath.Abs(path)
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/stratakube/strata/server").Output()
	if err != nil {
		return "", fmt.Errorf("find the server module: %w", err)
	}
	module := strings.TrimSpace(string(out))
	dir := filepath.Join(filepath.Dir(module), "bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "strata-test")
	lock, err := fileutil.LockFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", path, err)
	}
	defer lock.Close()
	build := exec.Command("go", "build", "-o", path, "./cmd/strata") // does nothing if the file is what it would write
	build.Dir = module
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the command: %w\n%s", err, out)
	}
	return path, nil
})
