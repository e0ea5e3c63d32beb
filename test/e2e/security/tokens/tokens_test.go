package tokens

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/pager"

	"github.com/stratakube/strata/test/harness"
)

const (
	maps   = "/api/v1/namespaces/default/configmaps"
	events = "/api/v1/namespaces/default/events"

	table    = "application/json;as=Table;v=v1;g=meta.k8s.io"
	metadata = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
)

// TestSealedToken_OtherReplica_OpensIt: every replica opens the sealed tokens of the others, also
// after a replica was killed; forged tokens are refused.
func TestSealedToken_OtherReplica_OpensIt(t *testing.T) {
	requireStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	config := newEncryption(t, "key1")
	flags := []string{config.Flag(), "--disable-admission-plugins=ServiceAccount"}
	start := func(more ...string) *harness.Server { return env.StartAPIServer(etcd, append(flags, more...)...) }
	servers := []*harness.Server{start(sealing), start(sealing)} // concurrently, on an empty etcd
	for _, s := range servers {
		harness.Check(t, s.Await(ctx, "/readyz"))
	}
	a, b := servers[0].API(), servers[1].API()
	const objects, limit = 40, 7
	fill(t, ctx, a, maps, objects, nil)
	fill(t, ctx, a, events, objects, object{"involvedObject": object{"kind": "ConfigMap", "name": "a", "namespace": "default"}, "reason": "Test", "type": "Normal"})

	// Pages from both in turn, of resources in memory and in etcd only, in every form.
	for _, path := range []string{maps, "/api/v1/configmaps", events, "/apis/events.k8s.io/v1/events"} {
		for _, accept := range []string{"application/json", table, metadata} {
			token, revision, seen := "", "", 0
			for i := 0; i == 0 || token != ""; i++ {
				p := readPage(t, ctx, servers[i%2].API(), path, token, limit, accept)
				if revision == "" {
					revision = p.Metadata.ResourceVersion
				}
				if p.Metadata.ResourceVersion != revision {
					t.Errorf("%s as %s: page %d has revision %s, the first had %s", path, accept, i, p.Metadata.ResourceVersion, revision)
				}
				seen += len(p.Items) + len(p.Rows)
				if token = p.Metadata.Continue; token != "" {
					requireSealed(t, token)
				}
			}
			if seen < objects {
				t.Errorf("%s as %s: %d objects in pages, want at least %d", path, accept, seen, objects)
			}
		}
	}

	t.Run("a field selector for one namespace", func(t *testing.T) {
		const everywhere, selector = "/api/v1/configmaps", "&fieldSelector=metadata.namespace%3Ddefault"
		want := harness.Must[*harness.List](t)(a.List(ctx, maps, ""))
		var names []string
		for token, i := "", 0; i == 0 || token != ""; i++ {
			p := harness.Must[*harness.List](t)(servers[i%2].API().List(ctx, everywhere, query(limit, token)+selector))
			names = append(names, p.Names()...)
			if token = p.Metadata.Continue; token != "" {
				requireSealed(t, token)
			}
		}
		if !slices.Equal(names, want.Names()) {
			t.Errorf("got %d names %v, want %d", len(names), names, len(want.Names()))
		}
	})

	client := etcd.Client()
	resp := harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, "/registry/strata/", clientv3.WithPrefix()))
	if len(resp.Kvs) != 1 || string(resp.Kvs[0].Key) != ringKey || resp.Kvs[0].Version != 1 {
		t.Fatalf("etcd has %d keys of the engine, want one ring, written once: %v", len(resp.Kvs), resp.Kvs)
	}
	if stored := string(resp.Kvs[0].Value); !strings.HasPrefix(stored, "k8s:enc:aescbc:v1:key1:") || strings.Contains(stored, `"keys"`) {
		t.Errorf("the ring is stored as %.40q...", stored)
	}

	sealed := readPage(t, ctx, a, maps, "", limit, "")
	token := sealed.Metadata.Continue
	t.Run("other lists", func(t *testing.T) {
		for _, path := range []string{"/api/v1/configmaps", "/api/v1/namespaces/kube-system/configmaps", "/api/v1/namespaces/default/secrets",
			events, "/apis/apps/v1/namespaces/default/deployments", "/api/v1/nodes"} {
			for _, accept := range []string{"application/json", table} {
				requireRefused(t, path, get(t, ctx, b, path, query(limit, token), accept), http.StatusBadRequest, "continue key is not valid")
			}
		}
		requireRefused(t, "with a revision", get(t, ctx, b, maps, query(limit, token)+"&resourceVersion=1", ""), http.StatusBadRequest, "resource version")
	})
	t.Run("forged", func(t *testing.T) { forge(t, ctx, b, token) })

	t.Run("killed and started again", func(t *testing.T) {
		first := readPage(t, ctx, a, maps, "", limit, "")
		for _, s := range servers {
			s.Kill()
		}
		servers[0].StartAgain()
		servers[1].StartAgain(notSealing)
		for _, s := range servers {
			harness.Check(t, s.Await(ctx, "/readyz"))
			p := readPage(t, ctx, s.API(), maps, first.Metadata.Continue, limit, "")
			if p.Metadata.ResourceVersion != first.Metadata.ResourceVersion || len(p.Items) != limit {
				t.Errorf("%d items at revision %s, the token's is %s", len(p.Items), p.Metadata.ResourceVersion, first.Metadata.ResourceVersion)
			}
		}
		if n := harness.Must[*clientv3.GetResponse](t)(client.Get(ctx, ringKey)); n.Kvs[0].Version != 1 {
			t.Errorf("the ring was written %d times", n.Kvs[0].Version)
		}
	})
	plain := ""
	t.Run("sealing off", func(t *testing.T) {
		p := readPage(t, ctx, b, maps, token, limit, "")
		if p.Metadata.ResourceVersion != sealed.Metadata.ResourceVersion || len(p.Items) != limit {
			t.Errorf("%d items at revision %s, the token's is %s", len(p.Items), p.Metadata.ResourceVersion, sealed.Metadata.ResourceVersion)
		}
		plain = p.Metadata.Continue
		requirePlain(t, plain)
		// Servers that seal their tokens accept plain ones.
		requireSealed(t, readPage(t, ctx, a, maps, plain, limit, "").Metadata.Continue)
	})
	t.Run("plain refused", func(t *testing.T) {
		harness.Check(t, servers[1].Stop())
		servers[1].Restart(sealing, refusePlain)
		for _, path := range []string{maps, events} {
			requireRefused(t, path, get(t, ctx, b, path, query(limit, plain), ""), http.StatusBadRequest, "accepts only sealed tokens")
		}
		requireSealed(t, readPage(t, ctx, b, maps, token, limit, "").Metadata.Continue)
	})
	t.Run("keys that cannot be read", func(t *testing.T) {
		// A server whose encryption configuration lacks the key: pages are refused for a while, all
		// other requests succeed.
		wrong := newEncryption(t, "another")
		s := start(sealing, wrong.Flag())
		api := s.API()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, maps, "", nil)
			return err == nil && r.Code == http.StatusOK, err
		}))
		for what, q := range map[string]string{"seal": "limit=7", "open": query(limit, token)} {
			r := get(t, ctx, api, maps, q, "")
			requireRefused(t, what, r, http.StatusTooManyRequests, "not available")
			if r.Header.Get("Retry-After") == "" {
				t.Errorf("%s: no Retry-After", what)
			}
		}
		if p := readPage(t, ctx, api, maps, "", 500, ""); len(p.Items) < objects || p.Metadata.Continue != "" {
			t.Errorf("a list that needs no token: %d items", len(p.Items))
		}
		s.Kill()
	})
	t.Run("an expired token continues at the latest revision", func(t *testing.T) {
		latest := readPage(t, ctx, a, maps, "", limit, "")
		old := latest.Metadata.Continue
		at := harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "/other", "x")).Header.Revision
		harness.Must[*clientv3.CompactResponse](t)(client.Compact(ctx, at))
		harness.Must[*clientv3.PutResponse](t)(client.Put(ctx, "compact_rev_key", fmt.Sprint(at)))
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := b.Do(ctx, http.MethodGet, maps, query(limit, old), nil)
			if err != nil || r.Code != http.StatusGone {
				return false, err
			}
			next := r.Status().Continue
			requireSealed(t, next)
			p := readPage(t, ctx, a, maps, next, limit, "")
			requireSealed(t, p.Metadata.Continue)
			if len(p.Items) != limit {
				t.Errorf("%d items", len(p.Items))
			}
			return true, nil
		}))
	})
	t.Run("keys removed", func(t *testing.T) { takeAway(t, ctx, client, servers) })
}

// forge sends a thousand tokens that no server has made.
func forge(t *testing.T, ctx context.Context, api *harness.API, token string) {
	random := mathrand.New(mathrand.NewPCG(1, 2))
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	bytes := func(n int) []byte {
		b := make([]byte, n)
		_, _ = rand.Read(b)
		return b
	}
	known := harness.Must[[]byte](t)(base64.RawURLEncoding.DecodeString(token[3:]))[:8]
	var forged []string
	for i := range 1000 {
		changed := []byte(token)
		switch i % 8 {
		case 0: // a changed character
			at := 3 + random.IntN(len(token)-3)
			for changed[at] == token[at] {
				changed[at] = alphabet[random.IntN(len(alphabet))]
			}
		case 1:
			changed = changed[:random.IntN(len(token)-1)+1]
		case 2: // with the ID of an existing key
			changed = []byte("s1." + base64.RawURLEncoding.EncodeToString(append(known[:8:8], bytes(24+32*(1+i%3)+16)...)))
		case 3: // with the ID of a missing key
			changed = []byte("s1." + base64.RawURLEncoding.EncodeToString(bytes(80+i%64)))
		case 4:
			changed = bytes(1 + i%100)
		case 5:
			changed = []byte(base64.RawURLEncoding.EncodeToString(bytes(1 + i%100)))
		case 6:
			changed = append([]byte("s"+fmt.Sprint(2+i%50)), changed[2:]...)
		case 7:
			changed = append(changed, alphabet[i%64])
		}
		forged = append(forged, string(changed))
	}
	work := make(chan string)
	var all sync.WaitGroup
	began := time.Now()
	for range 8 {
		all.Go(func() {
			for bad := range work {
				// refused while the keys cannot be read in time
				r, err := api.Read(ctx, maps, query(7, bad), "")
				if err != nil {
					t.Error(err)
				} else if r.Code != http.StatusBadRequest || !strings.Contains(r.Status().Message, "continue key is not valid") {
					t.Errorf("token %q: %v", bad, r.Err())
				}
			}
		})
	}
	for _, bad := range forged {
		work <- bad
	}
	close(work)
	all.Wait()
	t.Logf("%d forged tokens in %v", len(forged), time.Since(began))
}

// takeAway removes the key ring during a paged list of client-go's pager: the pager starts over,
// and returns all objects.
func takeAway(t *testing.T, ctx context.Context, client *clientv3.Client, servers []*harness.Server) {
	config := harness.Must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(servers[0].Config)).CoreV1().ConfigMaps("default")
	want := harness.Must[*harness.List](t)(servers[0].API().List(ctx, maps, ""))
	before := readPage(t, ctx, servers[0].API(), maps, "", 7, "").Metadata.Continue
	pages, expired := 0, 0
	p := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		if pages++; pages == 3 {
			if _, err := client.Delete(ctx, ringKey); err != nil {
				return nil, err
			}
			// A forged token makes the servers reload the ring at once, instead of within a minute.
			for _, s := range servers {
				r, err := s.API().Read(ctx, maps, query(7, "s1."+strings.Repeat("A", 120)), "")
				if err != nil || r.Code != http.StatusBadRequest {
					t.Errorf("an invalid token: %v, %v", r, err)
				}
			}
		}
		list, err := config.List(ctx, opts)
		if err != nil {
			expired++
		}
		return list, err
	})
	p.PageSize = 7
	list, full, err := p.List(ctx, metav1.ListOptions{})
	harness.Check(t, err)
	items := meta.LenList(list)
	if expired != 1 || !full || items != len(want.Items) {
		t.Errorf("%d refusals, full list %v, %d items, want one, a full list, %d", expired, full, items, len(want.Items))
	}
	fresh := readPage(t, ctx, servers[0].API(), maps, "", 7, "").Metadata.Continue
	for _, s := range servers {
		requireRefused(t, "a token of before", get(t, ctx, s.API(), maps, query(7, before), ""), http.StatusGone, "too old")
		readPage(t, ctx, s.API(), maps, fresh, 7, "")
	}
}

// TestKeyRing_EncryptionConfigReloaded_IsReencrypted of a running server: the file gets a new key,
// then the old key is removed.
func TestKeyRing_EncryptionConfigReloaded_IsReencrypted(t *testing.T) {
	t.Parallel()
	requireStrata(t)
	if !harness.Long() {
		t.Skip("takes a minute; STRATA_TEST_LONG=1 does it")
	}
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	config := newEncryption(t, "key1")
	s := env.APIServer(etcd, config.Flag(), "--encryption-provider-config-automatic-reload=true", sealing, "--disable-admission-plugins=ServiceAccount")
	fill(t, ctx, s.API(), maps, 10, nil)
	token := readPage(t, ctx, s.API(), maps, "", 3, "").Metadata.Continue
	requireSealed(t, token)
	client := etcd.Client()
	stored := func(with string) {
		t.Helper()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			resp, err := client.Get(ctx, ringKey)
			if err != nil {
				return false, err
			}
			value := string(resp.Kvs[0].Value)
			return strings.HasPrefix(value, "k8s:enc:aescbc:v1:"+with+":"), fmt.Errorf("the ring is stored as %.30q", value)
		}))
	}
	stored("key1")
	config.Write(t, harness.Keys("aescbc", "key2", "key1")...)
	stored("key2")
	harness.Check(t, s.Stop())
	config.Write(t, harness.Keys("aescbc", "key2")...)
	s.Restart()
	readPage(t, ctx, s.API(), maps, token, 3, "")
}
