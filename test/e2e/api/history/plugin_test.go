package history

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/transcript"
)

// TestPlugin_Kubectl_RunsAndCompletes calls the plugin by kubectl.
func TestPlugin_Kubectl_RunsAndCompletes(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	dir := plugin(t)
	namespace := harness.NewName("plugin")
	story(t, ctx, namespace)
	for args, want := range map[string]string{
		"strata log configmap/a -o name -n " + namespace:  "configmap/a",
		"strata get cm -o name -n " + namespace:           "configmap/a\nconfigmap/b",
		"strata --help":                                   "kubectl strata COMMAND",
		"strata get --help":                               "\n  kubectl strata get pods -A --at 5m\n",
		"__complete strata ":                              "replay",
		"__complete strata get configm":                   "configmaps",
		"__complete strata get cm -n " + namespace + " b": "b",
		"__complete strata get -o ":                       "yaml",
		"plugin list":                                     dir + "/kubectl-strata",
	} {
		arguments := strings.Split(args, " ")
		if out, err := kubectl(t, ctx, dir, server.Kubeconfig, arguments...); err != nil || !strings.Contains(out, want) {
			t.Errorf("kubectl %s: %v, no %q in\n%s", args, err, want, out)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out, err := kubectl(t, ctx, dir, server.Kubeconfig, "strata", "completion", shell); err != nil || !strings.Contains(out, "kubectl-strata") {
			t.Errorf("completion for %s: %v\n%.200s", shell, err, out)
		}
	}
	if out, err := kubectl(t, ctx, dir, server.Kubeconfig, "strata", "get", "nonsense"); err == nil || !strings.HasPrefix(out, `kubectl strata: the server has no resource type "nonsense"`) {
		t.Errorf("an error: %v\n%s", err, out)
	}
}

var update = flag.Bool("update", false, "write the output of the commands of docs/history.md into it")

const document = "../../../../docs/history.md"

// TestDocument_Sessions_HaveTheirOutput runs the commands of docs/history.md in order, and compares
// their output. With -update, the output is written into the document. $REV in a command is the
// revision that the command before has printed.
func TestDocument_Sessions_HaveTheirOutput(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	own := env.APIServer(env.Etcd(), "--disable-admission-plugins=ServiceAccount")
	dir := plugin(t)
	number := regexp.MustCompile(`^\d+\n?$`)
	revision := ""
	transcript.Document{
		Path:   document,
		Update: *update,
		Run: func(c transcript.Command) string {
			args := strings.Fields(c.Line)
			if args[0] != "kubectl" {
				t.Fatalf("command %q is not kubectl", c.Line)
			}
			for i := range args {
				args[i] = strings.ReplaceAll(strings.Trim(args[i], "'"), "$REV", revision)
			}
			out, _ := kubectl(t, ctx, dir, own.Kubeconfig, args[1:]...)
			if n := number.FindString(out); n != "" {
				revision = strings.TrimSpace(n)
			}
			return out
		},
		Same: func(c transcript.Command, got string) bool {
			if strings.HasPrefix(c.Line, "kubectl strata top") {
				return transcript.WithoutNumbers(got) == transcript.WithoutNumbers(c.Want)
			}
			return transcript.Invariable(got) == transcript.Invariable(c.Want)
		},
	}.Check(t, 10)
}

// TestKrewManifest_Release_NamesItsArchive makes the archive of one platform as a release does, and
// reads the manifest.
func TestKrewManifest_Release_NamesItsArchive(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), "go", "run", "./release", "-only-plugin", "-version", "1.2.3", "-url", "https://example.com/files/",
		"-plugin-platforms", runtime.GOOS+"/"+runtime.GOARCH, "-out", dir)
	cmd.Dir = "../../../../tools"
	cmd.Env = append(os.Environ(), "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	// not for the builds above, which take minutes the first time
	ctx := harness.Context(t, testTimeout)
	var manifest struct {
		APIVersion, Kind string
		Metadata         struct{ Name string }
		Spec             struct {
			Version, ShortDescription string
			Platforms                 []struct {
				Selector         struct{ MatchLabels map[string]string }
				URI, SHA256, Bin string
			}
		}
	}
	harness.Check(t, yaml.Unmarshal(harness.Must[[]byte](t)(os.ReadFile(filepath.Join(dir, "krew.yaml"))), &manifest))
	if manifest.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || manifest.Kind != "Plugin" || manifest.Metadata.Name != "strata" ||
		manifest.Spec.Version != "v1.2.3" || len(manifest.Spec.ShortDescription) > 50 || len(manifest.Spec.Platforms) != 1 {
		t.Fatalf("manifest %+v", manifest)
	}
	p := manifest.Spec.Platforms[0]
	archive := "kubectl-strata-1.2.3-" + runtime.GOOS + "-" + runtime.GOARCH + ".tar.gz"
	sum := fmt.Sprintf("%x", sha256.Sum256(harness.Must[[]byte](t)(os.ReadFile(filepath.Join(dir, archive)))))
	if p.URI != "https://example.com/files/"+archive || p.SHA256 != sum || p.Bin != "kubectl-strata" ||
		p.Selector.MatchLabels["os"] != runtime.GOOS || p.Selector.MatchLabels["arch"] != runtime.GOARCH {
		t.Errorf("platform %+v, sum %s", p, sum)
	}
	out, err := exec.CommandContext(ctx, "tar", "-tzf", filepath.Join(dir, archive)).Output()
	harness.Check(t, err)
	for _, want := range []string{"LICENSE\n", "kubectl-strata\n", "licenses/k8s.io/client-go"} {
		if !strings.Contains("\n"+string(out), "\n"+want) {
			t.Errorf("archive lacks %q:\n%s", want, out)
		}
	}
}
