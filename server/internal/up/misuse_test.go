package up

import (
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/cli"
)

// requireOneLine fails the test unless a call of strata failed, with one line on standard error
// that contains want. The exit code is that of misuse if the line names the help of a command.
func requireOneLine(t *testing.T, stderr string, code int, want string) {
	t.Helper()
	wantCode := cli.Failed
	if strings.HasSuffix(stderr, " --help)\n") || strings.HasSuffix(stderr, " --help\n") {
		wantCode = cli.Misused
	}
	if code != wantCode {
		t.Errorf("code %d, want %d", code, wantCode)
	}
	if !strings.HasPrefix(stderr, "strata: ") || strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, want) {
		t.Errorf("standard error is %q, want one line with %q", stderr, want)
	}
}

// snapshot returns the contents of all files below dir.
func snapshot(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		files[path] = string(data)
		return err
	})
	testcheck.NoError(t, err)
	return files
}

func TestUp_Misuse_PrintsOneLineAndWritesNothing(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	defer listener.Close()
	_, usedPort, err := net.SplitHostPort(listener.Addr().String())
	testcheck.NoError(t, err)
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":          {[]string{"--bogus"}, "unknown flag: --bogus (see strata up --help)"},
		"too many nodes":        {[]string{"--nodes=1001"}, "--nodes 1001 is not between 0 and 1000 (see strata up --help)"},
		"negative nodes":        {[]string{"--nodes=-1"}, "--nodes -1 is not between 0 and 1000 (see strata up --help)"},
		"nodes in words":        {[]string{"--nodes=three"}, `--nodes "three": must be a whole number in the range of int (see strata up --help)`},
		"an argument":           {[]string{"now"}, `takes no argument "now"; flags of the API server go after -- (see strata up --help)`},
		"an argument before --": {[]string{"now", "--", "--v=1"}, `takes no argument "now"; flags of the API server go after -- (see strata up --help)`},
		"port in use":           {[]string{"--secure-port=" + usedPort}, "127.0.0.1:" + usedPort + ": address already in use; choose another address with --bind-address and --secure-port"},
		"no port":               {[]string{"--secure-port=65536"}, "--secure-port 65536 is not a valid port: choose one between 1 and 65535, or 0 for a free one (see strata up --help)"},
		"no address":            {[]string{"--bind-address=localhost"}, `--bind-address "localhost": must be an IP address such as 127.0.0.1 (see strata up --help)`},
		"foreign address":       {[]string{"--bind-address=192.0.2.1"}, "cannot serve on 192.0.2.1:"},
		"no interval":           {[]string{"--etcd-progress-notify-interval=soon"}, `--etcd-progress-notify-interval "soon": must be a duration such as 90s or 1h30m (see strata up --help)`},
		"short interval":        {[]string{"--etcd-progress-notify-interval=-5s"}, "--etcd-progress-notify-interval -5s is too short: choose at least 100ms, or 0 for etcd's default of 10m (see strata up --help)"},
		"no host":               {[]string{"--tls-san=a b"}, `--tls-san "a b" is neither an IP address nor a name of a host, such as strata.example.com (see strata up --help)`},
		"unknown controller":    {[]string{"--controllers=default,bogus"}, `unknown controller "bogus" (see strata up --help)`},
		"unknown engine":        {[]string{"--", "--engine=bogus"}, `--engine "bogus": must be strata or upstream (see strata apiserver --help)`},
		"server's flag":         {[]string{"--", "--bogus"}, "unknown flag: --bogus (see strata apiserver --help)"},
		"server's value":        {[]string{"--", "--strata-history-bytes=much"}, `--strata-history-bytes "much": must be a size such as 256Mi or 1Gi (see strata apiserver --help)`},
		"server's gate":         {[]string{"--", "--strata-feature-gates=WatchBookmark=maybe"}, "invalid value of WatchBookmark=maybe: must be true or false (see strata apiserver --help)"},
		"server's argument":     {[]string{"--", "now"}, `takes flags only, got ["now"] (see strata apiserver --help)`},
		"server's help":         {[]string{"--", "--help"}, "use strata apiserver for the help and version"},
		"server's version":      {[]string{"--", "--version"}, "use strata apiserver for the help and version"},
		"own flag after --":     {[]string{"--", "--secure_port=1"}, "before the -- (see strata up --help)"},
		"another etcd":          {[]string{"--", "--etcd-servers=http://127.0.0.1:1"}, "use strata apiserver (see strata up --help)"},
		"foreign kubeconfig":    {[]string{"--kubeconfig=foreign"}, "was not written by strata up and is not overwritten; name another file with --kubeconfig"},
		"empty data directory":  {[]string{"--data-dir="}, "--data-dir is empty: name the directory of the control plane's files, such as strata-data (see strata up --help)"},
		"data below a file":     {[]string{"--data-dir=foreign/data"}, "not a directory; choose another directory with --data-dir"},
		"data in a file":        {[]string{"--data-dir=foreign"}, "not a directory; choose another directory with --data-dir"},
		"--ha, last port":       {[]string{"--ha", "--secure-port=65535"}, "--ha needs the port after --secure-port too: choose one below 65535 (see strata up --help)"},
		"--ha, certificate":     {[]string{"--ha", "--", "--tls-cert-file=x"}, "--ha excludes the flag --tls-cert-file of the API server: the balancer verifies the certificates of the data directory (see strata up --help)"},
		"--ha, engine":          {[]string{"--ha", "--", "--engine=upstream"}, "--ha excludes --engine=upstream: read replicas need the engine strata (see strata up --help)"},
		"foreign directory":     {[]string{"--data-dir=."}, "was not created by strata up; choose a new or empty directory with --data-dir"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			testcheck.NoError(t, os.WriteFile(filepath.Join(dir, "foreign"), []byte("apiVersion: v1\nkind: Config\n"), 0o644))
			before := snapshot(t, dir)
			_, stderr, code := runStrata(t, dir, "", append([]string{"up", "--secure-port=0"}, test.args...)...)
			requireOneLine(t, stderr, code, test.want)
			if !maps.Equal(before, snapshot(t, dir)) {
				t.Error("files have changed")
			}
			if info, err := os.Stat(dir); err != nil || info.Mode().Perm() == 0o700 {
				t.Errorf("mode of the directory: %v, %v", info.Mode(), err)
			}
		})
	}
}

// Permissions do not apply to root, so the command runs as another user if this test runs as root.
func TestUp_DataDirOfAnotherUser_IsRefused(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "strata-data")
	testcheck.NoError(t, os.Mkdir(data, 0o700))
	cmd := prepare(t, dir, "up", "--secure-port=0")
	if os.Getuid() == 0 {
		if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
			// the other user needs access to dir
			t.Fatal(err)
		}
		cmd.Path = filepath.Join(dir, "strata") // the original path may be readable by root only
		if out, err := exec.Command("cp", testbin.Strata(t), cmd.Path).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		const nobody = 65534
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	} else if err := os.Chmod(data, 0); err != nil {
		t.Fatal(err)
	}
	_, stderr, code := runCommand(t, "", cmd)
	requireOneLine(t, stderr, code, "permission denied; choose another directory with --data-dir, or make it accessible to this user")
}
