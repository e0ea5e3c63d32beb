package dropin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// provider is a provider of an encryption configuration, with the name of its key; identity has no key.
type provider struct{ kind, key string }

var identity = provider{kind: "identity"}

// encryption is a file with an encryption configuration for Secrets and a custom resource.
type encryption struct{ path string }

func newEncryption(t *testing.T, providers ...provider) encryption {
	e := encryption{filepath.Join(t.TempDir(), "encryption.json")}
	e.write(t, providers...)
	return e
}

// write replaces the configuration; the first provider encrypts, all of them decrypt.
func (e encryption) write(t *testing.T, providers ...provider) {
	t.Helper()
	var list []any
	for _, p := range providers {
		body := object{}
		if p.key != "" {
			secret := fmt.Sprintf("%-32s", p.key) // the key's name, padded to the length of a key
			body["keys"] = []any{object{"name": p.key, "secret": base64.StdEncoding.EncodeToString([]byte(secret))}}
		}
		list = append(list, object{p.kind: body})
	}
	data, err := json.Marshal(object{
		"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration",
		"resources": []any{object{"resources": []any{"secrets", "things." + thingsGroup}, "providers": list}},
	})
	harness.Check(t, err)
	// A rename, so that a server never reads a partial file.
	harness.Check(t, os.WriteFile(e.path+".new", data, 0o600))
	harness.Check(t, os.Rename(e.path+".new", e.path))
}

func (e encryption) flag() string { return "--encryption-provider-config=" + e.path }

// secret is a text that must not be found in etcd.
const secret = "correct horse battery staple"

const (
	secretsPrefix = "/registry/secrets/default/"
	thingsPrefix  = "/registry/" + thingsGroup + "/things/default/"
)

func createEncrypted(t *testing.T, ctx context.Context, api *harness.API, name string) {
	t.Helper()
	create(t, ctx, api, defaultSecrets, object{"metadata": object{"name": name}, "stringData": object{"text": secret}})
	create(t, ctx, api, thingsPath, thing(name, secret))
}

// requireStored checks the provider with which both objects of a name are stored.
func requireStored(t *testing.T, ctx context.Context, client *clientv3.Client, name string, p provider) {
	t.Helper()
	for _, prefix := range []string{secretsPrefix, thingsPrefix} {
		resp, err := client.Get(ctx, prefix+name)
		harness.Check(t, err)
		if len(resp.Kvs) != 1 {
			t.Fatalf("%d keys %s", len(resp.Kvs), prefix+name)
		}
		value := string(resp.Kvs[0].Value)
		if p == identity {
			if !strings.Contains(value, secret) && !strings.Contains(value, base64.StdEncoding.EncodeToString([]byte(secret))) {
				t.Errorf("%s is not in plain text", prefix+name)
			}
			continue
		}
		if want := "k8s:enc:" + p.kind + ":v1:" + p.key + ":"; !strings.HasPrefix(value, want) || strings.Contains(value, secret) {
			t.Errorf("%s is stored as %.40q..., want %s", prefix+name, value, want)
		}
	}
}

// requireShown checks that GET, LIST and a watch with initial events return both objects of each name.
func requireShown(t *testing.T, ctx context.Context, api *harness.API, names ...string) {
	t.Helper()
	for path, text := range map[string]string{defaultSecrets: base64.StdEncoding.EncodeToString([]byte(secret)), thingsPath: secret} {
		for _, name := range names {
			r, err := api.Do(ctx, http.MethodGet, path+"/"+name, "", nil)
			harness.Check(t, err)
			if r.Code != http.StatusOK || !strings.Contains(string(r.Body), text) {
				t.Errorf("get %s/%s: %v", path, name, r.Err())
			}
		}
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		harness.Check(t, err)
		if n := strings.Count(string(r.Body), text); n != len(names) {
			t.Errorf("list of %s shows the text %d times, want %d: code %d", path, n, len(names), r.Code)
		}
		w := startWatch(t, ctx, api, path, "")
		for range names {
			if e, err := w.Next(ctx); err != nil || e.Type != "ADDED" {
				t.Errorf("watch of %s: %s, %v", path, e.Type, err)
			}
		}
		w.Close()
	}
}

// TestEncryptionAtRest_KeyRotation_ObjectsStayReadable turns encryption on, rotates the key with restarts, and turns it off, following the documentation of
// Kubernetes; then upstream reads the result.
func TestEncryptionAtRest_KeyRotation_ObjectsStayReadable(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	box, cbc := provider{"secretbox", "key1"}, provider{"aescbc", "key2"}

	config := newEncryption(t, identity)
	s := env.APIServer(etcd, config.flag())
	createThings(t, ctx, s.API())
	createEncrypted(t, ctx, s.API(), "plain")
	requireStored(t, ctx, client, "plain", identity)

	// The first key: new writes are encrypted, earlier ones can still be read.
	config.write(t, box, identity)
	restart(t, ctx, s)
	createEncrypted(t, ctx, s.API(), "boxed")
	requireStored(t, ctx, client, "boxed", box)
	requireStored(t, ctx, client, "plain", identity)
	requireShown(t, ctx, s.API(), "plain", "boxed")
	w := startWatch(t, ctx, s.API(), defaultSecrets, "fieldSelector=metadata.name%3Dplain")
	expectEvent(t, ctx, w, "ADDED", "plain")

	// The second key; both keys are configured.
	config.write(t, cbc, box, identity)
	restart(t, ctx, s)
	createEncrypted(t, ctx, s.API(), "chained")
	requireStored(t, ctx, client, "chained", cbc)
	requireStored(t, ctx, client, "boxed", box)
	requireShown(t, ctx, s.API(), "plain", "boxed", "chained")
	// An update without changes rewrites only values that are stored with an outdated provider.
	for _, path := range []string{defaultSecrets, thingsPath} {
		for name, rewritten := range map[string]bool{"plain": true, "boxed": true, "chained": false} {
			r, err := s.API().Do(ctx, http.MethodGet, path+"/"+name, "", nil)
			harness.Check(t, err)
			var before harness.Object
			harness.Check(t, json.Unmarshal(r.Body, &before))
			after, err := s.API().Update(ctx, path+"/"+name, r.Body)
			harness.Check(t, err)
			if got := after.Metadata.ResourceVersion != before.Metadata.ResourceVersion; got != rewritten {
				t.Errorf("%s/%s was rewritten: %v, want %v", path, name, got, rewritten)
			}
		}
	}
	for _, name := range []string{"plain", "boxed", "chained"} {
		requireStored(t, ctx, client, name, cbc)
	}

	// The first key and plain text are no longer used.
	config.write(t, cbc)
	restart(t, ctx, s)
	requireShown(t, ctx, s.API(), "plain", "boxed", "chained")
	harness.Check(t, s.Stop())
	other := harness.Upstream
	if harness.Engine() == harness.Upstream {
		other = harness.Strata
	}
	requireShown(t, ctx, env.APIServer(etcd, engine(other), config.flag()).API(), "plain", "boxed", "chained")
}

func restart(t *testing.T, ctx context.Context, s *harness.Server) {
	t.Helper()
	harness.Check(t, s.Stop())
	s.Restart()
	createThings(t, ctx, s.API()) // returns when they are served
}

// TestEncryptionAtRest_KeyAdded_SecretIsServedAgain starts a server that lacks the key of one Secret. The other Secrets are served. After the key is added to
// the configuration, which the server reads again, this Secret is served, too.
func TestEncryptionAtRest_KeyAdded_SecretIsServedAgain(t *testing.T) {
	t.Parallel() // it waits for the server to read the file
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	key1, key2 := provider{"secretbox", "key1"}, provider{"secretbox", "key2"}
	config := newEncryption(t, key1)
	first := env.APIServer(etcd, config.flag())
	create(t, ctx, first.API(), defaultSecrets, object{"metadata": object{"name": "lost"}, "stringData": object{"text": secret}})
	harness.Check(t, first.Stop())

	config.write(t, key2)
	s := env.StartAPIServer(etcd, config.flag(), "--encryption-provider-config-automatic-reload=true")
	api := s.API()
	// Not /readyz: upstream's informers of Secrets cannot start, and its readiness may wait for them.
	harness.Check(t, s.Await(ctx, "/livez"))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, err := api.Create(ctx, defaultSecrets, object{"metadata": object{"name": "known"}, "stringData": object{"text": secret}})
		return err == nil, err
	}))
	if r, err := api.Do(ctx, http.MethodGet, defaultSecrets, "", nil); err != nil || r.Code == http.StatusOK {
		t.Errorf("list with an object that cannot be decrypted: %+v, %v, want an error", r, err)
	}
	if harness.Engine() == harness.Strata {
		if _, err := api.Get(ctx, defaultSecrets+"/known", ""); err != nil {
			t.Errorf("get of the other one: %v", err)
		}
		w := startWatch(t, ctx, api, defaultSecrets, "fieldSelector=metadata.name%3Dknown")
		expectEvent(t, ctx, w, "ADDED", "known")
		_, err := api.Patch(ctx, defaultSecrets+"/known", `{"metadata":{"labels":{"a":"b"}}}`)
		harness.Check(t, err)
		expectEvent(t, ctx, w, "MODIFIED", "known")
	}

	config.write(t, key2, key1)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := api.List(ctx, defaultSecrets, "")
		return err == nil && len(list.Items) == 2, err
	}))
	w := startWatch(t, ctx, api, defaultSecrets, "")
	expectEvent(t, ctx, w, "ADDED", "known")
	expectEvent(t, ctx, w, "ADDED", "lost")
	if _, err := api.Get(ctx, defaultSecrets+"/lost", ""); err != nil {
		t.Error(err)
	}
}

// TestEncryptionAtRest_KeyRemoved_ReadsFail removes the key of objects that were read before, without a restart. Once the server reports the reload, no
// read may be answered from values that were decrypted before it; when the key is added again, all reads succeed. Upstream answers
// GETs in the same way, LISTs and watches from its cache until that is rebuilt.
func TestEncryptionAtRest_KeyRemoved_ReadsFail(t *testing.T) {
	t.Parallel() // it waits for the server to read the file
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	key1, key2 := provider{"secretbox", "key1"}, provider{"secretbox", "key2"}
	config := newEncryption(t, key1)
	api := env.APIServer(etcd, config.flag(), "--encryption-provider-config-automatic-reload=true").API()
	createThings(t, ctx, api)
	plain := create(t, ctx, api, defaultMaps, configMap("plain"))
	createEncrypted(t, ctx, api, "one")
	createEncrypted(t, ctx, api, "two")

	from := "resourceVersion=" + plain.Metadata.ResourceVersion
	const initial = "sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"
	type request struct{ path, query, accept string }
	var reads, watches []request
	for _, path := range []string{defaultSecrets, thingsPath} {
		for _, accept := range []string{"application/json", "application/json;as=Table;g=meta.k8s.io;v=v1", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"} {
			reads = append(reads, request{path, "", accept}, request{path, "resourceVersion=0", accept}, request{path, "labelSelector=x%21%3Dy", accept})
		}
		for _, query := range []string{"", "resourceVersion=0"} {
			reads = append(reads, request{path + "/one", query, "application/json"})
		}
		for _, query := range []string{"", from, initial} {
			watches = append(watches, request{path: path, query: query})
		}
	}
	reads = append(reads, request{defaultSecrets, "", "application/vnd.kubernetes.protobuf"}, request{defaultSecrets + "/one", "", "application/vnd.kubernetes.protobuf"})
	read := func(r request) *harness.Response {
		resp, err := api.DoAs(ctx, http.MethodGet, r.path, r.query, "", r.accept, nil)
		harness.Check(t, err)
		return resp
	}
	readAll := func(wanted bool) {
		t.Helper()
		for _, r := range reads {
			if resp := read(r); (resp.Code == http.StatusOK) != wanted || !wanted && resp.Code != http.StatusInternalServerError {
				t.Errorf("%s?%s as %s: %d, want success: %t", r.path, r.query, r.accept, resp.Code, wanted)
			}
		}
		for _, r := range watches {
			w, refused, err := api.Watch(ctx, r.path, r.query)
			harness.Check(t, err)
			if refused != nil {
				if wanted {
					t.Errorf("watch %s?%s: %v", r.path, r.query, refused.Err())
				}
				continue
			}
			e, err := w.Next(ctx)
			if wanted && (err != nil || e.Type != "ADDED") || !wanted && e.Type != "ERROR" {
				t.Errorf("watch %s?%s begins with %s, %v, want an object: %t", r.path, r.query, e.Type, err, wanted)
			}
			w.Close()
		}
	}
	reloads := func() int {
		const name = "apiserver_encryption_config_controller_automatic_reloads_total{"
		resp, err := api.Do(ctx, http.MethodGet, "/metrics", "", nil)
		harness.Check(t, err)
		n := 0
		for line := range strings.Lines(string(resp.Body)) {
			if strings.HasPrefix(line, name) && strings.Contains(line, `status="success"`) {
				if _, err := fmt.Sscan(line[strings.LastIndexByte(line, ' '):], &n); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
			}
		}
		return n
	}
	readAll(true)
	readAll(true) // from the cache
	open := startWatch(t, ctx, api, defaultSecrets, from)
	expectEvent(t, ctx, open, "ADDED", "one")
	expectEvent(t, ctx, open, "ADDED", "two")

	config.write(t, key2)
	get := request{defaultSecrets + "/one", "", "application/json"}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		reloaded := reloads() > 0
		switch code := read(get).Code; {
		case code != http.StatusOK && code != http.StatusInternalServerError:
			t.Fatalf("get after the key was removed: %d", code)
		case code == http.StatusOK && reloaded:
			t.Fatal("an object is shown whose key was removed")
		default:
			return code != http.StatusOK, nil
		}
		return false, nil
	}))
	if harness.Engine() == harness.Strata {
		readAll(false)
	}
	// A watch that is up to date continues.
	create(t, ctx, api, defaultSecrets, object{"metadata": object{"name": "three"}, "stringData": object{"text": secret}})
	if harness.Engine() == harness.Strata {
		expectEvent(t, ctx, open, "ADDED", "three")
	}

	config.write(t, key2, key1)
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) { return read(get).Code == http.StatusOK, nil }))
	if harness.Engine() == harness.Strata {
		readAll(true)
	}
}
