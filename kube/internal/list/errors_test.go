package list

import (
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"k8s.io/apiserver/pkg/apis/example"

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
