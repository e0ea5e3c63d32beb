package up

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestUp_Restart_KeepsObjectsAndCredentials starts one data directory three times: it stops the
// first process, damages the data for a while, and kills the second process.
func TestUp_Restart_KeepsObjectsAndCredentials(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	users := userKubeconfig{filepath.Join(dir, "config")}
	first := start(t, dir, users.flag())
	first.requireUp(t)
	users.change(t, first)
	first.kubectl(t, "create", "namespace", "kept")
	first.kubectl(t, "-n", "kept", "create", "configmap", "c", "--from-literal=k=v")
	uid := first.kubectl(t, "-n", "kept", "get", "configmap", "c", "-o", "jsonpath={.metadata.uid}")
	// a controller creates the account
	first.kubectl(t, "-n", "kept", "wait", "--for=create", "serviceaccount/default", "--timeout="+timeout.String())
	token := first.kubectl(t, "-n", "kept", "create", "token", "default")
	kubeconfig, err := os.ReadFile(filepath.Join(dir, "strata-data", "kubeconfig"))
	testcheck.NoError(t, err)
	first.requireStop(t, terminate)
	if !strings.Contains(first.printed(), "stopped; the data remains in") {
		t.Error("the end was not shown")
	}

	data := filepath.Join(dir, "strata-data")
	requireDamageFound(t, data)
	open := 0 // modes as after a copy to another disk
	err = filepath.WalkDir(data, func(path string, entry os.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir():
			open++
			return os.Chmod(path, 0o755)
		case entry.Type().IsRegular():
			open++
			return os.Chmod(path, 0o644)
		}
		return nil
	})
	testcheck.NoError(t, err)

	second := start(t, dir, users.flag())
	second.requireUp(t)
	users.check(t, second)
	requirePrivate(t, data)
	if want := fmt.Sprintf("(%d such files and directories in total); access removed", open-1); !strings.Contains(second.printed(), want) {
		t.Errorf("the output lacks %q", want) // for all but the data directory itself
	}
	if got := second.kubectl(t, "-n", "kept", "get", "configmap", "c", "-o", "jsonpath={.metadata.uid} {.data.k}"); got != uid+" v" {
		t.Errorf("the object is %q, want %q", got, uid+" v")
	}
	if !strings.Contains(second.printed(), "certificates: using the existing ones") {
		t.Error("the certificates were created again")
	}
	// Credentials of clients remain valid: tokens, and the kubeconfig except for the port, which is
	// random in this test.
	whoami := second.kubectl(t, "--token="+strings.TrimSpace(token), "--client-certificate=", "--client-key=", "auth", "can-i", "--list")
	if !strings.Contains(whoami, "selfsubjectreviews") {
		t.Errorf("a token from before the restart may do:\n%s", whoami)
	}
	again, err := os.ReadFile(filepath.Join(dir, "strata-data", "kubeconfig"))
	testcheck.NoError(t, err)
	server := regexp.MustCompile(`server: .*`)
	if !bytes.Equal(server.ReplaceAll(kubeconfig, nil), server.ReplaceAll(again, nil)) {
		t.Error("the kubeconfig has changed")
	}

	second.kubectl(t, "create", "configmap", "acknowledged", "--from-literal=k=v")
	second.kill(t)
	third := start(t, dir, "--", "--strata-feature-gates=WatchBookmark=false")
	third.requireUp(t)
	if got := third.kubectl(t, "get", "configmap", "acknowledged", "-o", "jsonpath={.data.k}"); got != "v" {
		t.Errorf("after SIGKILL the object holds %q", got)
	}
	third.checkSealedTokens(t)
	third.requireStop(t, interrupt)
}

// userKubeconfig is the path of a kubeconfig that `strata up` writes and the user changes.
type userKubeconfig struct{ path string }

func (k userKubeconfig) flag() string { return "--kubeconfig=" + k.path }

func (k userKubeconfig) requirePrivate(t *testing.T) {
	t.Helper()
	if info, err := os.Stat(k.path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v (%v), want mode 0600", k.path, info, err)
	}
}

// change chooses a namespace, adds a context, and opens the file for others.
func (k userKubeconfig) change(t *testing.T, p *upProcess) {
	t.Helper()
	k.requirePrivate(t)
	p.kubectl(t, k.flag(), "config", "set-context", "--current", "--namespace=kube-system")
	p.kubectl(t, k.flag(), "config", "set-context", "another")
	testcheck.NoError(t, os.Chmod(k.path, 0o644))
}

// check demands the changes, of a private file that connects.
func (k userKubeconfig) check(t *testing.T, p *upProcess) {
	t.Helper()
	k.requirePrivate(t)
	if got := p.kubectl(t, k.flag(), "config", "view", "--minify", "-o", "jsonpath={..namespace}"); got != "kube-system" {
		t.Errorf("the namespace that the user chose became %q", got)
	}
	if got := p.kubectl(t, k.flag(), "config", "get-contexts", "-o", "name"); !strings.Contains(got, "another") {
		t.Errorf("the context of the user is missing; there are %q", got)
	}
	p.kubectl(t, k.flag(), "get", "configmaps")
}

// requireDamageFound damages files in the data directory of a stopped process, one at a time, and
// demands that a start reports each.
func requireDamageFound(t *testing.T, data string) {
	t.Helper()
	for file, want := range map[string]string{
		"pki/ca.pem":          "/pki from a backup, or remove it to create others",
		"etcd/member/snap/db": "or restore the data directory from a backup, or choose another one with --data-dir",
	} {
		path := filepath.Join(data, file)
		whole, err := os.ReadFile(path)
		testcheck.NoError(t, err)
		testcheck.NoError(t, os.WriteFile(path, []byte("damaged"), 0o600))
		_, stderr, code := runStrata(t, filepath.Dir(data), "", "up", "--secure-port=0")
		requireOneLine(t, stderr, code, want)
		testcheck.NoError(t, os.WriteFile(path, whole, 0o600))
	}
}

// checkSealedTokens demands that continue tokens are sealed, whatever the gates of the user, and
// continue a list.
func (p *upProcess) checkSealedTokens(t *testing.T) {
	t.Helper()
	page := func(token string) (next string) {
		var list struct {
			Metadata struct{ Continue string }
			Items    []any
		}
		text := p.kubectl(t, "get", "--raw", "/apis/rbac.authorization.k8s.io/v1/clusterroles?limit=5&continue="+token)
		if err := json.Unmarshal([]byte(text), &list); err != nil || len(list.Items) != 5 {
			t.Fatalf("page of %q: %v\n%s", token, err, text)
		}
		return list.Metadata.Continue
	}
	token := page("")
	if !strings.HasPrefix(token, "s1.") {
		t.Errorf("the token %q is not sealed", token)
	}
	page(token)
}

// requirePrivate fails the test unless all files in dir are accessible to their owner only.
func requirePrivate(t *testing.T, dir string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(dir, func(path string, entry os.DirEntry, err error) error {
		if err != nil || !entry.IsDir() && !entry.Type().IsRegular() {
			return err
		}
		want := os.FileMode(0o600)
		if entry.IsDir() {
			want = 0o700
		}
		info, err := entry.Info()
		if errors.Is(err, os.ErrNotExist) { // etcd renames files
			return nil
		}
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: mode %v (%v), want %v", path, info.Mode(), err, want)
		}
		files++
		return nil
	})
	if err != nil || files < 15 {
		t.Errorf("%d files: %v", files, err)
	}
}

func TestUp_NewDataDir_ServesCompleteCluster(t *testing.T) {
	t.Parallel()
	p := start(t, t.TempDir())
	p.requireUp(t)

	t.Run("prints three commands", p.checkNextLines)
	t.Run("the version is that of a release", p.checkVersion)
	t.Run("only the user reads the files", func(t *testing.T) {
		requirePrivate(t, filepath.Join(p.dir, "strata-data"))
	})
	t.Run("anonymous requests get 401", p.checkAnonymous)
	t.Run("RBAC refuses", func(t *testing.T) {
		stdout, _, code := p.tryKubectl(t, "", "auth", "can-i", "list", "secrets", "--as=system:serviceaccount:default:default")
		if strings.TrimSpace(stdout) != "no" || code != 1 {
			t.Errorf("a service account without a role: %q, code %d", stdout, code)
		}
	})
	t.Run("a deleted namespace is removed", p.checkNamespaceDeletion)
	t.Run("dependents of a deleted owner are collected", p.checkGarbageCollection)
	t.Run("a claim can be deleted", func(t *testing.T) {
		p.apply(t, `{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: claim}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}`)
		p.kubectl(t, "delete", "persistentvolumeclaim", "claim", "--timeout="+timeout.String())
	})
	t.Run("a deployment has pods", p.checkWorkload)
	t.Run("quotas count", p.checkQuota)
	t.Run("a pod gets its service account and root CA", p.checkPod)
	t.Run("services have no hosts", p.checkNoHosts)
	t.Run("token secrets are filled", func(t *testing.T) {
		p.apply(t, `{apiVersion: v1, kind: Secret, type: kubernetes.io/service-account-token, metadata: {name: token, annotations: {kubernetes.io/service-account.name: default}}}`)
		p.kubectl(t, "wait", "secret/token", "--for=jsonpath={.data.token}", "--timeout="+timeout.String())
	})
	t.Run("another one in the data directory is refused", p.checkInUse)

	t.Run("an open watch does not delay the stop", func(t *testing.T) {
		watch := prepare(t, p.dir, "kubectl", "get", "namespaces", "--watch")
		out, err := watch.StdoutPipe()
		testcheck.NoError(t, err)
		testcheck.NoError(t, watch.Start())
		if _, err := out.Read(make([]byte, 1)); err != nil { // the watch is open
			t.Fatal(err)
		}
		// By default, upstream's server would wait a minute for the watcher, which does not
		// disconnect, and then give up.
		p.requireStopWithin(t, terminate, 55*time.Second)
		_ = watch.Wait() // kubectl may report an error for the end of its watch
	})
}

func (p *upProcess) checkInUse(t *testing.T) {
	host := p.config(t).Host
	for _, port := range []string{"0", host[strings.LastIndex(host, ":")+1:]} {
		_, stderr, code := runStrata(t, p.dir, "", "up", "--secure-port="+port)
		requireOneLine(t, stderr, code, "); stop it, or choose another directory with --data-dir")
	}
	if got := p.kubectl(t, "get", "--raw", "/readyz"); got != "ok" {
		t.Errorf("the first is %q after the second", got)
	}
}

func (p *upProcess) checkNextLines(t *testing.T) {
	_, next, found := strings.Cut(p.printed(), "In another terminal, run:\n")
	if !found {
		t.Fatal("no commands are printed")
	}
	next, _, _ = strings.Cut(strings.TrimSpace(next), "\n\n")
	lines := strings.Split(next, "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines: %q", len(lines), lines)
	}
	for _, line := range lines[:2] { // the third line is for the shell
		_, args, found := strings.Cut(line, "/strata ")
		if !found {
			t.Fatalf("%q does not call strata", line)
		}
		if _, stderr, code := runStrata(t, p.dir, "", strings.Fields(args)...); code != 0 {
			t.Errorf("%s: code %d: %s", line, code, stderr)
		}
	}
	if want := "export KUBECONFIG=" + filepath.Join(p.dir, "strata-data", "kubeconfig"); !strings.Contains(lines[2], want) {
		t.Errorf("%q, want %q", lines[2], want)
	}
}

// checkWorkload demands that the controllers of workloads run by default. Without nodes, their pods
// remain Pending.
func (p *upProcess) checkWorkload(t *testing.T) {
	p.kubectl(t, "create", "deployment", "web", "--image=example.test/i", "--replicas=2")
	p.kubectl(t, "wait", "deployment/web", "--for=jsonpath={.status.replicas}=2", "--timeout="+timeout.String())
	if got := p.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].status.phase}"); got != "Pending Pending" {
		t.Errorf("the pods are %q", got)
	}
	p.kubectl(t, "delete", "deployment", "web")
	p.kubectl(t, "wait", "--for=delete", "pods", "-l", "app=web", "--timeout="+timeout.String())
}

func (p *upProcess) checkVersion(t *testing.T) {
	var v struct {
		ClientVersion, ServerVersion struct{ GitVersion string }
	}
	testcheck.NoError(t, json.Unmarshal([]byte(p.kubectl(t, "version", "-o", "json")), &v))
	for _, got := range []string{v.ClientVersion.GitVersion, v.ServerVersion.GitVersion} {
		if !strings.HasPrefix(got, "v1.37.2+strata") {
			t.Errorf("version %q", got)
		}
	}
}

func (p *upProcess) checkAnonymous(t *testing.T) {
	config := p.config(t)
	anonymous := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: rootCAs(t, config)}}}
	for _, path := range []string{"/version", "/healthz", "/livez", "/readyz", "/api", "/api/v1/namespaces"} {
		response, err := anonymous.Get(config.Host + path)
		testcheck.NoError(t, err)
		response.Body.Close()
		if response.StatusCode != http.StatusUnauthorized {
			t.Errorf("GET %s: %s, want 401", path, response.Status)
		}
	}
	if got := p.kubectl(t, "get", "--raw", "/readyz"); got != "ok" {
		t.Errorf("the administrator's GET /readyz: %q", got)
	}
}

func (p *upProcess) checkNamespaceDeletion(t *testing.T) {
	p.kubectl(t, "create", "namespace", "gone")
	p.kubectl(t, "-n", "gone", "create", "configmap", "c", "--from-literal=k=v")
	p.kubectl(t, "delete", "namespace", "gone", "--wait", "--timeout="+timeout.String())
	if _, stderr, code := p.tryKubectl(t, "", "get", "namespace", "gone"); code != 1 || !strings.Contains(stderr, "NotFound") {
		t.Errorf("after the deletion: code %d: %s", code, stderr)
	}
}

func (p *upProcess) checkGarbageCollection(t *testing.T) {
	p.kubectl(t, "create", "configmap", "owner")
	uid := p.kubectl(t, "get", "configmap", "owner", "-o", "jsonpath={.metadata.uid}")
	p.apply(t, `{apiVersion: v1, kind: ConfigMap, metadata: {name: owned, ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: owner, uid: `+uid+`}]}}`)
	p.kubectl(t, "delete", "configmap", "owner")
	p.kubectl(t, "wait", "--for=delete", "configmap/owned", "--timeout="+timeout.String())
}

func (p *upProcess) checkQuota(t *testing.T) {
	p.kubectl(t, "create", "namespace", "small")
	p.kubectl(t, "-n", "small", "create", "quota", "q", "--hard=secrets=1")
	p.kubectl(t, "-n", "small", "wait", "quota/q", "--for=jsonpath={.status.used.secrets}=0", "--timeout="+timeout.String())
	p.kubectl(t, "-n", "small", "create", "secret", "generic", "one")
	if _, stderr, code := p.tryKubectl(t, "", "-n", "small", "create", "secret", "generic", "two"); code != 1 || !strings.Contains(stderr, "exceeded quota") {
		t.Errorf("over the quota: code %d: %s", code, stderr)
	}
}

func (p *upProcess) checkPod(t *testing.T) {
	p.kubectl(t, "wait", "--for=create", "configmap/kube-root-ca.crt", "--timeout="+timeout.String())
	p.apply(t, `{apiVersion: v1, kind: Pod, metadata: {name: pod}, spec: {containers: [{name: c, image: example.test/i}]}}`)
	if got := p.kubectl(t, "get", "pod", "pod", "-o", "jsonpath={.spec.serviceAccountName}"); got != "default" {
		t.Errorf("the pod's service account is %q", got)
	}
	p.kubectl(t, "delete", "pod", "pod", "--timeout="+timeout.String())
}

// checkNoHosts demands that the API server connects to no service, nor to the proxy of the network.
func (p *upProcess) checkNoHosts(t *testing.T) {
	t.Helper()
	p.apply(t, `{apiVersion: v1, kind: Service, metadata: {name: s}, spec: {ports: [{port: 443, targetPort: 8080}]}}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: w}
webhooks:
- {name: w.example.test, admissionReviewVersions: [v1], sideEffects: None, failurePolicy: Fail, clientConfig: {service: {namespace: default, name: s}},
   objectSelector: {matchLabels: {hook: w}}, rules: [{apiGroups: [""], apiVersions: [v1], resources: [configmaps], operations: [CREATE]}]}
`)
	const hooked = `{apiVersion: v1, kind: ConfigMap, metadata: {name: hooked, labels: {hook: w}}}`
	requireSoon(t, func() bool { // the server reads the configuration with a watch
		_, stderr, code := p.tryKubectl(t, hooked, "create", "--dry-run=server", "-f", "-")
		if code != 0 && !strings.Contains(stderr, "no host has 10.0.0.") {
			t.Fatalf("the webhook: code %d: %s", code, stderr)
		}
		return code != 0
	})
	p.kubectl(t, "delete", "validatingwebhookconfiguration", "w")
}

// apply creates the object that manifest describes.
func (p *upProcess) apply(t *testing.T, manifest string) {
	t.Helper()
	if _, stderr, code := p.tryKubectl(t, manifest, "apply", "-f", "-"); code != 0 {
		t.Fatalf("kubectl apply: code %d: %s\n%s", code, stderr, manifest)
	}
}

// TestUp_SignalDuringStart_StopsAndRestarts interrupts one start after another, each at a later
// step, and then starts once more. In the long form each is in a new directory.
func TestUp_SignalDuringStart_StopsAndRestarts(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, step := range []string{"data directory:", "etcd: ready", "API server: starting", "Strata is up"} {
		p := start(t, dir)
		requireSoon(t, func() bool { return strings.Contains(p.printed(), step) })
		p.requireStop(t, terminate)
		if step != "Strata is up" && os.Getenv("STRATA_TEST_LONG") != "1" {
			continue
		}
		again := start(t, dir)
		again.requireUp(t)
		again.requireStop(t, terminate)
		dir = t.TempDir()
	}
}

func TestUp_EngineAndServerFlags_TakeEffect(t *testing.T) {
	t.Parallel()
	p := start(t, t.TempDir(), "--controllers=none", "--etcd-progress-notify-interval=100ms", "--", "--engine=upstream", "--anonymous-auth=true", "--v=1")
	p.requireUp(t)
	config := p.config(t)
	anonymous := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: rootCAs(t, config)}}}
	response, err := anonymous.Get(config.Host + "/readyz")
	testcheck.NoError(t, err)
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Errorf("anonymous GET /readyz with --anonymous-auth=true: %s", response.Status)
	}
	if !strings.Contains(p.printed(), "controllers: none") {
		t.Error("controllers run")
	}
	p.requireProgress(t)
	p.requireStop(t, terminate)
}

// requireProgress fails the test unless etcd notifies an idle watch of its progress before the
// test's timeout, which is shorter than etcd's own interval.
func (p *upProcess) requireProgress(t *testing.T) {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(p.dir, "*", "etcd", "client.sock"))
	if err != nil || len(sockets) != 1 {
		t.Fatalf("sockets of etcd: %q, %v; want one", sockets, err)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{"unix://" + sockets[0]}, DialTimeout: timeout})
	testcheck.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	response := <-client.Watch(ctx, "no key", clientv3.WithProgressNotify())
	if !response.IsProgressNotify() {
		t.Errorf("an idle watch of etcd gets %+v, %v; want progress", response, response.Err())
	}
}

func rootCAs(t *testing.T, config *rest.Config) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(config.CAData) {
		t.Fatal("the kubeconfig holds no certificate authority")
	}
	return pool
}

// requireSoon waits until holds returns true, and fails the test if that takes too long.
func requireSoon(t *testing.T, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("timeout")
		}
	}
}
