package harness

import (
	"cmp"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	utilversion "k8s.io/apimachinery/pkg/util/version"

	"github.com/stratakube/strata/internal/test/testrequire"
)

const (
	oldEtcdEnv    = "STRATA_TEST_OLD_ETCD"
	prometheusEnv = "STRATA_TEST_PROMETHEUS"
)

// Prometheus returns the path of a program of Prometheus, promtool or prometheus. If there is none
// the test is skipped; its name in STRATA_TEST_REQUIRE is prometheus.
func Prometheus(t testing.TB, program string) string {
	t.Helper()
	path, err := exec.LookPath(filepath.Join(os.Getenv(prometheusEnv), program))
	if err != nil {
		testrequire.Missing(t, "prometheus", fmt.Sprintf("%v; hack/prometheus fetches it, and %s names its directory", err, prometheusEnv))
	}
	return path
}

// OldEtcd returns the path of an etcd 3.4 whose progress notifications may overtake events
// (etcd#15220, etcd#17507), and its version. If there is none the test is skipped; its name in
// STRATA_TEST_REQUIRE is old-etcd.
func OldEtcd(t testing.TB) (path, version string) {
	t.Helper()
	path = cmp.Or(os.Getenv(oldEtcdEnv), "/usr/bin/etcd")
	version, err := etcdVersion(path)
	if err != nil {
		testrequire.Missing(t, "old-etcd", fmt.Sprintf("there is none at %s: %v; hack/old-etcd fetches one, and %s names it", path, err, oldEtcdEnv))
	}
	return path, version
}

// etcdVersion returns the version of the etcd at path; an error unless it is a 3.4 with the bug.
func etcdVersion(path string) (string, error) {
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(string(out), "\n")
	text := strings.TrimPrefix(line, "etcd Version: ")
	v, err := utilversion.ParseGeneric(text)
	if err != nil {
		return "", fmt.Errorf("version %q: %w", line, err)
	}
	if v.Major() != 3 || v.Minor() != 4 || v.Patch() >= 31 {
		return "", fmt.Errorf("version %s is not one with the bug, 3.4 below 3.4.31", text)
	}
	return text, nil
}
