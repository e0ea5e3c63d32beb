package pages

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

var podsGroup = schema.GroupResource{Resource: "pods"}

const tokenKey = podtest.Prefix + tokenKeys

// newKV returns a client of an empty etcd.
func newKV() (*podtest.KV, *memory.Store) {
	etcd := memory.New()
	return podtest.NewKV(etcd, nil), etcd
}

// startTokens starts the tokens of one replica.
func startTokens(t testing.TB, kv *podtest.KV, change ...func(*TokenOptions)) *Tokens {
	opts := TokenOptions{Seal: true, Transformer: podtest.Encryption(t, "1"), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for _, f := range change {
		f(&opts)
	}
	tokens := NewTokens(kv, podtest.Prefix, opts)
	t.Cleanup(tokens.Close)
	return tokens
}

func withoutSealing(o *TokenOptions) { o.Seal = false }
func withoutPlain(o *TokenOptions)   { o.RefusePlain = true }

func plainToken(t rapid.TB, prefix, start string, rev int64) string {
	t.Helper()
	token, err := storage.EncodeContinue(prefix+start, prefix, rev)
	testcheck.NoError(t, err)
	return token
}

// requireStatus fails unless the error is a Status with this code and reason that has the words in
// its message.
func requireStatus(t testing.TB, what string, err error, code int32, reason metav1.StatusReason, words string) {
	t.Helper()
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Code != code || status.Status().Reason != reason || !strings.Contains(err.Error(), words) {
		t.Errorf("%s: got %v, want %d %s with %q", what, err, code, reason, words)
	}
}

// TestTokens_SealedOnOtherReplica_OpenUnchanged: a token sealed on one replica is opened on another
// as upstream's plain form, byte by byte.
func TestTokens_SealedOnOtherReplica_OpenUnchanged(t *testing.T) {
	kv, _ := newKV()
	a, b := startTokens(t, kv), startTokens(t, kv, withoutSealing)
	ctx := podtest.Context(t)
	rapid.Check(t, func(t *rapid.T) {
		prefix := podtest.Prefix + rapid.SampledFrom([]string{"pods/", "pods/ns/", "example.com/widgets/", "pods"}).Draw(t, "prefix")
		start := rapid.StringMatching(`[/<>&"a-zé]{1,80}\x00?`).Draw(t, "start")
		rev := rapid.OneOf(rapid.Just(int64(-1)), rapid.Int64Min(1)).Draw(t, "revision")
		plain := plainToken(t, prefix, start, rev)
		sealed, err := a.Seal(ctx, podsGroup, prefix, plain)
		if err != nil || sealed == plain {
			t.Fatalf("sealed as %q, %v", sealed, err)
		}
		for _, asked := range []string{prefix, strings.TrimSuffix(prefix, "/"), strings.TrimSuffix(prefix, "/") + "/"} {
			if got, err := b.Open(ctx, podsGroup, asked, sealed); err != nil || got != plain {
				t.Fatalf("opened with prefix %s as %q, %v, want %q", asked, got, err, plain)
			}
		}
		if _, _, err := storage.DecodeContinue(sealed, prefix); err == nil {
			t.Fatal("upstream takes a sealed token for a plain one")
		}
	})
}

// TestRebase_OtherScope_StartsAtSameKey start at the same key.
func TestRebase_OtherScope_StartsAtSameKey(t *testing.T) {
	const narrow, wide = podtest.Prefix + "pods/ns/", podtest.Prefix + "pods/"
	plain := plainToken(t, narrow, "name\x00", 7)
	for _, prefix := range []string{narrow, strings.TrimSuffix(narrow, "/")} {
		for _, scope := range []string{wide, strings.TrimSuffix(wide, "/"), narrow} {
			got, err := rebase(plain, prefix, scope)
			testcheck.NoError(t, err)
			start, rev, err := storage.DecodeContinue(got, strings.TrimSuffix(scope, "/")+"/")
			if err != nil || rev != 7 || start != narrow+"name\x00" {
				t.Errorf("from %s to %s: starts at %q, revision %d, %v", prefix, scope, start, rev, err)
			}
		}
	}
	if got, err := rebase("", narrow, wide); got != "" || err != nil {
		t.Errorf("no token: %q, %v", got, err)
	}
	if got, err := rebase(plain, narrow, podtest.Prefix+"secrets/"); err == nil {
		t.Errorf("for other keys: %q", got)
	}
}

// TestTokens_OfOtherList_Return400WithoutKey: 400 with a message that names the reason, and no key.
func TestTokens_OfOtherList_Return400WithoutKey(t *testing.T) {
	kv, _ := newKV()
	elsewhere, _ := newKV()
	a := startTokens(t, kv)
	ctx := podtest.Context(t)
	const prefix = podtest.Prefix + "pods/ns/"
	plain := plainToken(t, prefix, "very-secret\x00", 7)
	sealed, err := a.Seal(ctx, podsGroup, prefix, plain)
	testcheck.NoError(t, err)
	const other = "issued for another list"
	for what, test := range map[string]struct {
		tokens   *Tokens
		resource schema.GroupResource
		prefix   string
		token    string
		words    string
	}{
		"another namespace":  {a, podsGroup, podtest.Prefix + "pods/ns2/", sealed, other},
		"all namespaces":     {a, podsGroup, podtest.Prefix + "pods/", sealed, other},
		"another resource":   {a, schema.GroupResource{Resource: "secrets"}, prefix, sealed, other},
		"another group":      {a, schema.GroupResource{Group: "example.com", Resource: "pods"}, prefix, sealed, other},
		"another etcd":       {startTokens(t, elsewhere), podsGroup, prefix, sealed, "not sealed by this cluster"},
		"changed":            {a, podsGroup, prefix, sealed[:len(sealed)-3] + "AAA", other},
		"cut off":            {a, podsGroup, prefix, sealed[:47], "truncated"},
		"another version":    {a, podsGroup, prefix, "s9" + sealed[2:], "version"},
		"plain, and refused": {startTokens(t, kv, withoutPlain), podsGroup, prefix, plain, "accepts only sealed tokens"},
	} {
		got, err := test.tokens.Open(ctx, test.resource, test.prefix, test.token)
		requireStatus(t, what, err, http.StatusBadRequest, metav1.StatusReasonBadRequest, "continue key is not valid: ")
		requireStatus(t, what, err, http.StatusBadRequest, metav1.StatusReasonBadRequest, test.words)
		if got != "" || strings.Contains(err.Error(), "secret\x00") || strings.Contains(err.Error(), "very") {
			t.Errorf("%s: %q, %v", what, got, err)
		}
	}
	if got, err := a.Open(ctx, podsGroup, prefix, plain); got != plain || err != nil {
		t.Errorf("a plain token: %q, %v", got, err)
	}
	if got, err := a.Open(ctx, podsGroup, prefix, ""); got != "" || err != nil {
		t.Errorf("no token: %q, %v", got, err)
	}
	if got, err := a.Seal(ctx, podsGroup, prefix, ""); got != "" || err != nil {
		t.Errorf("sealed an empty token: %q, %v", got, err)
	}
}

// TestTokens_ReplicasStartTogether_ShareOneRing: many start at once on an empty etcd; the ring in
// etcd is encrypted for its key.
func TestTokens_ReplicasStartTogether_ShareOneRing(t *testing.T) {
	kv, _ := newKV()
	ctx := podtest.Context(t)
	var all []*Tokens
	for range 10 {
		all = append(all, startTokens(t, kv))
	}
	const prefix = podtest.Prefix + "pods/"
	plain := plainToken(t, prefix, "a\x00", 7)
	sealed := make([]string, len(all))
	var done sync.WaitGroup
	for i, tokens := range all {
		done.Go(func() {
			var err error
			if sealed[i], err = tokens.Seal(ctx, podsGroup, prefix, plain); err != nil {
				t.Error(err)
			}
		})
	}
	done.Wait()
	for _, tokens := range all {
		for _, token := range sealed {
			if got, err := tokens.Open(ctx, podsGroup, prefix, token); err != nil || got != plain {
				t.Fatalf("%q, %v", got, err)
			}
		}
	}
	resp, err := kv.Get(ctx, podtest.Prefix, clientv3.WithPrefix())
	if err != nil || len(resp.Kvs) != 1 || resp.Kvs[0].ModRevision != resp.Kvs[0].CreateRevision || string(resp.Kvs[0].Key) != tokenKey {
		t.Fatalf("etcd has %v, %v, want one key, written once", resp.Kvs, err)
	}
	stored := resp.Kvs[0].Value
	if !strings.HasPrefix(string(stored), "key1:") || strings.Contains(string(stored), "secret") {
		t.Errorf("stored as %.60q", stored)
	}
	if _, _, err := podtest.Encryption(t, "1").TransformFromStorage(ctx, stored, value.DefaultContext(tokenKey)); err != nil {
		t.Errorf("not bound to its key in etcd: %v", err)
	}
}

// TestTokens_WithoutSealing_OpenSealedTokens cost nothing and open tokens sealed by others.
func TestTokens_WithoutSealing_OpenSealedTokens(t *testing.T) {
	kv, _ := newKV()
	ctx := podtest.Context(t)
	const prefix = podtest.Prefix + "pods/"
	plain := plainToken(t, prefix, "a\x00", 7)
	off := startTokens(t, kv, withoutSealing)
	if got, err := off.Seal(ctx, podsGroup, prefix, plain); got != plain || err != nil {
		t.Errorf("sealed as %q, %v", got, err)
	}
	if got, err := off.Open(ctx, podsGroup, prefix, plain); got != plain || err != nil {
		t.Errorf("opened as %q, %v", got, err)
	}
	if gets, writes := kv.Requests(); gets+writes != 0 {
		t.Errorf("%d reads, %d writes", gets, writes)
	}
	sealed, err := startTokens(t, kv).Seal(ctx, podsGroup, prefix, plain)
	testcheck.NoError(t, err)
	if got, err := off.Open(ctx, podsGroup, prefix, sealed); got != plain || err != nil {
		t.Errorf("opened as %q, %v", got, err)
	}
}

// TestTokens_RingUnavailable_Return429: 429 with Retry-After for requests that need the ring, and
// no fallback to plain tokens.
func TestTokens_RingUnavailable_Return429(t *testing.T) {
	kv, _ := newKV()
	ctx := podtest.Context(t)
	const prefix = podtest.Prefix + "pods/"
	plain := plainToken(t, prefix, "a\x00", 7)
	sealed, err := startTokens(t, kv).Seal(ctx, podsGroup, prefix, plain)
	testcheck.NoError(t, err)
	k := startTokens(t, kv, func(o *TokenOptions) {
		o.Transformer = podtest.Encryption(t, "2")
	})
	got, err := k.Seal(ctx, podsGroup, prefix, plain)
	requireStatus(t, "seal", err, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, "not available")
	if _, pause := apierrors.SuggestsClientDelay(err); got != "" || !pause {
		t.Errorf("sealed as %q, pause %v", got, pause)
	}
	_, err = k.Open(ctx, podsGroup, prefix, sealed)
	requireStatus(t, "open", err, http.StatusTooManyRequests, metav1.StatusReasonTooManyRequests, "not available")
	if got, err := k.Open(ctx, podsGroup, prefix, plain); got != plain || err != nil {
		t.Errorf("a plain token: %q, %v", got, err)
	}
}

// TestTokens_RingRemoved_Return410: tokens sealed before are 410 where their key was known, so that
// clients restart their lists.
func TestTokens_RingRemoved_Return410(t *testing.T) {
	kv, etcd := newKV()
	ctx := podtest.Context(t)
	const prefix = podtest.Prefix + "pods/"
	plain := plainToken(t, prefix, "a\x00", 7)
	k := startTokens(t, kv)
	sealed, err := k.Seal(ctx, podsGroup, prefix, plain)
	testcheck.NoError(t, err)
	etcd.Delete(tokenKey)
	// A forged token makes it read the ring again.
	made := sealed[:5] + "zzzz" + sealed[9:]
	_, err = k.Open(ctx, podsGroup, prefix, made)
	requireStatus(t, "made up", err, http.StatusBadRequest, metav1.StatusReasonBadRequest, "not sealed by this cluster")
	_, err = k.Open(ctx, podsGroup, prefix, sealed)
	requireStatus(t, "of before", err, http.StatusGone, metav1.StatusReasonExpired, "restart the list")
	fresh, err := k.Seal(ctx, podsGroup, prefix, plain)
	testcheck.NoError(t, err)
	another := startTokens(t, kv)
	if got, err := another.Open(ctx, podsGroup, prefix, fresh); err != nil || got != plain {
		t.Errorf("%q, %v", got, err)
	}
	_, err = another.Open(ctx, podsGroup, prefix, sealed)
	requireStatus(t, "an old token, another replica", err, http.StatusGone, metav1.StatusReasonExpired, "restart the list")
}

// FuzzTokens opens any text: the result is an error for the client, or a token for upstream's
// checks.
func FuzzTokens(f *testing.F) {
	kv, _ := newKV()
	k := startTokens(f, kv)
	const prefix = podtest.Prefix + "pods/ns/"
	plain := plainToken(f, prefix, "a\x00", 7)
	sealed, err := k.Seal(podtest.Context(f), podsGroup, prefix, plain)
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{"", plain, sealed, sealed[:len(sealed)-1], "s1.", "s2.AAAA", "garbage", "!!!", "."} {
		f.Add(seed, prefix)
		f.Add(seed, podtest.Prefix+"secrets/")
	}
	f.Fuzz(func(t *testing.T, token, at string) {
		ctx := t.Context()
		got, err := k.Open(ctx, podsGroup, at, token)
		switch {
		case err != nil:
			if !apierrors.IsBadRequest(err) || got != "" {
				t.Fatalf("%q: %q, %v", token, got, err)
			}
		case strings.Contains(token, "."):
			if token != sealed || k.Scope(podsGroup, at) != k.Scope(podsGroup, prefix) || got != plain {
				t.Fatalf("%q opens with prefix %q as %q", token, at, got)
			}
		case got != token:
			t.Fatalf("%q became %q", token, got)
		}
	})
}
