package kubestorage

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// TestWatch_ClientStopsReading_HoldsNoVersion moves the window past a watch whose client has
// stopped reading in the middle of its initial events (I7).
func TestWatch_ClientStopsReading_HoldsNoVersion(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // a client that does not read is ended soon
		f := setupInMemory(t, withWindow(mirror.Window{MaxBytes: 20_000}))
		const n = 522 // more than a watch holds for its client
		for i := range n {
			f.create(t, newPod(fmt.Sprintf("pod-%04d", i)))
		}
		f.catchUp(t)
		w, err := f.Watch(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: storage.Everything, ResourceVersion: "0"})
		testcheck.NoError(t, err)
		defer w.Stop()
		first := <-w.ResultChan()
		if first.Type != watch.Added {
			t.Fatalf("first event %v, want ADDED", first)
		}
		s := f.engine(t)
		at := s.mirror.PublishedRevision()
		for i := 0; ; i++ {
			if oldest, _, err := s.resource.Oldest(); err == nil && oldest > at {
				break
			}
			f.update(t, newPod(fmt.Sprintf("pod-%04d", i%n)), fmt.Sprint(i))
		}
		added := 1
		for ev := range w.ResultChan() {
			if ev.Type == watch.Added {
				added++
				continue
			}
			st, ok := ev.Object.(*metav1.Status)
			if ev.Type != watch.Error || !ok || st.Code != http.StatusGone || st.Reason != metav1.StatusReasonExpired {
				t.Fatalf("after %d objects %v %v, want 410", added, ev.Type, ev.Object)
			}
			if added >= n {
				t.Fatalf("410 after all %d objects", added)
			}
			return
		}
		t.Fatalf("the watch ended without an error after %d objects", added)
	})
}

// TestRevision_BeyondMaximum_IsInFuture covers numbers that parse but exceed every possible
// revision. The error of a GET has the client's number, and a watch waits. Package list has the
// lists.
func TestRevision_BeyondMaximum_IsInFuture(t *testing.T) {
	for _, rv := range []string{"9223372036854775807", "9223372036854775808", "18446744073709551615"} {
		synctest.Test(t, func(t *testing.T) {
			w := newTwin(t, mirror.DefaultWindow)
			w.put(t, newPod("a"))
			w.catchUp(t)
			err := w.Get(t.Context(), podKey(newPod("a")), storage.GetOptions{ResourceVersion: rv}, &example.Pod{})
			if want := "Too large resource version: " + rv + ","; !storage.IsTooLargeResourceVersion(err) || !strings.Contains(err.Error(), want) {
				t.Errorf("GET: %v, want %q", err, want)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			future, err := w.Watch(ctx, "/pods", afterRevision(rv))
			testcheck.NoError(t, err)
			if ev, ok := <-future.ResultChan(); ok {
				t.Errorf("a watch of the future sent %v", ev)
			}
		})
	}
}

// TestReadsFromEtcd_WithoutPlace_FailOrTimeOut takes all places and requests one more.
func TestReadsFromEtcd_WithoutPlace_FailOrTimeOut(t *testing.T) {
	t.Parallel()
	f := setupInMemory(t)
	pod := f.create(t, newPod("a"))[0]
	f.catchUp(t)
	s := f.engine(t)
	for range maxEtcdGets {
		s.cluster.getPlaces <- struct{}{}
	}
	ctx := contextFor(t)
	old := f.olderThanMemory(t)
	for range maxEtcdPages {
		s.cluster.listPlaces <- struct{}{}
	}
	if err := s.cluster.getPlaces.Get(ctx, s.etcd, podKey(pod), storage.GetOptions{}, &example.Pod{}); !apierrors.IsTooManyRequests(err) {
		t.Errorf("one GET too many: %v, want 429", err)
	}
	quick, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := s.GetList(quick, "/pods", old, &example.PodList{}); !apierrors.IsTimeout(err) {
		t.Errorf("one LIST too many: %v, want a timeout", err)
	}
	<-s.cluster.getPlaces
	<-s.cluster.listPlaces
	if err := s.cluster.getPlaces.Get(ctx, s.etcd, podKey(pod), storage.GetOptions{}, &example.Pod{}); err != nil {
		t.Errorf("a GET with room: %v", err)
	}
	if err := s.GetList(ctx, "/pods", old, &example.PodList{}); err != nil {
		t.Errorf("a LIST with room: %v", err)
	}
}
