package testserver

import (
	"context"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// All tests use one host: some settings of API servers are global.
func TestHost(t *testing.T) {
	dir, err := os.MkdirTemp("", "testserver-")
	testcheck.NoError(t, err)
	defer removeDir(dir)
	h := newHost(context.WithoutCancel(t.Context()), dir, nil)
	defer closeHost(t, h)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	t.Run("Stop_DeletesTheDataOfOneControlPlane", func(t *testing.T) { testStop(t, ctx, h) })
	t.Run("Start_TemplateHasNoLeases", func(t *testing.T) { testTemplate(t, h) })
	t.Run("Start_Further_FindsSpareThatRuns", func(t *testing.T) { testSpares(t, ctx, h) })
	t.Run("Start_OtherFlags_SharesNeitherTemplateNorSchemas", func(t *testing.T) { testOtherFlags(t, ctx, h) })
	t.Run("Start_Cancelled_LeavesNoData", func(t *testing.T) { testCancelled(t, ctx, h) })
}

// closeHost stops everything that the end of the process stops otherwise.
func closeHost(t *testing.T, h *host) {
	h.mu.Lock()
	controlPlanes, spares := maps.Clone(h.controlPlanes), slices.Clone(h.spares)
	h.mu.Unlock()
	for name := range controlPlanes {
		if err := h.stop(name); err != nil {
			t.Error(err)
		}
	}
	for _, spare := range spares {
		if spare.up != nil {
			// upstream's server exits the process if it is stopped while its start hooks run
			<-spare.up
		}
		if err := spare.stop(); err != nil {
			t.Error(err)
		}
	}
	if h.etcd != nil {
		h.client.Close()
		h.etcd.Close()
	}
}

func startControlPlane(t *testing.T, ctx context.Context, h *host, flags ...string) (Response, *kubernetes.Clientset) {
	t.Helper()
	r, err := h.start(ctx, flags)
	testcheck.NoError(t, err)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: r.URL, TLSClientConfig: rest.TLSClientConfig{CAData: r.CA, CertData: r.Cert, KeyData: r.Key}})
	testcheck.NoError(t, err)
	return r, client
}

// keysOf returns the number of keys of a control plane in etcd.
func keysOf(t *testing.T, ctx context.Context, h *host, controlPlane string) int64 {
	t.Helper()
	response, err := h.client.Get(ctx, "/"+controlPlane+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	testcheck.NoError(t, err)
	return response.Count
}

func testStop(t *testing.T, ctx context.Context, h *host) {
	first, firstClient := startControlPlane(t, ctx, h)
	second, secondClient := startControlPlane(t, ctx, h)
	for _, client := range []*kubernetes.Clientset{firstClient, secondClient} {
		object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "same"}}
		if _, err := client.CoreV1().ConfigMaps("default").Create(ctx, object, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	before := keysOf(t, ctx, h, first.ControlPlane)
	if before < 100 {
		t.Fatalf("a control plane has %d keys, want the objects of a new cluster", before)
	}
	testcheck.NoError(t, h.stop(second.ControlPlane))
	if n := keysOf(t, ctx, h, second.ControlPlane); n != 0 {
		t.Errorf("%d keys are left", n)
	}
	if _, err := os.Stat(filepath.Join(h.dir, second.ControlPlane)); !os.IsNotExist(err) {
		t.Errorf("the directory of a stopped control plane: %v", err)
	}
	if _, err := firstClient.CoreV1().ConfigMaps("default").Get(ctx, "same", metav1.GetOptions{}); err != nil {
		t.Errorf("read from the other control plane: %v", err)
	}
	if err := h.stop(second.ControlPlane); err != nil {
		t.Errorf("second stop: %v", err)
	}
	if _, err := h.user(UserRequest{ControlPlane: second.ControlPlane, Name: "jane"}); err == nil {
		t.Error("a stopped control plane issued a certificate")
	}
	if _, err := h.user(UserRequest{ControlPlane: first.ControlPlane}); err == nil {
		t.Error("a certificate without a name was issued")
	}
}

func testTemplate(t *testing.T, h *host) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.copied[""]) < 100 {
		t.Errorf("the template has %d keys, want the objects of a new cluster", len(h.copied[""]))
	}
	for key := range h.copied[""] {
		if strings.HasPrefix(key, "/leases/") || strings.Contains(key, "lease") && !strings.Contains(key, "kube-node-lease") {
			t.Errorf("the template has %s, which belongs to one server", key)
		}
	}
}

// testSpares is after two starts.
func testSpares(t *testing.T, ctx context.Context, h *host) {
	h.mu.Lock()
	spares := slices.Clone(h.spares)
	h.mu.Unlock()
	if len(spares) != runningSpares {
		t.Fatalf("%d spare control planes, want %d", len(spares), runningSpares)
	}
	next := spares[len(spares)-1]
	select {
	case <-next.up:
	case <-ctx.Done():
		t.Fatal("the spare control plane does not become ready")
	}
	for range spares {
		r, client := startControlPlane(t, ctx, h)
		if _, err := client.CoreV1().Namespaces().Get(ctx, "default", metav1.GetOptions{}); err != nil {
			t.Errorf("%s: %v", r.ControlPlane, err)
		}
		if err := h.stop(r.ControlPlane); err != nil {
			t.Error(err)
		}
		if r.ControlPlane == next.name {
			return
		}
	}
	t.Errorf("%d starts did not use the spare control plane %s", len(spares), next.name)
}

func testOtherFlags(t *testing.T, ctx context.Context, h *host) {
	r, client := startControlPlane(t, ctx, h, "--service-cluster-ip-range=10.7.0.0/24", "--runtime-config=batch/v1=false")
	service, err := client.CoreV1().Services("default").Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil || service.Spec.ClusterIP != "10.7.0.1" {
		t.Errorf("service kubernetes: %v, error %v", service, err)
	}
	if document, err := client.RESTClient().Get().AbsPath("/openapi/v3").DoRaw(ctx); err != nil || strings.Contains(string(document), "apis/batch/v1\"") {
		t.Errorf("the OpenAPI documents have a version that is off, or error %v", err)
	}
	if err := h.stop(r.ControlPlane); err != nil {
		t.Error(err)
	}
}

func testCancelled(t *testing.T, ctx context.Context, h *host) {
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := h.start(cancelled, []string{"--request-timeout=30s"}); err == nil {
		t.Fatal("a cancelled start succeeded")
	}
	response, err := h.client.Get(ctx, "/", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	testcheck.NoError(t, err)
	h.mu.Lock()
	defer h.mu.Unlock()
	known := map[string]bool{}
	for controlPlane := range h.controlPlanes {
		known[controlPlane] = true
	}
	for _, spare := range h.spares {
		known[spare.name] = true
	}
	for _, kv := range response.Kvs {
		if controlPlane, _, _ := strings.Cut(strings.TrimPrefix(string(kv.Key), "/"), "/"); strings.HasPrefix(controlPlane, "control-plane-") && !known[controlPlane] {
			t.Errorf("key %s is of no control plane", kv.Key)
		}
	}
}

func TestCheckFlags_RefusesFlagsOfProcessAndHost(t *testing.T) {
	for flag, ok := range map[string]bool{
		"--runtime-config=api/alpha=true": true, "--enable-admission-plugins=PodSecurity": true,
		"--feature-gates=A=true": false, "--feature_gates=A=true": false, "--etcd-prefix=/x": false, "-v=2": false, "x": false,
	} {
		if err := checkFlags([]string{flag}); (err == nil) != ok {
			t.Errorf("%s: error %v", flag, err)
		}
	}
}

// The client is in another module, so that it depends on nothing of the server.
func TestProtocol_OfClientAndServer_IsEqual(t *testing.T) {
	for _, pattern := range []string{`(?s)var processFlags = \[\]string\{(.*?)\n\}`, `(?m)^const [pP]rotocol = (\d+)$`} {
		var found [2]string
		for i, files := range []string{"*.go", "../../../stratatest/*.go"} {
			paths, err := filepath.Glob(files)
			testcheck.NoError(t, err)
			for _, path := range paths {
				text, err := os.ReadFile(path)
				testcheck.NoError(t, err)
				if match := regexp.MustCompile(pattern).FindSubmatch(text); match != nil {
					found[i] = string(match[1])
				}
			}
		}
		if found[0] == "" || found[0] != found[1] {
			t.Errorf("%s: the test server has %q, the client %q", pattern, found[0], found[1])
		}
	}
}

func TestCutListener_Cut_ClosesEarlierAndLaterConnections(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	l := newCutListener(inner)
	defer l.Close()
	for _, cutFirst := range []bool{false, true} {
		if cutFirst {
			l.cut()
		}
		client, err := net.Dial("tcp", l.Addr().String())
		testcheck.NoError(t, err)
		defer client.Close()
		if _, err := l.Accept(); err != nil {
			t.Fatal(err)
		}
		l.cut()
		if _, err := client.Read(make([]byte, 1)); err == nil {
			t.Error("a cut connection delivered data")
		}
	}
	if len(l.conns) > 0 {
		t.Errorf("%d connections are kept", len(l.conns))
	}
}

func TestRun_DirectoryWithOtherFiles_IsRefusedAndRemains(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "mine")
	testcheck.NoError(t, os.WriteFile(path, nil, 0o600))
	err := run(t.Context(), dir, nil, strings.NewReader(""), io.Discard)
	if err == nil || !strings.Contains(err.Error(), "contains mine") || !strings.Contains(err.Error(), "--dir") {
		t.Errorf("error %v, want one that names the file and --dir", err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the file of the user: %v", err)
	}
}
