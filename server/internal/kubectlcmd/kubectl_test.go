package kubectlcmd

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestKubeconfig_OfUp_HasLowestPrecedence(t *testing.T) {
	t.Chdir(t.TempDir())
	ours := filepath.Join("strata-data", "kubeconfig")
	elsewhere := t.TempDir()
	for _, path := range []string{ours, filepath.Join(elsewhere, "kubeconfig")} {
		testcheck.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		testcheck.NoError(t, os.WriteFile(path, nil, 0o600))
	}
	ours, err := filepath.Abs(ours)
	testcheck.NoError(t, err)
	for name, test := range map[string]struct {
		args string
		env  map[string]string
		want string
	}{
		"no flag, no environment": {"get pods", nil, ours},
		"flag":                    {"get pods --kubeconfig=other", nil, ""},
		"flag and value":          {"--kubeconfig other get pods", nil, ""},
		"flag for another":        {"exec pod -- --kubeconfig=other", nil, ours},
		"environment":             {"get pods", map[string]string{"KUBECONFIG": "other"}, ""},
		"other data directory":    {"get pods", map[string]string{"STRATA_DATA": elsewhere}, filepath.Join(elsewhere, "kubeconfig")},
		"missing data directory":  {"get pods", map[string]string{"STRATA_DATA": "/nowhere"}, ""},
		"environment before data": {"get pods", map[string]string{"KUBECONFIG": "other", "STRATA_DATA": elsewhere}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := kubeconfig(strings.Fields(test.args), func(name string) string { return test.env[name] }, os.Geteuid())
			if got != test.want || err != nil {
				t.Errorf("kubeconfig %q, %v, want %q", got, err, test.want)
			}
		})
	}
}

func TestMissing_KubeconfigOfUp_IsNamedInErrors(t *testing.T) {
	t.Chdir(t.TempDir())
	path, err := filepath.Abs(filepath.Join("strata-data", "kubeconfig"))
	testcheck.NoError(t, err)
	none := func(string) string { return "" }
	if got := missing([]string{"get", "pods"}, none); got != path {
		t.Errorf("missing %q, want %q", got, path)
	}
	if got := missing([]string{"get", "pods", "--kubeconfig=other"}, none); got != "" {
		t.Errorf("missing %q with a flag", got)
	}
	if got := missing([]string{"get", "pods"}, func(name string) string { return map[string]string{"KUBECONFIG": "other"}[name] }); got != "" {
		t.Errorf("missing %q with a kubeconfig in the environment", got)
	}
	const refused = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
	if got := explain(refused, path); !strings.HasPrefix(got, refused+"\nThere is no "+path+", which strata up writes.") || !strings.HasSuffix(got, ".\n") {
		t.Errorf("explained: %q", got)
	}
	if got := explain("error: unknown flag", path); got != "error: unknown flag\n" {
		t.Errorf("another error: %q", got)
	}
}

// call runs `strata kubectl` without any server.
func call(t *testing.T, dir string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), testbin.Strata(t), append([]string{"kubectl"}, args...)...)
	cmd.Dir = dir
	cmd.Env = []string{"HOME=" + dir, "PATH=" + dir + ":" + os.Getenv("PATH")}
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

func TestKubectl_OutputAndExitCodes_AreUpstreams(t *testing.T) {
	for name, test := range map[string]struct {
		args       string
		wantOut    string
		wantErrOut string
		wantCode   int
	}{
		"help":            {"--help", "kubectl controls the Kubernetes cluster manager", "", 0},
		"help of a verb":  {"get --help", "kubectl get ", "", 0},
		"completion":      {"completion bash", "__start_kubectl", "", 0},
		"own version":     {"version --client", "v1.37.2+strata", "", 0},
		"unknown command": {"bogus", "", `error: unknown command "bogus" for "kubectl"`, 1},
		"unknown flag":    {"get --bogus", "", "error: unknown flag: --bogus", 1},
		"missing file":    {"diff -f missing.yaml", "", "missing.yaml", 2},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := call(t, t.TempDir(), strings.Fields(test.args)...)
			if code != test.wantCode || !strings.Contains(stdout, test.wantOut) || !strings.Contains(stderr, test.wantErrOut) {
				t.Errorf("code %d, standard output %q, standard error %q", code, stdout, stderr)
			}
		})
	}
}

func TestKubectl_Plugin_GetsKubeconfigOfUp(t *testing.T) {
	dir := t.TempDir()
	script := "#!/bin/sh\necho \"$KUBECONFIG $*\"\nexit 7\n"
	testcheck.NoError(t, os.WriteFile(filepath.Join(dir, "kubectl-greet"), []byte(script), 0o700))
	config := filepath.Join(dir, "strata-data", "kubeconfig")
	testcheck.NoError(t, os.MkdirAll(filepath.Dir(config), 0o700))
	testcheck.NoError(t, os.WriteFile(config, nil, 0o600))
	stdout, stderr, code := call(t, dir, "greet", "--loudly", "world")
	if want := config + " --loudly world\n"; stdout != want || code != 7 {
		t.Errorf("code %d, standard output %q, want 7 and %q; standard error %q", code, stdout, want, stderr)
	}
}
