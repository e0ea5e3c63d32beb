package harness

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testrequire"
)

const kineEnv = "STRATA_TEST_KINE"

// Kine starts a kine with an empty SQLite database: a server that speaks etcd's protocol and stores
// in a database. The binary is that of STRATA_TEST_KINE, or is built from the version that
// tools/kine pins; where neither is possible the test is skipped. Its name in STRATA_TEST_REQUIRE
// is kine.
func (e *Env) Kine(t testing.TB) *Etcd {
	t.Helper()
	path, err := kineBinary()
	if err != nil {
		testrequire.Missing(t, "kine", err.Error())
	}
	url := e.FreeURL()
	kine := e.EtcdProgram("kine-etcd", url, path,
		"--listen-address="+strings.TrimPrefix(url, "http://"), "--metrics-bind-address=0",
		"--endpoint=sqlite://"+filepath.Join(e.Dir("kine"), "state.db")+
			"?_journal_mode=WAL&_busy_timeout=30000&_synchronous=NORMAL&_txlock=immediate&_stmt_cache_size=20&cache=shared")
	kine.Start()
	return kine
}

// kineBinary returns the path of kine, which it builds unless STRATA_TEST_KINE is set: with SQLite
// in C if there is a C compiler, otherwise in Go.
func kineBinary() (string, error) {
	if path := os.Getenv(kineEnv); path != "" {
		return filepath.Abs(path)
	}
	return testbin.Build("test/kine", "tools/kine", "github.com/k3s-io/kine", "GOWORK=off")
}
