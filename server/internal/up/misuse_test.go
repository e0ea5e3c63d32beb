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

	"github.com/stratakube/strata/server/internal/testbin"
)

// requireOneLine fails the test unless a call of strata failed with exit code 1 and one line on standard error that contains
// want.
func requireOneLine(t *testing.T, stderr string, code int, want string) {
	t.Helper()
	if code != 1 {
		t.Errorf("code %d, want 1", code)
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
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestUp_Misuse_PrintsOneLineAndWritesNothing(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	_, usedPort, err := net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"unknown flag":          {[]string{"--bogus"}, "unknown flag: --bogus"},
		"too many nodes":        {[]string{"--nodes=1001"}, "--nodes 1001 is not between 0 and 1000"},
		"negative nodes":        {[]string{"--nodes=-1"}, "--nodes -1 is not between 0 and 1000"},
		"an argument":           {[]string{"now"}, `takes no argument "now"`},
		"an argument before --": {[]string{"now", "--", "--v=1"}, `takes no argument "now"`},
		"port in use":           {[]string{"--secure-port=" + usedPort}, "127.0.0.1:" + usedPort + ": address already in use"},
		"no port":               {[]string{"--secure-port=65536"}, "--secure-port 65536 is not a valid port"},
		"no address":            {[]string{"--bind-address=localhost"}, "--bind-address"},
		"foreign address":       {[]string{"--bind-address=192.0.2.1"}, "cannot serve on 192.0.2.1:"},
		"unknown controller":    {[]string{"--controllers=default,bogus"}, `unknown controller "bogus"`},
		"unknown engine":        {[]string{"--", "--engine=bogus"}, "must be strata or upstream"},
		"server's flag":         {[]string{"--", "--bogus"}, "unknown flag: --bogus (see strata apiserver --help)"},
		"server's argument":     {[]string{"--", "now"}, "takes flags only"},
		"server's help":         {[]string{"--", "--help"}, "use strata apiserver for the help and version"},
		"server's version":      {[]string{"--", "--version"}, "use strata apiserver for the help and version"},
		"own flag after --":     {[]string{"--", "--secure_port=1"}, "before the --"},
		"another etcd":          {[]string{"--", "--etcd-servers=http://127.0.0.1:1"}, "use strata apiserver"},
		"foreign kubeconfig":    {[]string{"--kubeconfig=foreign"}, "was not written by strata up"},
		"empty data directory":  {[]string{"--data-dir="}, "--data-dir is empty"},
		"data below a file":     {[]string{"--data-dir=foreign/data"}, "not a directory"},
		"data in a file":        {[]string{"--data-dir=foreign"}, "not a directory"},
		"foreign directory":     {[]string{"--data-dir=."}, "was not created by strata up"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := os.WriteFile(filepath.Join(dir, "foreign"), []byte("apiVersion: v1\nkind: Config\n"), 0o644); err != nil {
				t.Fatal(err)
			}
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

func TestUp_DataDirInUse_IsRefused(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := start(t, dir)
	first.requireUp(t)
	samePort := "--secure-port=" + first.config(t).Host[strings.LastIndex(first.config(t).Host, ":")+1:]
	for _, port := range []string{"--secure-port=0", samePort} {
		_, stderr, code := runStrata(t, dir, "", "up", port)
		requireOneLine(t, stderr, code, "is in use by another strata up (process ")
	}
	if got := first.kubectl(t, "get", "--raw", "/readyz"); got != "ok" {
		t.Errorf("the first is %q after the second", got)
	}
	first.requireStop(t, terminate)
}

// Permissions do not apply to root, so the command runs as another user if this test runs as root.
func TestUp_DataDirOfAnotherUser_IsRefused(t *testing.T) {
	dir := t.TempDir()
	data := filepath.Join(dir, "strata-data")
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := prepare(t, dir, "up", "--secure-port=0")
	if os.Getuid() == 0 {
		if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil { // the other user needs access to dir
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
	requireOneLine(t, stderr, code, "permission denied")
}

func TestUp_DamagedData_PrintsOneLine(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	first := start(t, dir, "--controllers=none")
	first.requireUp(t)
	first.requireStop(t, terminate)
	for name, test := range map[string]struct{ pattern, want string }{
		"certificate authority": {"pki/ca.pem", "certificate authority"},
		"database":              {"etcd/member/snap/db", "etcd"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "strata-data", test.pattern)
			whole, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte("damaged"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, stderr, code := runStrata(t, dir, "", "up", "--secure-port=0")
			requireOneLine(t, stderr, code, test.want)
			if err := os.WriteFile(path, whole, 0o600); err != nil {
				t.Fatal(err)
			}
		})
	}
	second := start(t, dir)
	second.requireUp(t)
	second.requireStop(t, terminate)
}
