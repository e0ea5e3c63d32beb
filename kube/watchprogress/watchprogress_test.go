package watchprogress

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

func TestRequested_AcceptHeaders(t *testing.T) {
	for accept, want := range map[string]bool{
		MediaType:                       true,
		MediaType + ",application/json": true,
		"application/json," + MediaType: false,
		"application/json":              false,
		"":                              false,
		"application/json;as=WatchProgress;v=v2;g=strata":         false,
		"application/json;as=RevisionTimes;v=v1alpha1;g=strata":   false,
		"application/yaml;as=WatchProgress;v=v1alpha1;g=strata":   false,
		"application/json; as=WatchProgress; g=strata;v=v1alpha1": true,
	} {
		req := &http.Request{Header: http.Header{"Accept": {accept}}}
		if got := Requested(req); got != want {
			t.Errorf("%q: %v", accept, got)
		}
	}
}

func object(name string, revision int) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: fmt.Sprint(revision)}}
}

// TestCache_EachChange_MovesRevision: events, lists and bookmarks reach the store before its revision moves, which never decreases.
func TestCache_EachChange_MovesRevision(t *testing.T) {
	store := cache.NewStore(cache.MetaNamespaceKeyFunc)
	c := NewCache(store)
	for i, step := range []struct {
		do   func() error
		want int64
		keys int
	}{
		{func() error { return c.Replace([]any{object("a", 3), object("b", 4)}, "5") }, 5, 2},
		{func() error { return c.Add(object("c", 6)) }, 6, 3},
		{func() error { return c.Update(object("a", 7)) }, 7, 3},
		{func() error { return c.Delete(object("b", 8)) }, 8, 2},
		{func() error { return c.Bookmark("12") }, 12, 2},
		{func() error { return c.Bookmark("11") }, 12, 2},
	} {
		if err := step.do(); err != nil {
			t.Fatal(err)
		}
		if got, keys := c.Revision(), len(store.ListKeys()); got != step.want || keys != step.keys {
			t.Errorf("step %d: revision %d with %d objects, want %d with %d", i, got, keys, step.want, step.keys)
		}
	}
	if err := c.Bookmark("twelve"); err == nil {
		t.Error("a bookmark without a number is not an error")
	}
}

// server is a server whose watch reports a revision some time after the request for it.
type server struct {
	mu       sync.Mutex
	revision int64 // of the newest acknowledged write
	requests int
	cache    *Cache
	report   func(revision int64) // reports a revision; nil for a watch that is on another server
}

func (s *server) request(ctx context.Context) (WatchProgress, error) {
	s.mu.Lock()
	s.requests++
	p := WatchProgress{ResourceVersion: s.revision, Watches: 1}
	s.mu.Unlock()
	select {
	case <-time.After(10 * time.Millisecond):
	case <-ctx.Done():
		return p, ctx.Err()
	}
	if s.report != nil {
		s.report(p.ResourceVersion)
	}
	return p, nil
}

func newServer() (*server, *Reader) {
	s := &server{cache: NewCache(cache.NewStore(cache.MetaNamespaceKeyFunc))}
	s.report = func(revision int64) {
		time.AfterFunc(time.Millisecond, func() { _ = s.cache.Bookmark(fmt.Sprint(revision)) })
	}
	return s, newReader(s.cache, s.request)
}

// TestReader_ConcurrentCalls_ShareNextRequest: calls that begin while a request is in flight share the next one, and each sees the writes
// before it.
func TestReader_ConcurrentCalls_ShareNextRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newServer()
		var wg sync.WaitGroup
		for i := range 100 {
			s.mu.Lock()
			s.revision++
			least := s.revision
			s.mu.Unlock()
			wg.Go(func() {
				if got, err := r.Wait(t.Context()); err != nil || got < least || s.cache.Revision() < least {
					t.Errorf("call %d: revision %d, the cache at %d, %v; want at least %d", i, got, s.cache.Revision(), err, least)
				}
			})
			synctest.Wait()
		}
		wg.Wait()
		if s.requests != 2 {
			t.Errorf("%d requests, want 2", s.requests)
		}
	})
}

// TestReader_CallThatSends_IsCancelled: the other calls get an answer all the same.
func TestReader_CallThatSends_IsCancelled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newServer()
		s.revision = 7
		ctx, cancel := context.WithCancel(t.Context())
		first := make(chan error, 1)
		go func() {
			_, err := r.Wait(ctx)
			first <- err
		}()
		synctest.Wait() // its request is in flight
		second, third := make(chan error, 1), make(chan error, 1)
		secondCtx, cancelSecond := context.WithCancel(t.Context())
		go func() {
			_, err := r.Wait(secondCtx)
			second <- err
		}()
		synctest.Wait()
		go func() {
			_, err := r.Wait(t.Context())
			third <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-first; !errors.Is(err, context.Canceled) {
			t.Errorf("the canceled call returned %v", err)
		}
		synctest.Wait()
		cancelSecond()
		<-second // it may have been the one that sent, or not
		if err := <-third; err != nil {
			t.Error(err)
		}
	})
}

// TestReader_WatchOnAnotherServer_RequestsAgain: the request reached a server without the watch.
func TestReader_WatchOnAnotherServer_RequestsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, r := newServer()
		s.revision = 7
		report := s.report
		s.report = func(revision int64) {
			if s.requests == 3 {
				report(revision)
			}
		}
		if got, err := r.Wait(t.Context()); err != nil || got != 7 || s.requests != 3 {
			t.Errorf("revision %d after %d requests, %v; want 7 after 3", got, s.requests, err)
		}
		s.revision, s.report = 8, nil
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := r.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a watch that reports nothing: %v", err)
		}
	})
}
