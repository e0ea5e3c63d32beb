package kubestorage

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
)

// unloaded is a resource whose memory is not loaded, with a pod.
type unloaded struct {
	*fixture
	source *stallable
	pod    *example.Pod
}

func newUnloaded(t *testing.T) *unloaded {
	t.Helper()
	s := &stallable{}
	s.lists.shut()
	u := &unloaded{setup(t, inMemory(memory.New()), s.through, beforeReady), s, nil}
	t.Cleanup(s.lists.open)
	return u
}

// during returns the requests to etcd during the call of f. It leaves out requests for etcd's
// revision, because the blocked load may start with one at any time.
func (u *unloaded) during(f func()) tally {
	got := u.requests.during(f)
	got.Revisions = 0
	return got
}

// requireWrites creates and changes the pod. Memory has no suggestion for the change, which costs a
// read.
func (u *unloaded) requireWrites(t *testing.T) {
	t.Helper()
	got := u.during(func() { u.pod = u.create(t, newPod("a"))[0] })
	if got != (tally{Writes: 1}) {
		t.Errorf("create: requests to etcd %+v", got)
	}
	got = u.during(func() { u.update(t, u.pod, "1") })
	if got != (tally{Gets: 1, Writes: 1}) {
		t.Errorf("update: requests to etcd %+v, want a read because memory has no suggestion", got)
	}
}

// requireRefusedList fails unless the list is refused without a request to etcd.
func (u *unloaded) requireRefusedList(t *testing.T, name string, opts storage.ListOptions) {
	t.Helper()
	ctx := soon(t)
	var err error
	got := u.during(func() { err = u.GetList(ctx, "/pods/", opts, &example.PodList{}) })
	requireRetry(t, "list "+name, err)
	if got != (tally{}) {
		t.Errorf("list %s: requests to etcd %+v", name, got)
	}
}

// requireListFromEtcd fails unless the list has the pod, for one request to etcd.
func (u *unloaded) requireListFromEtcd(t *testing.T, name string, opts storage.ListOptions) {
	t.Helper()
	list := &example.PodList{}
	var err error
	got := u.during(func() { err = u.GetList(contextFor(t), "/pods/", opts, list) })
	if err != nil || podNames(list) != "a" || got != (tally{Ranges: 1}) {
		t.Errorf("list %s: %q, %v, requests to etcd %+v", name, podNames(list), err, got)
	}
}

// requireRefusedWatch fails unless a watch from the resource version is refused.
func (u *unloaded) requireRefusedWatch(t *testing.T, resourceVersion string) {
	t.Helper()
	opts := everything()
	opts.ResourceVersion = resourceVersion
	_, err := u.Watch(soon(t), "/pods/", opts)
	requireRetry(t, "watch at "+resourceVersion, err)
}

// requireGetFromEtcd fails unless a GET has the changed pod, for one request to etcd.
func (u *unloaded) requireGetFromEtcd(t *testing.T, resourceVersion string) {
	t.Helper()
	out := &example.Pod{}
	got := u.during(func() {
		if err := u.Get(contextFor(t), podKey(u.pod), storage.GetOptions{ResourceVersion: resourceVersion}, out); err != nil {
			t.Errorf("get at %q: %v", resourceVersion, err)
		}
	})
	if got != (tally{Gets: 1}) || out.Annotations["value"] != "1" {
		t.Errorf("get at %q: requests to etcd %+v, object %v", resourceVersion, got, out.Annotations)
	}
}

// TestBeforeReady_ListAndWatch_Return429: until a resource is loaded, LIST and WATCH wait for a
// while and are then refused with 429. Small pages without a selector are served, because they are
// cheap for etcd, like GETs and writes (KEP-4568).
func TestBeforeReady_ListAndWatch_Return429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u := newUnloaded(t)
		if err := u.ReadinessCheck(); !errors.Is(err, storage.ErrStorageNotReady) {
			t.Errorf("readiness: %v, want not ready", err)
		}
		u.requireWrites(t)

		selecting := storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{"a": "b"}), Field: fields.Everything(), Limit: 10, GetAttrs: podAttrs}
		byField := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.OneTermEqualSelector("metadata.name", "a"), Limit: 10, GetAttrs: podAttrs}
		page := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), Limit: 10}
		u.requireRefusedList(t, "everything", storage.ListOptions{Predicate: storage.Everything, Recursive: true})
		u.requireRefusedList(t, "everything at 0", storage.ListOptions{Predicate: storage.Everything, Recursive: true, ResourceVersion: "0"})
		u.requireRefusedList(t, "exactly", storage.ListOptions{Predicate: storage.Everything, Recursive: true, ResourceVersion: u.pod.ResourceVersion,
			ResourceVersionMatch: metav1.ResourceVersionMatchExact})
		u.requireRefusedList(t, "page by label", storage.ListOptions{Predicate: selecting, Recursive: true})
		u.requireRefusedList(t, "page by field", storage.ListOptions{Predicate: byField, Recursive: true})
		u.requireListFromEtcd(t, "page", storage.ListOptions{Predicate: page, Recursive: true})
		u.requireListFromEtcd(t, "page at 0", storage.ListOptions{Predicate: page, Recursive: true, ResourceVersion: "0"})
		for _, rv := range []string{"", "0", u.pod.ResourceVersion} {
			u.requireRefusedWatch(t, rv)
			u.requireGetFromEtcd(t, rv)
		}

		u.source.lists.open()
		if err := u.engine(t).resource.WaitReady(contextFor(t)); err != nil {
			t.Fatal(err)
		}
		if err := u.ReadinessCheck(); err != nil {
			t.Errorf("readiness: %v", err)
		}
		if got := podNames(u.list(t, everything())); got != "a" {
			t.Errorf("list has %q", got)
		}
	})
}

// soon returns the context of a request with a short deadline, so that its refusal does not take
// long.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	t.Cleanup(cancel)
	return ctx
}

// requireRetry fails if err is not 429 with Retry-After.
func requireRetry(t *testing.T, what string, err error) {
	t.Helper()
	seconds, ok := apierrors.SuggestsClientDelay(err)
	if !apierrors.IsTooManyRequests(err) || !ok || seconds < 1 {
		t.Errorf("%s: %v, want 429 with Retry-After", what, err)
	}
}
