package list

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestGetList_TokenCannotBeSealed_Returns429: the keys of tokens cannot be read, and only a page
// needs them.
func TestGetList_TokenCannotBeSealed_Returns429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		f := newFixture(t, func(o *options) {
			o.onEtcdRead = func() error {
				if down.Load() {
					return errors.New("etcd is down")
				}
				return nil
			}
		})
		f.Put(t, podtest.Pod("a"), podtest.Pod("b"))
		f.CatchUp(t)
		down.Store(true)
		tokens := pages.NewTokens(f.kv, podtest.Prefix, pages.TokenOptions{Seal: true, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		defer tokens.Close()
		f.env.Pages = pages.New(f.group, tokens, true)
		opts := everything()
		opts.ResourceVersion = "0"
		var list example.PodList
		if err := f.env.GetList(t.Context(), "/pods/", opts, &list); err != nil || len(list.Items) != 2 {
			t.Errorf("without pages: %d pods, %v", len(list.Items), err)
		}
		opts.ResourceVersion = ""
		if err := f.env.GetList(t.Context(), "/pods/", limited(opts, 1), &example.PodList{}); code(err) != http.StatusTooManyRequests {
			t.Errorf("a page: %v, want 429", err)
		}
	})
}

// TestGetList_EtcdUnavailable_Returns429: with Retry-After, for a list that upstream's store
// answers, and for one that is older than memory.
func TestGetList_EtcdUnavailable_Returns429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var down atomic.Bool
		f := newFixture(t, func(o *options) {
			o.onEtcdRead = func() error {
				if down.Load() {
					return status.Error(codes.Unavailable, "the replica is loading, and cannot feed others yet; retry")
				}
				return nil
			}
		})
		past := exactly(everything(), f.Put(t, podtest.Pod("a")))
		f.Put(t, podtest.Pod("b"))
		f.olderThanMemory(t)
		down.Store(true)
		read := func(name string, opts storage.ListOptions) {
			err := f.env.GetList(t.Context(), "/pods/", opts, &example.PodList{})
			if seconds, ok := apierrors.SuggestsClientDelay(err); code(err) != http.StatusTooManyRequests || !ok || seconds < 1 {
				t.Errorf("%s: %v, want 429 with Retry-After", name, err)
			}
		}
		read("older than memory", past)
		f.env.Gates = Gates{}
		read("with the gates off", everything())
	})
}
