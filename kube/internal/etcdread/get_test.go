package etcdread

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	answer   func(request int64) error // nil: success
	requests atomic.Int64
}

func (m *members) Get(ctx context.Context, key string, _ storage.GetOptions, out runtime.Object) error {
	n := m.requests.Add(1)
	if m.hang != nil && m.hang(n) {
		<-ctx.Done()
		return ctx.Err()
	}
	out.(*example.Pod).Name = key
	if m.answer != nil {
		return m.answer(n)
	}
	return nil
}

// TestGet_MemberHangs_AsksAnother: after a second two requests are sent, of which one successful
// answer is enough. A missing key is an answer, and a panic in them is that of the request.
func TestGet_MemberHangs_AsksAnother(t *testing.T) {
	odd := func(n int64) bool { return n%2 == 1 }
	first := func(n int64) bool { return n == 1 }
	broken, missing := errors.New("broken"), storage.NewKeyNotFoundError("a", 0)
	for name, c := range map[string]struct {
		hang     func(int64) bool
		answer   func(int64) error
		want     string // error
		requests int64
		took     time.Duration
	}{
		"none hangs":           {requests: 1},
		"every second hangs":   {hang: odd, requests: 3, took: time.Second},
		"all hang for a while": {hang: func(n int64) bool { return n <= 5 }, requests: 7, took: 7 * time.Second},
		"without the key":      {hang: odd, answer: func(int64) error { return missing }, want: missing.Error(), requests: 3, took: time.Second},
		"the first fails":      {answer: func(int64) error { return broken }, want: "broken", requests: 1},
		"one of two fails": {hang: first, answer: func(n int64) error {
			if n == 2 {
				return broken
			}
			return nil
		}, requests: 3, took: time.Second},
		"both fail":  {hang: first, answer: func(int64) error { return broken }, want: "broken", requests: 3, took: time.Second},
		"both panic": {hang: first, answer: func(int64) error { panic("bits flipped") }, want: "panic: bits flipped", requests: 3, took: time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			m, out := &members{hang: c.hang, answer: c.answer}, &example.Pod{}
			p, began := make(Places, 1), time.Now()
			err := p.Get(t.Context(), m, "a", storage.GetOptions{}, out)
			if fmt.Sprint(err) != cmp.Or(c.want, "<nil>") || c.want == "" && out.Name != "a" {
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
