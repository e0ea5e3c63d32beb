package harness

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

const kineEnv = "STRATA_TEST_KINE"

// Kine starts a kine with an empty SQLite database: a server that speaks etcd's protocol and stores in a
// database. It is the one that STRATA_TEST_KINE names, or is built from the version that tools/kine pins; where neither
// is possible the test is skipped. The name by which it can be required is kine.
func (e *Env) Kine(t testing.TB) *Etcd {
	t.Helper()
	path, err := kineBinary()
	if err != nil {
		Missing(t, "kine", err.Error())
	}
	url := e.FreeURL()
	kine := e.EtcdProgram("kine-etcd", url, path,
		"--listen-address="+strings.TrimPrefix(url, "http://"), "--metrics-bind-address=0",
		"--endpoint=sqlite://"+filepath.Join(e.Dir("kine"), "state.db")+
			"?_journal_mode=WAL&_busy_timeout=30000&_synchronous=NORMAL&_txlock=immediate&_stmt_cache_size=20&cache=shared")
	kine.Start()
	return kine
}

// kineBinary returns the path of kine, which it builds first: with SQLite in C where there is a C compiler, in Go
// where there is none. Test packages that run at the same time share one file.
var kineBinary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(kineEnv); path != "" {
		return filepath.Abs(path)
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/stratakube/strata/server").Output()
	if err != nil {
		return "", fmt.Errorf("find the server module: %w", err)
	}
	root := filepath.Dir(strings.TrimSpace(string(out)))
	dir := filepath.Join(root, "bin", "test")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	path := filepath.Join(dir, "kine")
	lock, err := fileutil.LockFile(path+".lock", os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", path, err)
	}
	defer lock.Close()
	build := exec.Command("go", "build", "-o", path, "github.com/k3s-io/kine") // does nothing if the file is what it would write
	build.Dir = filepath.Join(root, "tools", "kine")
	build.Env = append(os.Environ(), "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("it cannot be built: %w\n%s", err, out)
	}
	return path, nil
})
