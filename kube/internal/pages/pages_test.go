package pages

import (
	"context"
	"net/http"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/test/podtest"
)

var podKeys = Keys{PathPrefix: podtest.Prefix, ResourcePrefix: "/pods"}

// TestKeys_Scope_IsThatOfRequest: a first page of all namespaces that a selector has narrowed keeps
// the scope of its request.
func TestKeys_Scope_IsThatOfRequest(t *testing.T) {
	const narrow = podtest.Root + "ns/"
	if key, err := podKeys.Prepare("/pods/ns", true); key != narrow || err != nil {
		t.Errorf("%q, %v", key, err)
	}
	if _, err := podKeys.Prepare("/pods/../secrets", true); err == nil {
		t.Error("a key may leave the resource")
	}
	all, one := &request.RequestInfo{Resource: "pods"}, &request.RequestInfo{Resource: "pods", Namespace: "ns"}
	for _, c := range []struct {
		info  *request.RequestInfo
		token string
		want  string
	}{{all, "", podtest.Root}, {all, "token", narrow}, {one, "", narrow}, {nil, "", narrow}} {
		ctx := t.Context()
		if c.info != nil {
			ctx = request.WithRequestInfo(ctx, c.info)
		}
		opts := storage.ListOptions{Recursive: true, Predicate: storage.SelectionPredicate{Continue: c.token}}
		if got := podKeys.Scope(ctx, narrow, opts); got != c.want {
			t.Errorf("%+v, token %q: %s, want %s", c.info, c.token, got, c.want)
		}
	}
}

// pagedStore is an etcd3 store with one page, or an error.
type pagedStore struct {
	storage.Interface
	token string
	err   error
	got   storage.ListOptions
}

func (s *pagedStore) GetList(_ context.Context, _ string, opts storage.ListOptions, out runtime.Object) error {
	s.got = opts
	out.(*example.PodList).Continue = s.token
	return s.err
}

// TestPages_List_SealsTokensForScope: a token of the narrowed prefix continues in the scope of the
// request, sealed, and so does that of a 410. The sealed token reaches the store in its plain form.
func TestPages_List_SealsTokensForScope(t *testing.T) {
	kv, _ := newKV()
	ctx := podtest.Context(t)
	p := New(podsGroup, startTokens(t, kv), true)
	const narrow, wide = podtest.Root + "ns/", podtest.Root
	etcd := &pagedStore{token: plainToken(t, narrow, "name\x00", 7)}
	requireContinues := func(what, token string) {
		t.Helper()
		opts, err := p.Open(ctx, wide, storage.ListOptions{Recursive: true, Predicate: storage.SelectionPredicate{Continue: token, Limit: 5}})
		if err != nil || opts.Predicate.Limit != 5 || token == opts.Predicate.Continue {
			t.Fatalf("%s: %+v, %v", what, opts.Predicate, err)
		}
		if start, rev, err := storage.DecodeContinue(opts.Predicate.Continue, wide); start != narrow+"name\x00" || rev != 7 || err != nil {
			t.Errorf("%s continues at %q, revision %d, %v", what, start, rev, err)
		}
	}
	list := &example.PodList{}
	if err := p.List(ctx, etcd, "/pods/ns", narrow, wide, storage.ListOptions{}, list); err != nil {
		t.Fatal(err)
	}
	requireContinues("a page", list.Continue)

	expired := apierrors.NewResourceExpired("compacted")
	expired.ErrStatus.Continue = plainToken(t, wide, "ns/name\x00", 7)
	etcd.err = expired
	err := p.List(ctx, etcd, "/pods/ns", wide, wide, storage.ListOptions{}, list)
	requireStatus(t, "a compacted page", err, http.StatusGone, metav1.StatusReasonExpired, "compacted")
	requireContinues("a compacted page", err.(*apierrors.StatusError).ErrStatus.Continue)
	if other := apierrors.NewBadRequest("x"); p.SealError(ctx, wide, other) != error(other) {
		t.Error("an error without a token is changed")
	}
	etcd.err, etcd.token = nil, ""
	if err := p.List(ctx, etcd, "/pods/ns", narrow, wide, storage.ListOptions{}, list); err != nil || list.Continue != "" {
		t.Errorf("the last page: %q, %v", list.Continue, err)
	}
}

// TestPages_ChunkingOff_IgnoresLimitAndToken, even a malformed one.
func TestPages_ChunkingOff_IgnoresLimitAndToken(t *testing.T) {
	kv, _ := newKV()
	p := New(podsGroup, startTokens(t, kv), false)
	opts, err := p.Open(t.Context(), podtest.Root, storage.ListOptions{Recursive: true, Predicate: storage.SelectionPredicate{Continue: "s1.x", Limit: 5}})
	if err != nil || opts.Predicate.Continue != "" || opts.Predicate.Limit != 0 {
		t.Errorf("%+v, %v", opts.Predicate, err)
	}
}
