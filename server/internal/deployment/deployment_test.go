// Package deployment tests the files of deploy/ that need no running server: manifests decode
// strictly with Kubernetes' scheme, their flags exist, kubeadm's code applies the patches,
// kustomizations build, systemd accepts the unit.
package deployment

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/kubernetes/cmd/kubeadm/app/apis/kubeadm"
	"k8s.io/kubernetes/cmd/kubeadm/app/phases/controlplane"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	_ "k8s.io/kubernetes/pkg/apis/policy/install"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/version"
)

const deploy = "../../../deploy"

var update = flag.Bool("update", false, "write deploy/monitoring/prometheusrule.yaml")

// decode decodes manifests with Kubernetes' scheme: an unknown or repeated field is an error.
func decode(t *testing.T, manifests []byte) (objects []runtime.Object) {
	t.Helper()
	decoder := serializer.NewCodecFactory(legacyscheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for document := range strings.SplitSeq(string(manifests), "\n---\n") {
		o, _, err := decoder.Decode([]byte(document), nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, document)
		}
		objects = append(objects, o)
	}
	return objects
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(deploy, path))
	testcheck.NoError(t, err)
	return text
}

// requireCommand fails the test unless the words are a command line of `strata apiserver` whose
// flags are accepted, and whose end without an etcd fits into the time that the system grants it.
func requireCommand(t *testing.T, words []string, granted time.Duration) {
	t.Helper()
	if len(words) < 10 || words[0] != "strata" || words[1] != "apiserver" {
		t.Fatalf("%q is not strata apiserver with flags", words)
	}
	flags := apiserver.NewCommand().Flags()
	if err := flags.Parse(words[2:]); err != nil {
		t.Errorf("%q: %v", words, err)
	}
	end := apiserver.HooksTimeout
	for _, name := range []string{"shutdown-delay-duration", "shutdown-watch-termination-grace-period", "request-timeout"} {
		d, err := flags.GetDuration(name)
		testcheck.NoError(t, err)
		end += d
	}
	if granted < end {
		t.Errorf("%q ends after %v at the latest, and is killed after %v", words, end, granted)
	}
	seen := map[string]bool{}
	for _, word := range words[2:] {
		name, _, _ := strings.Cut(strings.TrimPrefix(word, "--"), "=")
		if f := flags.Lookup(name); f == nil || f.Hidden || f.Deprecated != "" {
			t.Errorf("the flag --%s is hidden or deprecated", name)
		}
		if seen[name] {
			t.Errorf("the flag --%s is set twice", name)
		}
		seen[name] = true
	}
}

// gracePeriod returns that of a pod; Kubernetes' default is 30 s.
func gracePeriod(pod corev1.PodSpec) time.Duration {
	if seconds := pod.TerminationGracePeriodSeconds; seconds != nil {
		return time.Duration(*seconds) * time.Second
	}
	return corev1.DefaultTerminationGracePeriodSeconds * time.Second
}

// requireMounted fails the test unless each file that a flag names is below a mount of the
// container.
func requireMounted(t *testing.T, c corev1.Container) {
	t.Helper()
	for _, word := range slices.Concat(c.Command, c.Args) {
		_, path, ok := strings.Cut(word, "=/")
		if ok && !slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool { return strings.HasPrefix("/"+path+"/", m.MountPath+"/") }) {
			t.Errorf("%s is not in a volume", word)
		}
	}
}

func TestStaticPod_FlagsExist(t *testing.T) {
	pod := decode(t, read(t, "static-pod/kube-apiserver.yaml"))[0].(*corev1.Pod)
	container := pod.Spec.Containers[0]
	requireCommand(t, container.Command, gracePeriod(pod.Spec))
	requireMounted(t, container)
	address := "--advertise-address=" + container.LivenessProbe.HTTPGet.Host
	if !slices.Contains(container.Command, address) {
		t.Errorf("the probes have another address than the command: no %s", address)
	}
}

// writeManifest lets kubeadm write the manifest of kube-apiserver, with the patches of a directory,
// "" for none.
func writeManifest(t *testing.T, patches string) (path string, err error) {
	t.Helper()
	dir := t.TempDir()
	cluster := &kubeadm.ClusterConfiguration{
		KubernetesVersion: version.Get().Kubernetes, CertificatesDir: "/etc/kubernetes/pki", FeatureGates: map[string]bool{},
		Networking: kubeadm.Networking{ServiceSubnet: "10.96.0.0/12", DNSDomain: "cluster.local"},
		Etcd:       kubeadm.Etcd{Local: &kubeadm.LocalEtcd{}},
	}
	endpoint := &kubeadm.APIEndpoint{AdvertiseAddress: "192.0.2.10", BindPort: 6443}
	return filepath.Join(dir, "kube-apiserver.yaml"), controlplane.CreateStaticPodFiles(dir, patches, cluster, endpoint, false, "kube-apiserver")
}

func kubeadmPod(t *testing.T, patches string) *corev1.Pod {
	t.Helper()
	path, err := writeManifest(t, patches)
	testcheck.NoError(t, err)
	text, err := os.ReadFile(path)
	testcheck.NoError(t, err)
	return decode(t, text)[0].(*corev1.Pod)
}

// TestKubeadmPatches_AppliedByKubeadm_ChangeCommandAndImageOnly: kubeadm's own code writes the
// manifest with the patches.
func TestKubeadmPatches_AppliedByKubeadm_ChangeCommandAndImageOnly(t *testing.T) {
	stock, patched := kubeadmPod(t, ""), kubeadmPod(t, filepath.Join(deploy, "kubeadm/patches"))
	before, after := stock.Spec.Containers[0], patched.Spec.Containers[0]
	requireCommand(t, after.Command, gracePeriod(patched.Spec))
	if got, want := after.Command[2:], before.Command[1:]; !slices.Equal(got, want) {
		t.Errorf("the flags are %q, want %q", got, want)
	}
	if after.Image != "strata:latest" || after.SecurityContext == nil || *after.SecurityContext.RunAsUser != 0 {
		t.Errorf("image %s, security context %v", after.Image, after.SecurityContext)
	}
	requireMounted(t, after)
	// Everything else is kubeadm's.
	after.Command, after.Image, after.ImagePullPolicy, after.SecurityContext = before.Command, before.Image, before.ImagePullPolicy, before.SecurityContext
	patched.Spec.Containers[0], patched.Spec.TerminationGracePeriodSeconds = after, stock.Spec.TerminationGracePeriodSeconds
	if got, want := asYAML(t, patched), asYAML(t, stock); got != want {
		t.Errorf("the patched manifest is\n%s\nwant\n%s", got, want)
	}
}

// TestKubeadmPatches_OtherCommand_Fail: a manifest whose command is not kube-apiserver's is not
// patched to something else.
func TestKubeadmPatches_OtherCommand_Fail(t *testing.T) {
	for _, again := range []bool{false, true} {
		patches := t.TempDir() // kubeadm reads a directory once
		names := []string{"kube-apiserver0+json.yaml"}
		if again {
			names = append(names, "kube-apiserver0again+json.yaml")
		}
		for _, name := range names {
			testcheck.NoError(t, os.WriteFile(filepath.Join(patches, name), read(t, "kubeadm/patches/kube-apiserver0+json.yaml"), 0o600))
		}
		if _, err := writeManifest(t, patches); (err != nil) != again {
			t.Errorf("patch applied again: %v: error %v", again, err)
		}
	}
}

func asYAML(t *testing.T, o any) string {
	t.Helper()
	text, err := yaml.Marshal(o)
	testcheck.NoError(t, err)
	return string(text)
}

// kustomize builds a directory with the kubectl in the command.
func kustomize(t *testing.T, dir string) []byte {
	t.Helper()
	binary, err := testbin.Path()
	testcheck.NoError(t, err)
	cmd := exec.Command(binary, "kubectl", "kustomize", filepath.Join(deploy, dir))
	var failure bytes.Buffer
	cmd.Stderr = &failure
	built, err := cmd.Output()
	if err != nil || failure.Len() > 0 { // a warning is a deprecated field
		t.Fatalf("kustomize %s: %v\n%s", dir, err, &failure)
	}
	return built
}

func TestKustomize_ControlPlane_IsConsistent(t *testing.T) {
	for _, test := range []struct{ dir, namespace, etcd string }{
		{"kustomize/control-plane", "", "--etcd-servers=https://etcd:2379"},
		{"kustomize/example", "cluster-one", "--etcd-servers=https://etcd-0.etcd:2379,https://etcd-1.etcd:2379,https://etcd-2.etcd:2379"},
	} {
		t.Run(test.dir, func(t *testing.T) {
			var deployment *appsv1.Deployment
			var service *corev1.Service
			var budget *policyv1.PodDisruptionBudget
			for _, o := range decode(t, kustomize(t, test.dir)) {
				if got := o.(metav1.Object).GetNamespace(); got != test.namespace {
					t.Errorf("%T in namespace %q, want %q", o, got, test.namespace)
				}
				switch o := o.(type) {
				case *appsv1.Deployment:
					deployment = o
				case *corev1.Service:
					service = o
				case *policyv1.PodDisruptionBudget:
					budget = o
				default:
					t.Errorf("unexpected %T", o)
				}
			}
			template := deployment.Spec.Template
			c := template.Spec.Containers[0]
			words := append([]string{"strata"}, c.Args...) // the image's entry point
			for i, word := range words {
				words[i] = strings.Replace(word, "$("+c.Env[0].Name+")", "192.0.2.10", 1)
			}
			requireCommand(t, words, gracePeriod(template.Spec))
			requireMounted(t, c)
			if !slices.Contains(words, test.etcd) {
				t.Errorf("%q without %s", words, test.etcd)
			}
			selects := map[string]labels.Selector{"service": labels.SelectorFromSet(service.Spec.Selector)}
			for name, s := range map[string]*metav1.LabelSelector{"deployment": deployment.Spec.Selector, "budget": budget.Spec.Selector, "spread": template.Spec.TopologySpreadConstraints[0].LabelSelector} {
				selector, err := metav1.LabelSelectorAsSelector(s)
				testcheck.NoError(t, err)
				selects[name] = selector
			}
			for name, selector := range selects {
				if selector.Empty() || !selector.Matches(labels.Set(template.Labels)) {
					t.Errorf("the %s selects %q, the pods have %v", name, selector, template.Labels)
				}
			}
			if port := service.Spec.Ports[0]; port.TargetPort.String() != c.Ports[0].Name || !slices.Contains(words, fmt.Sprintf("--secure-port=%d", c.Ports[0].ContainerPort)) {
				t.Errorf("service port %v, container port %v", port, c.Ports[0])
			}
			if !*template.Spec.SecurityContext.RunAsNonRoot {
				t.Error("the pods may run as root")
			}
		})
	}
}

func TestKustomize_Monitoring_HasRulesAndDashboard(t *testing.T) {
	var rule, dashboard bool
	for document := range strings.SplitSeq(string(kustomize(t, "monitoring")), "\n---\n") {
		var o struct {
			Kind     string
			Metadata metav1.ObjectMeta
			Data     map[string]string
		}
		testcheck.NoError(t, yaml.Unmarshal([]byte(document), &o))
		rule = rule || o.Kind == "PrometheusRule"
		dashboard = dashboard || o.Kind == "ConfigMap" && o.Data["strata.json"] == string(read(t, "monitoring/dashboard.json")) && o.Metadata.Labels["grafana_dashboard"] == "1"
	}
	if !rule || !dashboard {
		t.Errorf("rule %v, dashboard %v", rule, dashboard)
	}
}

// TestPrometheusRule_EqualsRules compares the object of the Prometheus operator with rules.yaml.
// With -update (make generate) it writes the object.
func TestPrometheusRule_EqualsRules(t *testing.T) {
	const path = "monitoring/prometheusrule.yaml"
	var rules any
	testcheck.NoError(t, yaml.Unmarshal(read(t, "monitoring/rules.yaml"), &rules))
	text := "# The rules of rules.yaml for the Prometheus operator; make generate writes this file.\n" + asYAML(t, map[string]any{
		"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
		"metadata": map[string]any{"name": "strata", "labels": map[string]string{"app.kubernetes.io/name": "strata"}},
		"spec":     rules,
	})
	if *update {
		testcheck.NoError(t, os.WriteFile(filepath.Join(deploy, path), []byte(text), 0o644))
	}
	if string(read(t, path)) != text {
		t.Errorf("%s is stale: make generate", path)
	}
}

// unitValue matches a setting of a unit.
var unitValue = regexp.MustCompile(`(?m)^(\w+)=(.*)$`)

func TestSystemdUnit_IsValid(t *testing.T) {
	unit := read(t, "systemd/strata-apiserver.service")
	settings := map[string]string{}
	for _, s := range unitValue.FindAllSubmatch(unit, -1) {
		settings[string(s[1])] = string(s[2])
	}
	// The flags of the example, read as systemd reads the file.
	environment := regexp.MustCompile(`(?m)^#.*\n`).ReplaceAll(read(t, "systemd/apiserver.env"), nil)
	name, value, _ := strings.Cut(strings.ReplaceAll(string(environment), "\\\n", " "), "=")
	line := strings.Replace(settings["ExecStart"], "$"+name, value, 1)
	if strings.Contains(line, "$") || filepath.Base(settings["EnvironmentFile"]) != "apiserver.env" {
		t.Errorf("ExecStart is %q with %s", line, settings["EnvironmentFile"])
	}
	granted, err := time.ParseDuration(settings["TimeoutStopSec"] + "s")
	testcheck.NoError(t, err)
	requireCommand(t, strings.Fields(strings.TrimPrefix(line, "/usr/local/bin/")), granted)

	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		testrequire.Missing(t, "systemd-analyze", fmt.Sprintf("the unit's settings are not verified: %v", err))
	}
	binary, err := testbin.Path() // the program has to exist
	testcheck.NoError(t, err)
	binary, err = filepath.Abs(binary)
	testcheck.NoError(t, err)
	copied := filepath.Join(t.TempDir(), "strata-apiserver.service")
	testcheck.NoError(t, os.WriteFile(copied, bytes.ReplaceAll(unit, []byte("/usr/local/bin/strata"), []byte(binary)), 0o600))
	if out, err := exec.Command(analyze, "verify", "--man=no", copied).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}

// TestDockerfile_IsStaticAndNotRoot reads the instructions: nothing builds an image here.
func TestDockerfile_IsStaticAndNotRoot(t *testing.T) {
	text := regexp.MustCompile(`(?m)^#.*\n`).ReplaceAllString(string(read(t, "Dockerfile")), "")
	instructions := map[string][]string{}
	for line := range strings.SplitSeq(strings.TrimSpace(strings.ReplaceAll(text, "\\\n", " ")), "\n") {
		name, arguments, _ := strings.Cut(line, " ")
		instructions[name] = append(instructions[name], arguments)
	}
	for name, want := range map[string]string{
		"FROM": "scratch", "USER": "65532:65532", "ENTRYPOINT": `["/usr/local/bin/strata"]`, "COPY": "${BINARY} /usr/local/bin/strata",
	} {
		if got := instructions[name]; len(got) != 1 || got[0] != want {
			t.Errorf("%s %q, want %q", name, got, want)
		}
	}
	for name := range instructions {
		if !slices.Contains([]string{"FROM", "ARG", "LABEL", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}, name) {
			t.Errorf("instruction %s", name)
		}
	}
}

// TestFiles_NameNoRegistry: an image is strata with a tag, and no other host is named than those of
// examples.
func TestFiles_NameNoRegistry(t *testing.T) {
	image := regexp.MustCompile(`(?m)^\s*(?:- )?image: (.*)$`)
	host := regexp.MustCompile(`\b[a-z0-9-]+(\.[a-z0-9-]+)*\.(io|com|dev|org|net)/[a-z]`)
	allowed := regexp.MustCompile(`^(app\.|apiserver\.|kubeadm\.|kustomize\.|monitoring\.|pod-|topology)?[a-z0-9.-]*(k8s\.io|kubernetes\.io|coreos\.com|kind\.x-k8s\.io|github\.com)/[a-z]$`)
	err := filepath.WalkDir(deploy, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, match := range image.FindAllSubmatch(text, -1) {
			if name := string(match[1]); name != "strata" && name != "strata:latest" {
				t.Errorf("%s: image %s", path, name)
			}
		}
		for _, match := range host.FindAll(text, -1) {
			if !allowed.Match(match) {
				t.Errorf("%s names %s", path, match)
			}
		}
		return nil
	})
	testcheck.NoError(t, err)
}

// TestKindCluster_MountsPatches decodes the configuration strictly, with the fields that it uses.
func TestKindCluster_MountsPatches(t *testing.T) {
	var cluster struct {
		metav1.TypeMeta `json:",inline"`
		Name            string `json:"name"`
		Nodes           []struct {
			Role        string `json:"role"`
			ExtraMounts []struct {
				HostPath      string `json:"hostPath"`
				ContainerPath string `json:"containerPath"`
				ReadOnly      bool   `json:"readOnly"`
			} `json:"extraMounts"`
		} `json:"nodes"`
	}
	testcheck.NoError(t, yaml.UnmarshalStrict(read(t, "kind/cluster.yaml"), &cluster))
	mount := cluster.Nodes[0].ExtraMounts[0]
	if _, err := os.Stat(filepath.Join(deploy, mount.HostPath, "kube-apiserver0+json.yaml")); err != nil {
		t.Error(err)
	}
	if recipe := read(t, "kind/README.md"); !bytes.Contains(recipe, []byte("patches: {directory: "+mount.ContainerPath+"}")) || !bytes.Contains(recipe, []byte(cluster.Name+"-control-plane")) {
		t.Errorf("kind/README.md does not use %s or the name %s", mount.ContainerPath, cluster.Name)
	}
}
