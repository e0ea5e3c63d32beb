package readclients

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

// useJavaScript runs the JavaScript client (npm: @kubernetes/client-node) on built-in and custom
// resources: get, list, watch, informer, and a list that is compressed because the client asks for
// gzip by default.
func useJavaScript(t *testing.T, ctx context.Context) {
	node := program(t, "node")
	script := filepath.Join(installModules(t, ctx), "client.mjs")
	namespace := newClusterNamespace(t, ctx)
	api := cluster.API()
	const many = 300
	text := fmt.Sprintf("%01000d", 7)
	harness.Check(t, harness.InParallel(ctx, many, func(ctx context.Context, i int) error {
		_, err := api.Create(ctx, maps(namespace), configMap(fmt.Sprintf("map-%d", i), text))
		return err
	}))
	_, err := api.Create(ctx, gizmos(namespace), gizmo("one", "more"))
	harness.Check(t, err)

	cmd := exec.CommandContext(ctx, node, script, cluster.Kubeconfig, namespace)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("node %s: %v\n%s%s", script, err, out, stderr.String())
	}
	var got struct {
		Listed   []string `json:"listed"`
		Encoding string   `json:"encoding"`
		Gizmo    string   `json:"gizmo"`
		Missing  int      `json:"missing"`
		Watched  []string `json:"watched"`
		Informed []string `json:"informed"`
		Gizmos   []string `json:"gizmos"`
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("node %s printed %q: %v", script, out, err)
	}
	list, err := api.List(ctx, maps(namespace), "")
	harness.Check(t, err)
	if fmt.Sprint(got.Listed) != fmt.Sprint(list.Names()) || len(got.Listed) < many {
		t.Errorf("listed %d ConfigMaps, want %d", len(got.Listed), len(list.Items))
	}
	if got.Encoding != "gzip" || got.Gizmo != "more" || got.Missing != 404 {
		t.Errorf("list encoding %q, want gzip; field of the custom resource %q, want more; missing object %d, want 404", got.Encoding, got.Gizmo, got.Missing)
	}
	for what, events := range map[string][]string{"watch": got.Watched, "informer": got.Informed, "informer of custom resources": got.Gizmos} {
		if want := "[add late update late delete late]"; fmt.Sprint(events) != want {
			t.Errorf("%s: got the events %v, want %v", what, events, want)
		}
	}
}

// installModules returns a directory with the scripts of testdata/js and the modules of
// package-lock.json. The modules are cached in the user's cache directory.
func installModules(t *testing.T, ctx context.Context) string {
	t.Helper()
	npm := program(t, "npm")
	dir := t.TempDir()
	harness.Check(t, os.CopyFS(dir, os.DirFS("testdata/js")))
	lock := harness.Must[[]byte](t)(os.ReadFile("testdata/js/package-lock.json"))
	cache := harness.Must[string](t)(os.UserCacheDir())
	kept := filepath.Join(cache, "strata-test", fmt.Sprintf("js-%x", sha256.Sum256(lock)), "node_modules")
	if _, err := os.Stat(kept); err != nil {
		cmd := exec.CommandContext(ctx, npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund")
		cmd.Dir = dir
		if out, err := cmd.CombinedOutput(); err != nil {
			testrequire.Missing(t, "npm", fmt.Sprintf("npm ci fails: %v\n%s", err, out))
		}
		harness.Check(t, os.MkdirAll(filepath.Dir(kept), 0o755))
		if err := os.Rename(filepath.Join(dir, "node_modules"), kept); err != nil {
			// another file system, or a concurrent test has cached them
			t.Logf("the modules are not stored for the next run: %v", err)
			return dir
		}
	}
	harness.Check(t, os.Symlink(kept, filepath.Join(dir, "node_modules")))
	return dir
}
