// Package history tests `strata history` and the plugin kubectl-strata against servers with real
// writes.
package history

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/kube/revisiontimes"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/transcript"
)

const testTimeout = 10 * time.Minute

// The server of this package runs no controllers: only the tests write to their namespaces.
var (
	env    *harness.Env
	etcd   *harness.Etcd
	server *harness.Server
	api    *harness.API
)

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		env, etcd = e, e.Etcd()
		server = e.APIServer(etcd, "--disable-admission-plugins=ServiceAccount")
		api = server.API()
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

func maps(namespace string) string { return "/api/v1/namespaces/" + namespace + "/configmaps" }

func configMap(name string, labels object, data object) object {
	return object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": name, "labels": labels}, "data": data}
}

// run runs `strata history` against a server.
func run(t *testing.T, ctx context.Context, s *harness.Server, args ...string) harness.Result {
	t.Helper()
	return harness.Must[harness.Result](t)(env.Run(ctx, "", append([]string{"history", "--kubeconfig=" + s.Kubeconfig}, args...)...))
}

// ok runs `strata history` against the shared server, which has to succeed, and returns its
// standard output.
func ok(t *testing.T, ctx context.Context, args ...string) string {
	t.Helper()
	r := run(t, ctx, server, args...)
	if r.Code != 0 {
		t.Fatalf("history %s: exit code %d\n%s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// fails runs `strata history` against a server, which has to fail with one line that has all texts.
// The exit code is 2 if the line names the help of the command, because the command line is wrong,
// and otherwise 1.
func fails(t *testing.T, ctx context.Context, s *harness.Server, want []string, args ...string) {
	t.Helper()
	r := run(t, ctx, s, args...)
	r.Stderr = transcript.WithoutProgress(r.Stderr)
	code := 1
	if strings.HasSuffix(r.Stderr, " --help)\n") {
		code = 2
	}
	if r.Code != code || r.Stdout != "" || strings.Count(r.Stderr, "\n") != 1 {
		t.Errorf("history %s: exit code %d, standard output %q, standard error %q; want one line of an error", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	for _, text := range want {
		if !strings.Contains(r.Stderr, text) {
			t.Errorf("history %s: the error is %q, want %q in it", strings.Join(args, " "), r.Stderr, text)
		}
	}
}

// decoded runs `strata history ... -o json` and decodes its output.
func decoded[T any](t *testing.T, ctx context.Context, args ...string) (result T) {
	t.Helper()
	out := ok(t, ctx, append(args, "-o", "json")...)
	if err := json.Unmarshal([]byte(out), &result); err != nil {
		t.Fatalf("history %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return result
}

// fields returns the lines of a table, with one space between the columns.
func fields(table string) (lines []string) {
	for _, line := range strings.Split(strings.TrimSpace(table), "\n") {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	return lines
}

// revisionTimes requests the times of revisions as a user; "" is the administrator.
func revisionTimes(ctx context.Context, s *harness.Server, user, path string) (*harness.Response, *revisiontimes.RevisionTimes, error) {
	config := rest.CopyConfig(s.Config)
	config.Impersonate.UserName = user
	r, err := s.APIFor(config).DoAs(ctx, http.MethodGet, path, "", "", revisiontimes.MediaType, nil)
	if err != nil || r.Code != http.StatusOK {
		return r, nil, err
	}
	times := &revisiontimes.RevisionTimes{}
	return r, times, json.Unmarshal(r.Body, times)
}

// timeOf waits until the server has recorded a time at or after a revision, which later writes do
// not change: a record that is a second old. Reads of that time see the revision.
func timeOf(t *testing.T, ctx context.Context, revision int64) (at time.Time) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, times, err := revisionTimes(ctx, server, "", "/api/v1/configmaps")
		if err != nil {
			return false, err
		}
		var known bool
		at, known = times.TimeOf(revision)
		return known && times.Now.Sub(at) > time.Second, nil
	}))
	return at
}

// plugin returns a directory with the plugin, which is in its PATH then.
func plugin(t *testing.T) string {
	t.Helper()
	path := harness.Must[string](t)(testbin.Build("test/kubectl-strata", "server", "./cmd/kubectl-strata"))
	dir := t.TempDir()
	for _, name := range []string{"kubectl-strata", "kubectl_complete-strata"} {
		harness.Check(t, os.Symlink(path, filepath.Join(dir, name)))
	}
	return dir
}

// kubectl runs `strata kubectl` with the plugin of a directory in its PATH.
func kubectl(t *testing.T, ctx context.Context, dir, kubeconfig string, args ...string) (string, error) {
	t.Helper()
	binary := harness.Must[string](t)(harness.Binary())
	cmd := exec.CommandContext(ctx, binary, append([]string{"kubectl"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOME="+dir, "KUBECONFIG="+kubeconfig)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
