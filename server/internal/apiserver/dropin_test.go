package apiserver

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/pki"
)

// TestEngineSwitch_NextEngineServesSameData runs upstream's engine, Strata's, and upstream's again
// on the same data, with the flags that determine the location and format of stored data: TLS with
// client certificates, a prefix, a second etcd for a cached and an uncached resource, and
// encryption of secrets. Each engine must serve the data of the previous one.
func TestEngineSwitch_NextEngineServesSameData(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	dir := t.TempDir()
	files, err := pki.Ensure(filepath.Join(dir, "pki"), []string{"127.0.0.1"}, time.Now())
	testcheck.NoError(t, err)
	main, second := startTLSEtcd(t, ctx, files), startTLSEtcd(t, ctx, files)
	flags := []string{
		"--etcd-prefix=/teams/blue",
		"--etcd-cafile=" + files.CA, "--etcd-certfile=" + files.Admin, "--etcd-keyfile=" + files.Admin,
		"--etcd-servers-overrides=coordination.k8s.io/leases#" + second.url + ",/events#" + second.url,
		"--encryption-provider-config=" + encryptSecrets(t, dir),
	}
	withServer := func(engine engineKind, use func(t *testing.T, s *server)) {
		t.Run(string(engine), func(t *testing.T) {
			use(t, startServer(t, main.url, append(flags, "--engine="+string(engine))...))
		})
	}

	var left map[string]string
	withServer(engineUpstream, func(t *testing.T, s *server) {
		fill(t, ctx, s, "first")
		left = shown(t, s)
	})
	withServer(engineStrata, func(t *testing.T, s *server) {
		requireShown(t, s, left)
		if _, err := s.client.CoreV1().Secrets(metav1.NamespaceDefault).
			Patch(ctx, "first", "application/merge-patch+json", []byte(`{"stringData":{"k":"changed"}}`), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
		fill(t, ctx, s, "second")
		left = shown(t, s)

		secret := main.value(t, ctx, "/teams/blue/secrets/default/second")
		if !bytes.HasPrefix(secret, []byte("k8s:enc:aescbc:v1:")) {
			t.Errorf("secret is stored as %q, want it encrypted", secret)
		}
		for _, key := range []string{"/teams/blue/leases/default/second", "/teams/blue/events/default/second"} {
			if main.value(t, ctx, key) != nil || second.value(t, ctx, key) == nil {
				t.Errorf("%s is not in the second etcd alone", key)
			}
		}
	})
	withServer(engineUpstream, func(t *testing.T, s *server) { requireShown(t, s, left) })
}

// A server without a watch cache reads everything from etcd, with either engine.
func TestServer_WatchCacheDisabled_ServesResources(t *testing.T) {
	t.Parallel()
	s := startServer(t, startEtcd(t), "--watch-cache=false")
	t.Run("serves built-in resources", func(t *testing.T) { checkConfigMaps(t, s) })
	t.Run("serves custom resources", func(t *testing.T) { checkCustomResources(t, s) })
	t.Run("touches no upstream cacher", func(t *testing.T) { checkCacher(t, s, engineStrata) })
}

// fill creates an object of each kind that is stored differently, and waits for the watch events of
// them.
func fill(t *testing.T, ctx context.Context, s *server, name string) {
	t.Helper()
	client := s.client
	named := metav1.ObjectMeta{Name: name, Namespace: metav1.NamespaceDefault, Labels: map[string]string{"made": name}}
	secrets, leases := client.CoreV1().Secrets(named.Namespace), client.CoordinationV1().Leases(named.Namespace)
	watches := map[string]func(context.Context, metav1.ListOptions) (watch.Interface, error){
		"secrets": secrets.Watch, "leases": leases.Watch,
	}
	created := map[string]watch.Interface{}
	for resource, start := range watches {
		events, err := start(ctx, metav1.ListOptions{LabelSelector: "made=" + name})
		testcheck.NoError(t, err)
		defer events.Stop()
		created[resource] = events
	}

	if _, err := secrets.Create(ctx, &corev1.Secret{ObjectMeta: named, StringData: map[string]string{"k": "v"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: named}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Events(named.Namespace).Create(ctx, &corev1.Event{
		ObjectMeta:     named,
		InvolvedObject: corev1.ObjectReference{Kind: "Secret", Name: name, Namespace: named.Namespace},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	things, err := createKind(ctx, s, name+"s")
	testcheck.NoError(t, err)
	if _, err := things.Create(ctx, customObject(name+"s", name), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for resource, events := range created {
		if err := expectEvent(ctx, events, watch.Added, name, func(metav1.Object) bool { return true }); err != nil {
			t.Errorf("%s: %v", resource, err)
		}
	}
}

// shown returns the encoded items of lists that do not change by themselves.
func shown(t *testing.T, s *server) map[string]string {
	t.Helper()
	lists := map[string]string{}
	for _, path := range []string{
		"/api/v1/namespaces/default/secrets",
		"/api/v1/namespaces/default/events",
		"/apis/coordination.k8s.io/v1/namespaces/default/leases",
		"/apis/coordination.k8s.io/v1/namespaces/default/leases?labelSelector=made%3Dsecond",
		"/apis/engine.example.com/v1/firsts",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles",
	} {
		var list struct {
			Items json.RawMessage `json:"items"`
		}
		if err := json.Unmarshal([]byte(s.get(t, path)), &list); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		lists[path] = string(list.Items)
	}
	return lists
}

func requireShown(t *testing.T, s *server, want map[string]string) {
	t.Helper()
	for path, got := range shown(t, s) {
		if got != want[path] {
			t.Errorf("%s shows\n%s\nbut the server before showed\n%s", path, got, want[path])
		}
	}
}

// encryptSecrets returns the path of a configuration that encrypts secrets with a key.
func encryptSecrets(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "encryption.yaml")
	config := fmt.Sprintf(`apiVersion: apiserver.config.k8s.io/v1
kind: EncryptionConfiguration
resources:
- resources: [secrets]
  providers:
  - aescbc: {keys: [{name: one, secret: %s}]}
  - identity: {}
`, base64.StdEncoding.EncodeToString([]byte(strings.Repeat("k", 32))))
	testcheck.NoError(t, os.WriteFile(path, []byte(config), 0o600))
	return path
}

// tlsEtcd is an etcd that requires a client certificate, and a client with one.
type tlsEtcd struct {
	url    string
	client *clientv3.Client
}

func startTLSEtcd(t *testing.T, ctx context.Context, files *pki.Files) *tlsEtcd {
	t.Helper()
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{
		Dir: t.TempDir(), ClientURL: "https://127.0.0.1:0", UnsafeNoFsync: true,
		CertFile: files.Serving, KeyFile: files.Serving, TrustedCAFile: files.CA,
	})
	if err != nil {
		t.Fatalf("start etcd: %v", err)
	}
	t.Cleanup(etcd.Close)
	config, err := EtcdTLS(storagebackend.TransportConfig{CertFile: files.Admin, KeyFile: files.Admin, TrustedCAFile: files.CA})
	testcheck.NoError(t, err)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{etcd.Endpoint()}, TLS: config, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	return &tlsEtcd{url: etcd.Endpoint(), client: client}
}

// value returns the stored value of key, nil if the key does not exist.
func (e *tlsEtcd) value(t *testing.T, ctx context.Context, key string) []byte {
	t.Helper()
	resp, err := e.client.Get(ctx, key)
	testcheck.NoError(t, err)
	if len(resp.Kvs) == 0 {
		return nil
	}
	return resp.Kvs[0].Value
}
