package history

import (
	"bytes"
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

	"github.com/stratakube/strata/server/test/internal/harness"
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

// block matches the sessions of the document, command those in it with their output.
var (
	block   = regexp.MustCompile("(?s)```console\n(.*?)```")
	command = regexp.MustCompile(`(?m)^\$ (.*)\n((?:[^$].*\n|\n)*)`)
)

// variable are the parts of the output that differ between two runs, with their replacements.
var variable = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ`), "TIME"},
	{regexp.MustCompile(`https://127\.0\.0\.1:\d+`), "URL"},
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}`), "UID"},
	{regexp.MustCompile(`\b\d+(ms|s|m\d+s|m|h)\b`), "AGE"},
	{regexp.MustCompile(`(?m)^.* so far, AGE\n`), ""}, // progress, on a slow machine
	{regexp.MustCompile(`\b(revision|to) \d+\b`), "$1 N"},
	{regexp.MustCompile(`\b\d{2,}\b`), "N"},
	{regexp.MustCompile(` +`), " "},
}

// numbers are those of top, with their units.
var numbers = regexp.MustCompile(`[0-9N.]+( [KM]iB|%)?`)

func invariable(text string) string {
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.with)
	}
	return text
}

// TestDocument_Sessions_HaveTheirOutput runs the commands of docs/history.md in order, and compares their output. With -update, the
// output is written into the document. $REV in a command is the revision that the command before has printed.
func TestDocument_Sessions_HaveTheirOutput(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	text := harness.Must[[]byte](t)(os.ReadFile(document))
	own := env.APIServer(env.Etcd(), "--disable-admission-plugins=ServiceAccount")
	dir := plugin(t)
	revision, commands := "", 0
	result := block.ReplaceAllFunc(text, func(session []byte) []byte {
		return command.ReplaceAllFunc(session, func(part []byte) []byte {
			match := command.FindSubmatch(part)
			commands++
			args := strings.Fields(string(match[1]))
			if args[0] != "kubectl" {
				t.Fatalf("command %q is not kubectl", match[1])
			}
			for i := range args {
				args[i] = strings.ReplaceAll(strings.Trim(args[i], "'"), "$REV", revision)
			}
			out, _ := kubectl(t, ctx, dir, own.Kubeconfig, args[1:]...)
			if out != "" && !strings.HasSuffix(out, "\n") {
				out += "\n" // as the prompt of a terminal
			}
			if n := regexp.MustCompile(`^\d+\n?$`).FindString(out); n != "" {
				revision = strings.TrimSpace(n)
			}
			if got, want := invariable(out), invariable(string(match[2])); got != want && (args[2] != "top" || numbers.ReplaceAllString(got, "N") != numbers.ReplaceAllString(want, "N")) {
				if !*update {
					t.Errorf("%s prints\n%s\nand docs/history.md has\n%s\n(go test -run TestDocument -update writes it)", match[1], out, match[2])
				}
				return []byte("$ " + string(match[1]) + "\n" + out)
			}
			return part
		})
	})
	if commands < 10 {
		t.Errorf("docs/history.md has %d commands only", commands)
	}
	if *update && !bytes.Equal(result, text) {
		harness.Check(t, os.WriteFile(document, result, 0o644))
	}
}

// TestKrewManifest_Build_NamesItsArchive builds the archive of one platform and reads the manifest.
func TestKrewManifest_Build_NamesItsArchive(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	dir := t.TempDir()
	cmd := exec.CommandContext(ctx, "../../../../deploy/krew/build", "v1.2.3", "https://example.com/files/", dir)
	cmd.Env = append(os.Environ(), "PLATFORMS="+runtime.GOOS+"/"+runtime.GOARCH)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
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
	harness.Check(t, yaml.Unmarshal(harness.Must[[]byte](t)(os.ReadFile(filepath.Join(dir, "strata.yaml"))), &manifest))
	if manifest.APIVersion != "krew.googlecontainertools.github.com/v1alpha2" || manifest.Kind != "Plugin" || manifest.Metadata.Name != "strata" ||
		manifest.Spec.Version != "v1.2.3" || len(manifest.Spec.ShortDescription) > 50 || len(manifest.Spec.Platforms) != 1 {
		t.Fatalf("manifest %+v", manifest)
	}
	p := manifest.Spec.Platforms[0]
	archive := "kubectl-strata_" + runtime.GOOS + "_" + runtime.GOARCH + ".tar.gz"
	sum := fmt.Sprintf("%x", sha256.Sum256(harness.Must[[]byte](t)(os.ReadFile(filepath.Join(dir, archive)))))
	if p.URI != "https://example.com/files/"+archive || p.SHA256 != sum || p.Bin != "kubectl-strata" ||
		p.Selector.MatchLabels["os"] != runtime.GOOS || p.Selector.MatchLabels["arch"] != runtime.GOARCH {
		t.Errorf("platform %+v, sum %s", p, sum)
	}
	out, err := exec.CommandContext(ctx, "tar", "-tzf", filepath.Join(dir, archive)).Output()
	if harness.Check(t, err); string(out) != "LICENSE\nkubectl-strata\n" {
		t.Errorf("archive has\n%s", out)
	}
}
