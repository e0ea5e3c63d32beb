package dropin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

var identity = harness.Provider{Kind: "identity"}

// newEncryption returns the configuration of Secrets and a custom resource.
func newEncryption(t *testing.T, providers ...harness.Provider) harness.Encryption {
	return harness.NewEncryption(t, []string{"secrets", "things." + thingsGroup}, providers...)
}

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
func requireStored(t *testing.T, ctx context.Context, client *clientv3.Client, name string, p harness.Provider) {
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
		if want := "k8s:enc:" + p.Kind + ":v1:" + p.Key + ":"; !strings.HasPrefix(value, want) || strings.Contains(value, secret) {
			t.Errorf("%s is stored as %.40q..., want %s", prefix+name, value, want)
		}
	}
}

// requireShown checks that GET, LIST and a watch with initial events return both objects of each
// name.
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
		r, err := api.Read(ctx, path, "", "")
		harness.Check(t, err)
		if n := strings.Count(string(r.Body), text); n != len(names) {
			t.Errorf("list of %s shows the text %d times, want %d: code %d", path, n, len(names), r.Code)
		}
		w := harness.StartWatch(t, ctx, api, path, "")
		for range names {
			if e, err := w.Next(ctx); err != nil || e.Type != "ADDED" {
				t.Errorf("watch of %s: %s, %v", path, e.Type, err)
			}
		}
		w.Close()
	}
}

// TestEncryptionAtRest_KeysChange_ObjectsStayReadable turns encryption on and changes the keys,
// following the documentation of Kubernetes, by reloads of the configuration and by restarts; then
// upstream reads the result.
func TestEncryptionAtRest_KeysChange_ObjectsStayReadable(t *testing.T) {
	t.Parallel() // it waits for the server to read the file
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	box, cbc := harness.Provider{Kind: "secretbox", Key: "key1"}, harness.Provider{Kind: "aescbc", Key: "key2"}
	config := newEncryption(t, identity)
	s := env.APIServer(etcd, config.Flag(), "--encryption-provider-config-automatic-reload=true")
	restart := func(providers ...harness.Provider) {
		t.Helper()
		config.Write(t, providers...)
		harness.Check(t, s.Stop())
		s.Restart()
		createThings(t, ctx, s.API()) // returns when they are served
	}
	reload := func(providers ...harness.Provider) {
		t.Helper()
		if harness.Long() {
			restart(providers...)
			return
		}
		before := reloads(t, ctx, s.API())
		config.Write(t, providers...)
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return reloads(t, ctx, s.API()) > before, nil
		}))
	}
	createThings(t, ctx, s.API())
	createEncrypted(t, ctx, s.API(), "plain")
	requireStored(t, ctx, client, "plain", identity)

	// The first key: new writes are encrypted, earlier ones can still be read.
	reload(box, identity)
	createEncrypted(t, ctx, s.API(), "boxed")
	requireStored(t, ctx, client, "boxed", box)
	requireStored(t, ctx, client, "plain", identity)
	requireShown(t, ctx, s.API(), "plain", "boxed")
	w := harness.StartWatch(t, ctx, s.API(), defaultSecrets, "fieldSelector=metadata.name%3Dplain")
	expectEvent(t, ctx, w, "ADDED", "plain")

	// The second key; both keys are configured.
	restart(cbc, box, identity)
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
	reload(cbc)
	requireShown(t, ctx, s.API(), "plain", "boxed", "chained")

	removeKey(t, ctx, s.API(), config, cbc)
	lackKey(t, ctx, s, config, cbc)
	names := []string{"plain", "boxed", "chained", "one", "two", "three", "known"}
	requireShown(t, ctx, s.API(), names...)

	harness.Check(t, s.Stop())
	other := harness.Upstream
	if harness.Engine() == harness.Upstream {
		other = harness.Strata
	}
	requireShown(t, ctx, env.APIServer(etcd, engine(other), config.Flag()).API(), names...)
}

// reloads returns the number of successful reloads of a server's encryption configuration.
func reloads(t *testing.T, ctx context.Context, api *harness.API) int {
	t.Helper()
	n, err := api.Sum(ctx, "apiserver_encryption_config_controller_automatic_reloads_total", `status="success"`)
	harness.Check(t, err)
	return int(n)
}

// unrelated is a provider with a key of its own.
var unrelated = harness.Provider{Kind: "secretbox", Key: "key3"}

// removeKey removes the key of objects that were read before, without a restart. Once the server
// reports the reload, no read may be answered from values that were decrypted before it; when the
// key is added again, all reads succeed. Upstream answers GETs in the same way, LISTs and watches
// from its cache until that is rebuilt. In the end the objects named three have the unrelated key.
func removeKey(t *testing.T, ctx context.Context, api *harness.API, config harness.Encryption, key harness.Provider) {
	t.Helper()
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
	read := func(r request) (resp *harness.Response) {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
			resp, err = api.DoAs(ctx, http.MethodGet, r.path, r.query, "", r.accept, nil)
			return err == nil && resp.Code != http.StatusTooManyRequests, err // memory may be late
		}))
		return resp
	}
	readAll := func(wanted bool) {
		t.Helper()
		for _, r := range reads {
			if resp := read(r); (resp.Code == http.StatusOK) != wanted || !wanted && resp.Code != http.StatusInternalServerError {
				t.Errorf("%s?%s as %s: %d, want success: %t", r.path, r.query, r.accept, resp.Code, wanted)
			}
		}
		var watching sync.WaitGroup
		defer watching.Wait()
		for _, r := range watches { // at once: the server retries the first event for a while
			watching.Go(func() {
				var w *harness.Watch
				var refused *harness.Response
				// memory may be late
				err := harness.Poll(ctx, func(context.Context) (_ bool, err error) {
					w, refused, err = api.Watch(ctx, r.path, r.query)
					return err != nil || refused == nil || refused.Code != http.StatusTooManyRequests, err
				})
				if err != nil || refused != nil {
					if err != nil || wanted {
						t.Errorf("watch %s?%s: %v, %+v", r.path, r.query, err, refused)
					}
					return
				}
				defer w.Close()
				e, err := w.Next(ctx)
				if wanted && (err != nil || e.Type != "ADDED") || !wanted && e.Type != "ERROR" {
					t.Errorf("watch %s?%s begins with %s, %v, want an object: %t", r.path, r.query, e.Type, err, wanted)
				}
			})
		}
	}
	readAll(true)
	readAll(true) // from the cache
	open := harness.StartWatch(t, ctx, api, defaultSecrets, from)
	expectEvent(t, ctx, open, "ADDED", "one")
	expectEvent(t, ctx, open, "ADDED", "two")

	before := reloads(t, ctx, api)
	config.Write(t, unrelated)
	get := request{defaultSecrets + "/one", "", "application/json"}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		reloaded := reloads(t, ctx, api) > before
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
	createEncrypted(t, ctx, api, "three")
	if harness.Engine() == harness.Strata {
		expectEvent(t, ctx, open, "ADDED", "three")
	}

	config.Write(t, unrelated, key)
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) { return read(get).Code == http.StatusOK, nil }))
	if harness.Engine() == harness.Strata {
		readAll(true)
	}
}

// lackKey restarts the server without the unrelated key. The objects with the other key are served.
// After the key is added to the configuration, which the server reads again, all are.
func lackKey(t *testing.T, ctx context.Context, s *harness.Server, config harness.Encryption, key harness.Provider) {
	t.Helper()
	config.Write(t, harness.Provider{Kind: "secretbox", Key: "key4"}, key)
	harness.Check(t, s.Stop())
	s.StartAgain()
	api := s.API()
	// Not /readyz: upstream's informers of Secrets cannot start, and its readiness may wait for
	// them.
	harness.Check(t, s.Await(ctx, "/livez"))
	harness.Check(t, s.Await(ctx, thingsPath+"/plain"))
	createEncrypted(t, ctx, api, "known")
	if r, err := api.Do(ctx, http.MethodGet, defaultSecrets, "", nil); err != nil || r.Code == http.StatusOK {
		t.Errorf("list with an object that cannot be decrypted: %+v, %v, want an error", r, err)
	}
	if harness.Engine() == harness.Strata {
		for _, name := range []string{"known", "plain"} {
			if _, err := api.Get(ctx, defaultSecrets+"/"+name, ""); err != nil {
				t.Errorf("get of another: %v", err)
			}
		}
		w := harness.StartWatch(t, ctx, api, defaultSecrets, "fieldSelector=metadata.name%3Dknown")
		expectEvent(t, ctx, w, "ADDED", "known")
		_, err := api.Patch(ctx, defaultSecrets+"/known", `{"metadata":{"labels":{"a":"b"}}}`)
		harness.Check(t, err)
		expectEvent(t, ctx, w, "MODIFIED", "known")
	}

	config.Write(t, harness.Provider{Kind: "secretbox", Key: "key4"}, key, unrelated)
	harness.AwaitList(t, ctx, api, defaultSecrets)
	harness.AwaitList(t, ctx, api, thingsPath)
}
