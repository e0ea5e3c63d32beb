// Package kms encrypts Secrets through a key management service that hangs or is unavailable, and
// tests which requests that delays.
package kms

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	testTimeout = 10 * time.Minute

	// requestBound bounds a request for another resource. It is far above the latency on a busy
	// machine, and below pluginTimeout.
	requestBound = time.Minute
	// pluginTimeout is the time after which the server cancels a call of a plugin that hangs: a
	// request that waits for the plugin exceeds requestBound.
	pluginTimeout = 10 * time.Minute

	mapsPath    = "/api/v1/namespaces/default/configmaps"
	leasesPath  = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
	thingsPath  = "/apis/test.example.com/v1/namespaces/default/things"
	secretsPath = "/api/v1/namespaces/default/secrets"
)

type object = map[string]any

// encryptionConfig returns the flag that encrypts Secrets through the plugin, whose calls end after
// timeout.
func encryptionConfig(t *testing.T, env *harness.Env, p *plugin, timeout time.Duration) string {
	t.Helper()
	data, err := json.Marshal(object{
		"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration",
		"resources": []any{object{"resources": []any{"secrets"}, "providers": []any{
			object{"kms": object{"apiVersion": "v2", "name": "test", "endpoint": "unix://" + p.socket, "timeout": timeout.String()}}}}},
	})
	harness.Check(t, err)
	return "--encryption-provider-config=" + env.WriteFile("encryption.json", data)
}

// load are requests that do not concern Secrets.
type load struct {
	api  *harness.API
	next int // number of the next object to create
}

// run sends n requests of each kind, each within requestBound.
func (l *load) run(t *testing.T, ctx context.Context, n int) {
	t.Helper()
	type request struct {
		kind string
		do   func(ctx context.Context, name string) error
	}
	var requests []request
	for _, path := range []string{mapsPath, leasesPath, thingsPath} {
		resource := path[strings.LastIndex(path, "/")+1:]
		body := object{}
		if path == thingsPath {
			body = object{"apiVersion": "test.example.com/v1", "kind": "Thing"}
		}
		requests = append(requests,
			request{"create " + resource, func(ctx context.Context, name string) error {
				body["metadata"] = object{"name": name}
				_, err := l.api.Create(ctx, path, body)
				return err
			}},
			request{"get " + resource, func(ctx context.Context, name string) error {
				_, err := l.api.Get(ctx, path+"/"+name, "")
				return err
			}},
			request{"list " + resource, func(ctx context.Context, _ string) error {
				_, err := l.api.List(ctx, path, "")
				return err
			}},
			request{"list all " + resource, func(ctx context.Context, _ string) error {
				_, err := l.api.List(ctx, strings.Replace(path, "/namespaces/default", "", 1), "resourceVersion=0")
				return err
			}},
		)
	}
	took := map[string]time.Duration{} // the longest by kind
	for range n {
		name := fmt.Sprintf("object-%05d", l.next)
		l.next++
		for _, r := range requests {
			began := time.Now()
			ctx, cancel := context.WithTimeoutCause(ctx, requestBound, fmt.Errorf("no answer within %v", requestBound))
			err := r.do(ctx, name)
			cancel()
			if err != nil {
				t.Fatalf("%s, %s: %v", r.kind, name, err)
			}
			took[r.kind] = max(took[r.kind], time.Since(began))
		}
	}
	t.Logf("longest requests: %v", took)
}

// TestKMS_PluginUnavailable_OtherResourcesAreServed makes another server, whose plugin works, write
// Secrets that the server under test cannot decrypt because its plugin hangs; then that server
// starts while its plugin is unavailable. All other resources are served meanwhile, and Secrets are
// complete once the plugin answers.
func TestKMS_PluginUnavailable_OtherResourcesAreServed(t *testing.T) {
	ctx, cancel := context.WithTimeoutCause(t.Context(), testTimeout, fmt.Errorf("not done after %v", testTimeout))
	defer cancel()
	ours, theirs := newPlugin(t), newPlugin(t)
	env := harness.New(t)
	etcd := env.Etcd()
	s := env.APIServer(etcd, encryptionConfig(t, env, ours, pluginTimeout))
	other := env.APIServer(etcd, encryptionConfig(t, env, theirs, pluginTimeout))
	api := s.API()
	createThings(t, ctx, api)
	createSecrets(t, ctx, api, 0, 20)
	requireEncrypted(t, ctx, etcd)
	list, err := api.List(ctx, secretsPath, "")
	harness.Check(t, err)

	const n = 60
	l := &load{api: api}

	t.Run("plugin hangs after the start", func(t *testing.T) {
		watch := harness.StartWatch(t, ctx, api, secretsPath, "resourceVersion="+list.Metadata.ResourceVersion)
		ours.hang()
		defer ours.open()
		createSecrets(t, ctx, other.API(), 20, 25)
		stop := readSecrets(ctx, api)
		defer stop()
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return ours.held.Load() > 0, errors.New("the plugin was not called")
		}))
		l.run(t, ctx, n)
		if ours.held.Load() == 0 {
			t.Error("the plugin was called without effect")
		}
		if harness.Engine() == harness.Strata {
			// Secrets that were decrypted before can still be read individually.
			for _, query := range []string{"resourceVersion=0", ""} {
				if _, err := api.Get(ctx, secretsPath+"/"+secretName(0), query); err != nil {
					t.Errorf("get of a Secret that was read before, with %q: %v", query, err)
				}
			}
		}

		ours.open()
		stop()
		requireSecrets(t, ctx, api, 25)
		for i := 20; i < 25; i++ {
			e, err := watch.Next(ctx)
			harness.Check(t, err)
			if e.Type != "ADDED" || e.Object.Metadata.Name != secretName(i) {
				t.Fatalf("got %s of %q %s, want ADDED of %s", e.Type, e.Object.Metadata.Name, e.Status.Message, secretName(i))
			}
		}
	})

	t.Run("plugin is down at the start", func(t *testing.T) {
		harness.Check(t, s.Stop())
		ours.stop(t)
		s.StartAgain(encryptionConfig(t, env, ours, 3*time.Second)) // the start waits for calls
		// Not ready, since upstream's readiness includes the plugin and informers of Secrets; but
		// it serves.
		for _, path := range []string{mapsPath, leasesPath, thingsPath} {
			harness.Check(t, s.Await(ctx, path))
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			_, err := api.Create(ctx, mapsPath, object{"metadata": object{"name": "first"}})
			return err == nil || strings.Contains(err.Error(), "AlreadyExists"), err
		}))
		stop := readSecrets(ctx, api)
		defer stop()
		l.run(t, ctx, n)
		stop()

		ours.start(t)
		requireSecrets(t, ctx, api, 25)
		harness.Check(t, s.Await(ctx, "/readyz"))
	})
}

func secretName(i int) string { return fmt.Sprintf("secret-%03d", i) }

const secretText = "correct horse battery staple"

func createSecrets(t *testing.T, ctx context.Context, api *harness.API, first, end int) {
	t.Helper()
	for i := first; i < end; i++ {
		_, err := api.Create(ctx, secretsPath, object{"metadata": object{"name": secretName(i)}, "stringData": object{"text": secretText}})
		harness.Check(t, err)
	}
}

// requireEncrypted verifies that Secrets are stored encrypted.
func requireEncrypted(t *testing.T, ctx context.Context, etcd *harness.Etcd) {
	t.Helper()
	resp, err := etcd.Client().Get(ctx, "/registry/secrets/default/"+secretName(0))
	harness.Check(t, err)
	if len(resp.Kvs) != 1 || !strings.HasPrefix(string(resp.Kvs[0].Value), "k8s:enc:kms:v2:test:") || strings.Contains(string(resp.Kvs[0].Value), secretText) {
		t.Fatal("secrets are not stored encrypted")
	}
}

// readSecrets reads Secrets in every way, repeatedly, until stop is called. It ignores the answers
// while the plugin is unavailable.
func readSecrets(ctx context.Context, api *harness.API) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	queries := []string{"", "resourceVersion=0", "limit=5", "watch=true&timeoutSeconds=5"}
	ended := make(chan struct{}, len(queries))
	for _, query := range queries {
		go func() {
			defer func() { ended <- struct{}{} }()
			_ = harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				_, err := api.Do(ctx, http.MethodGet, secretsPath, query, nil)
				return false, err
			})
		}()
	}
	stopped := false
	return func() {
		cancel()
		for range queries {
			if !stopped {
				<-ended
			}
		}
		stopped = true
	}
}

// requireSecrets returns when LIST and a new watch return all Secrets.
func requireSecrets(t *testing.T, ctx context.Context, api *harness.API, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, 3*time.Minute, errors.New("Secrets are not complete after three minutes"))
	defer cancel()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := api.List(ctx, secretsPath, "")
		if err == nil && len(list.Items) != n {
			err = fmt.Errorf("listed %d Secrets, want %d", len(list.Items), n)
		}
		return err == nil, err
	}))
	w := harness.StartWatch(t, ctx, api, secretsPath, "")
	for i := range n {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" || e.Object.Metadata.Name != secretName(i) || e.Object.Data["text"] == "" {
			t.Fatalf("got %s of %q with %v, want ADDED of %s", e.Type, e.Object.Metadata.Name, e.Object.Data, secretName(i))
		}
	}
}

func createThings(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	harness.Check(t, harness.Define(ctx, "test.example.com", "things", "Thing", nil, api))
	// A server delays the first creations of a new definition: do them here, before answers are
	// timed.
	r, err := api.Do(ctx, http.MethodPost, thingsPath, "dryRun=All", object{
		"apiVersion": "test.example.com/v1", "kind": "Thing", "metadata": object{"name": "thing"}})
	harness.Check(t, err)
	if r.Code != http.StatusCreated {
		t.Fatal(r.Err())
	}
}
