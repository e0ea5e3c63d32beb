package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testrequire"
)

const (
	stockEnv      = "STRATA_TEST_STOCK"
	stockRequired = "stock" // in STRATA_TEST_REQUIRE
)

// stockEtcds are the modules of the stock etcd servers, relative to the top of the repository. The
// server's module pins the newest one, which it embeds.
var stockEtcds = map[string]string{"3.5": "tools/stock/etcd-3.5", "3.6": "tools/stock/etcd-3.6", "3.7": "server"}

// StockAPIServer returns the path of the stock kube-apiserver of a minor version, such as "1.36".
// It takes minutes to compile, so only `make stock` builds it: STRATA_TEST_STOCK is its directory.
// Without it the test is skipped; its name in STRATA_TEST_REQUIRE is stock.
func StockAPIServer(t testing.TB, minor string) string {
	t.Helper()
	dir := os.Getenv(stockEnv)
	if dir == "" {
		testrequire.Missing(t, stockRequired, fmt.Sprintf("%s does not name the directory of stock programs that make stock builds", stockEnv))
	}
	path := filepath.Join(dir, "kube-apiserver-"+minor)
	out, err := exec.Command(path, "--version").CombinedOutput()
	if err != nil {
		testrequire.Missing(t, stockRequired, fmt.Sprintf("%s --version: %v %s", path, err, out))
	}
	if !strings.HasPrefix(string(out), "Kubernetes v"+minor+".") {
		t.Fatalf("%s is not a kube-apiserver %s: %s", path, minor, out)
	}
	return path
}

// StockEtcd returns the path of the stock etcd server of a minor version, 3.5 to 3.7, which it
// builds unless the directory STRATA_TEST_STOCK has it.
func StockEtcd(t testing.TB, minor string) string {
	t.Helper()
	name := "etcd-" + minor
	if dir := os.Getenv(stockEnv); dir != "" {
		return filepath.Join(dir, name)
	}
	path, err := testbin.Build("stock/"+name, stockEtcds[minor], "go.etcd.io/etcd/server/v3", "GOWORK=off")
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// StockEtcd starts an empty etcd: the stock server of a minor version. Like Env.Etcd it runs
// without fsync.
func (e *Env) StockEtcd(t testing.TB, minor string) *Etcd {
	t.Helper()
	client, peer := e.FreeURL(), e.FreeURL()
	etcd := e.EtcdProgram("stock-etcd", client, StockEtcd(t, minor), stockEtcdArgs(e.Dir("etcd"), client, peer)...)
	etcd.Start()
	return etcd
}

func stockEtcdArgs(dataDir, client, peer string) []string {
	return []string{"--data-dir=" + dataDir, fsyncFlag(), "--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=default=" + peer}
}

// Upgrade replaces the program of a stopped etcd of EtcdProgram; Start then starts the new program
// on the same data.
func (e *Etcd) Upgrade(path string) { e.program = path }

// StartStock starts the stock kube-apiserver at path on etcd, with the same flags as
// StartAPIServer, and does not wait for it.
func (e *Env) StartStock(path string, etcd *Etcd, flags ...string) *Server {
	return e.startAPIServer(launch{program: path}, etcd, flags...)
}
