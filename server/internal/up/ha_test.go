package up

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

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
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	first, err := openLayout(dir)
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	if first.cluster() != second.cluster() || first.endpoints() != second.endpoints() {
		t.Errorf("members were %s, are %s", first.cluster(), second.cluster())
	}
	second.release()

	l, err := net.Listen("tcp", second.Members[1].address())
	if err != nil {
		t.Fatal(err)
	}
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

func TestUpHA_Processes_EndWithTheirParent(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	p := start(t, dir, "--ha", "--controllers=none")
	p.requireUp(t)
	pids := haPIDs(t, dir)
	if len(pids) != memberCount+serverCount+replicaCount {
		t.Fatalf("processes are %v", pids)
	}
	p.kubectl(t, "create", "configmap", "c", "--from-literal=k=v")
	if got := p.kubectl(t, "--context=strata-replicas", "get", "configmap", "c", "--output=jsonpath={.data.k}"); got != "v" {
		t.Errorf("the replicas return %q", got)
	}
	_, stderr, code := runStrata(t, dir, "", "up", "--secure-port=0", "--data-dir=strata-data")
	requireOneLine(t, stderr, code, "is in use by another strata up")
	p.kill(t)
	for _, pid := range pids {
		awaitEnd(t, pid)
	}

	_, stderr, code = runStrata(t, dir, "", "up", "--secure-port=0")
	requireOneLine(t, stderr, code, "has the data of strata up --ha: add --ha, or choose another directory with --data-dir")
	again := start(t, dir, "--ha", "--controllers=none")
	again.requireUp(t)
	if got := again.kubectl(t, "get", "configmap", "c", "--output=jsonpath={.data.k}"); got != "v" {
		t.Errorf("after a start on the data of killed members, the object has %q", got)
	}
	again.requireStop(t, terminate)
	if left := haPIDs(t, dir); len(left) != 0 {
		t.Errorf("files of processes remain after a stop: %v", left)
	}
}

func TestUpHA_ServerDoesNotStart_EndsWithItsMessage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, stderr, code := runStrata(t, dir, "", "up", "--ha", "--secure-port=0", "--", "--authorization-mode=Bogus")
	requireOneLine(t, stderr, code, "Bogus")
	if left := haPIDs(t, dir); len(left) != 0 {
		t.Errorf("processes remain: %v", left)
	}
}

// haPIDs returns the ids of the processes of `strata up --ha` in dir.
func haPIDs(t *testing.T, dir string) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "strata-data", "ha", "*.pid"))
	if err != nil {
		t.Fatal(err)
	}
	pids := map[string]int{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		pid := 0
		if err := json.Unmarshal(data, &pid); err != nil {
			t.Fatal(err)
		}
		pids[filepath.Base(file)] = pid
	}
	return pids
}

// awaitEnd waits until a process has ended: the kernel kills it with its parent.
func awaitEnd(t *testing.T, pid int) {
	t.Helper()
	requireSoon(t, func() bool { return ended(pid) })
}

// ended reports whether there is no process, or one that only waits for its parent.
func ended(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	return err != nil || strings.Contains(string(stat), ") Z ")
}

func TestSameAuthorization_ModeOfTheUser_IsAcceptedByReplicas(t *testing.T) {
	for extra, want := range map[string]string{"": "", "--v=2": "", "--authorization-mode=AlwaysAllow": "--insecure-always-allow", "--authorization_mode=RBAC": "--insecure-always-allow"} {
		if got := strings.Join(sameAuthorization(strings.Fields(extra)), " "); got != want {
			t.Errorf("%q: flags %q, want %q", extra, got, want)
		}
	}
}
