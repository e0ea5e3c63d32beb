package up

import (
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/datadir"
)

func TestCheckHAFlags_ConflictingFlags_AreRefusedWithReason(t *testing.T) {
	for name, test := range map[string]struct {
		engine string
		extra  []string
		want   string // in the error, "" for none
	}{
		"none":               {"", nil, ""},
		"other flags":        {"strata", []string{"--v=2", "--audit-policy-file=p", "--audit-log-path=-"}, ""},
		"certificate":        {"", []string{"--tls_cert_file=c"}, "--tls-cert-file of the API server: the balancer verifies"},
		"etcd's certificate": {"", []string{"--etcd-cafile", "c"}, "members of etcd have certificates of their own"},
		"engine":             {"", []string{"--engine=upstream"}, "read replicas need the engine strata"},
		"deprecated engine":  {"upstream", nil, "read replicas need the engine strata"},
		"engine as word":     {"", []string{"--engine", "upstream"}, "read replicas need the engine strata"},
		"audit log":          {"", []string{"--audit-log-path=/a"}, "several servers would write to that file"},
		"last audit log":     {"", []string{"--audit-log-path=/a", "--audit-log-path=-"}, ""},
	} {
		err := checkHAFlags(test.engine, test.extra)
		if (err == nil) != (test.want == "") || err != nil && !(strings.Contains(err.Error(), test.want) && cli.IsMisuse(err)) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}

func TestOpenLayout_SecondStart_HasTheSameMembers(t *testing.T) {
	dir, err := datadir.Open(filepath.Join(t.TempDir(), "data"))
	testcheck.NoError(t, err)
	defer dir.Close()
	first, err := openLayout(dir)
	testcheck.NoError(t, err)
	ports := map[int]bool{}
	for _, each := range first.all() {
		ports[each.Port] = true
		if each.Peer != 0 {
			ports[each.Peer] = true
		}
	}
	if len(ports) != 2*memberCount+serverCount+replicaCount {
		t.Errorf("ports are %v, want different ones", ports)
	}
	first.release()
	second, err := openLayout(dir)
	testcheck.NoError(t, err)
	if first.cluster() != second.cluster() || first.endpoints() != second.endpoints() {
		t.Errorf("members were %s, are %s", first.cluster(), second.cluster())
	}
	second.release()

	l, err := net.Listen("tcp", second.Members[1].address())
	testcheck.NoError(t, err)
	defer l.Close()
	if _, err := openLayout(dir); err == nil || !strings.Contains(err.Error(), "etcd-2: port "+strconv.Itoa(second.Members[1].Port)) ||
		!strings.Contains(err.Error(), "stop the program that listens on it") {
		t.Errorf("with a port in use: %v", err)
	}
	if err := os.WriteFile(dir.HALayout(), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := openLayout(dir); err == nil || !strings.Contains(err.Error(), "restore it from a backup") {
		t.Errorf("with a damaged file: %v", err)
	}
}

func TestUpHA_ServerDoesNotStart_EndsWithItsMessage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stderr, code := runStrata(t, dir, "", "up", "--ha", "--secure-port=0", "--", "--authorization-mode=Bogus")
	requireOneLine(t, stderr, code, "Bogus")
	if left, err := filepath.Glob(filepath.Join(dir, "strata-data", "ha", "*.pid")); err != nil || len(left) > 0 {
		t.Errorf("files of processes remain: %v, %v", left, err)
	}
}

func TestSameAuthorization_ModeOfTheUser_IsAcceptedByReplicas(t *testing.T) {
	for extra, want := range map[string]string{"": "", "--v=2": "", "--authorization-mode=AlwaysAllow": "--insecure-always-allow", "--authorization_mode=RBAC": "--insecure-always-allow"} {
		if got := strings.Join(sameAuthorization(strings.Fields(extra)), " "); got != want {
			t.Errorf("%q: flags %q, want %q", extra, got, want)
		}
	}
}
