package etcdread

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// members is a store whose requests go to members of etcd in turn, of which some hang.
type members struct {
	storage.Interface
	hang     func(request int64) bool
	requests atomic.Int64
	err      error
}

func (m *members) Get(ctx context.Context, key string, _ storage.GetOptions, out runtime.Object) error {
	if n := m.requests.Add(1); m.hang != nil && m.hang(n) {
		<-ctx.Done()
		return ctx.Err()
	}
	out.(*example.Pod).Name = key
	return m.err
}

// TestGet_MemberHangs_AsksAnother: after a second two requests are sent, of which the first answer counts; a missing key is an answer.
func TestGet_MemberHangs_AsksAnother(t *testing.T) {
	for name, c := range map[string]struct {
		hang     func(int64) bool
		err      error
		requests int64
		took     time.Duration
	}{
		"none hangs":           {nil, nil, 1, 0},
		"every second hangs":   {func(n int64) bool { return n%2 == 1 }, nil, 3, time.Second},
		"all hang for a while": {func(n int64) bool { return n <= 5 }, nil, 7, 7 * time.Second},
		"without the key":      {func(n int64) bool { return n%2 == 1 }, storage.NewKeyNotFoundError("a", 0), 3, time.Second},
		"an error":             {nil, errors.New("failed"), 1, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			m, out := &members{hang: c.hang, err: c.err}, &example.Pod{}
			p, began := make(Places, 1), time.Now()
			err := p.Get(t.Context(), m, "a", storage.GetOptions{}, out)
			if !errors.Is(err, c.err) || c.err == nil && out.Name != "a" {
				t.Errorf("%s: %v, %q", name, err, out.Name)
			}
			synctest.Wait() // the answer may precede the second request
			if took := time.Since(began); took != c.took || m.requests.Load() != c.requests {
				t.Errorf("%s: %d requests in %s, want %d in %s", name, m.requests.Load(), took, c.requests, c.took)
			}
			if len(p) != 0 {
				t.Errorf("%s: a place is taken", name)
			}
		})
	}
}

// TestGet_AllHang_EndsWithRequest, and no further GET waits: without a place it is refused.
func TestGet_AllHang_EndsWithRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, p := &members{hang: func(int64) bool { return true }}, make(Places, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- p.Get(ctx, m, "a", storage.GetOptions{}, &example.Pod{}) }()
		synctest.Wait()
		if err := p.Get(ctx, m, "a", storage.GetOptions{}, &example.Pod{}); !apierrors.IsTooManyRequests(err) {
			t.Errorf("one GET too many: %v, want 429", err)
		}
		if err := <-done; !errors.Is(err, context.DeadlineExceeded) || len(p) != 0 {
			t.Errorf("%v, %d places are taken", err, len(p))
		}
	})
}
