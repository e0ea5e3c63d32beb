package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// named returns the program, started by another name.
func named(t *testing.T, name string, args ...string) *exec.Cmd {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Args[0] = filepath.Join("/assets", name)
	cmd.Env = append(os.Environ(), runEnv+"="+runMain)
	return cmd
}

func TestProgramName_OfOtherProgram_AnswersAsIt(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"kube-apiserver": {[]string{"--version"}, "Kubernetes v1.37.2+strata."},
		"kubectl":        {[]string{"version", "--client"}, "Client Version: v1.37.2+strata."},
		"etcd":           {[]string{"--version"}, "etcd Version: 3."},
		"strata":         {[]string{"--version"}, "strata      v"},
		"kubectl-strata": {[]string{"get", "--help"}, "Print objects as they were"},
		// The completion of a flag of kubectl strata get.
		"kubectl_complete-strata": {[]string{"get", "--at-rev"}, "--at-revision\t"},
	} {
		out, err := named(t, name, tc.args...).Output()
		if err != nil || !strings.HasPrefix(string(out), tc.want) {
			t.Errorf("%s %v prints %q (error %v), want %q first", name, tc.args, out, err, tc.want)
		}
	}
}

// envtest reads the help to find out which flags exist.
func TestProgramName_Help_ListsFlagsOfThatProgram(t *testing.T) {
	for name, want := range map[string]string{"kube-apiserver": "--etcd-servers", "etcd": "--unsafe-no-fsync"} {
		out, err := named(t, name, "--help").CombinedOutput()
		if err != nil || !strings.Contains(string(out), want) {
			t.Errorf("%s --help: error %v, no %s in %d bytes", name, err, want, len(out))
		}
	}
}

func TestProgramName_UnknownFlag_IsNamed(t *testing.T) {
	for _, name := range []string{"kube-apiserver", "etcd"} {
		out, err := named(t, name, "--nonsense=1").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "nonsense") {
			t.Errorf("%s --nonsense prints %q, error %v", name, out, err)
		}
	}
}

func TestEtcd_FlagsOfEnvtest_ServesAndStops(t *testing.T) {
	var urls [2]string
	for i := range urls {
		port, err := loopback.Reserve()
		testcheck.NoError(t, err)
		t.Cleanup(func() { _ = port.Release() })
		urls[i] = "http://" + port.Address()
	}
	dir := t.TempDir()
	server, err := process.Start(process.Spec{
		Name: "etcd", Path: link(t, dir, "etcd"), Env: append(os.Environ(), runEnv+"="+runMain), Log: filepath.Join(dir, "log"),
		Args: []string{"--data-dir=" + filepath.Join(dir, "data"), "--listen-client-urls=" + urls[0], "--advertise-client-urls=" + urls[0],
			"--listen-peer-urls=" + urls[1], "--unsafe-no-fsync=true"},
	})
	testcheck.NoError(t, err)
	defer server.Kill()
	err = server.Await(t.Context(), 20*time.Millisecond, func(ctx context.Context) error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, urls[0]+"/health", nil)
		if err != nil {
			return err
		}
		response, err := http.DefaultClient.Do(request)
		if err == nil {
			response.Body.Close()
		}
		return err
	})
	testcheck.NoError(t, err)
	if err := server.Stop(syscall.SIGTERM, time.Minute); err != nil {
		t.Error(err)
	}
}

// link returns the path of a link to the test binary with another name.
func link(t *testing.T, dir, name string) string {
	t.Helper()
	self, err := filepath.Abs(os.Args[0])
	testcheck.NoError(t, err)
	path := filepath.Join(dir, name)
	testcheck.NoError(t, os.Symlink(self, path))
	return path
}

func TestWithDefaults_FlagsOfTheCallerWin(t *testing.T) {
	for name, tc := range map[string]struct{ args, want []string }{
		"none set":    {[]string{"etcd", "--data-dir=x"}, []string{"etcd", "--a=1", "--data-dir=x"}},
		"set":         {[]string{"etcd", "--a=2"}, []string{"etcd", "--a=2"}},
		"set as word": {[]string{"etcd", "-a", "2"}, []string{"etcd", "-a", "2"}},
		"config file": {[]string{"etcd", "--config-file=x"}, []string{"etcd", "--config-file=x"}},
		"subcommand":  {[]string{"etcd", "gateway", "start"}, []string{"etcd", "gateway", "start"}},
		"no flags":    {[]string{"etcd"}, []string{"etcd"}},
	} {
		if got := withDefaults(tc.args, "--a=1"); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}
