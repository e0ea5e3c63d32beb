package kubestorage

import (
	"context"
	"errors"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// TestBeforeReady: until a resource is loaded, LIST and WATCH are refused with 429 when they
// have waited for a while, but for small pages that select nothing, which like GETs and writes are cheap for
// etcd (KEP-4568).
func TestBeforeReady(t *testing.T) {
	s := &stallable{}
	s.lists.shut()
	f := setup(t, s.through, beforeReady)
	defer s.lists.open()
	ctx := contextFor(t)

	if err := f.ReadinessCheck(); !errors.Is(err, storage.ErrStorageNotReady) {
		t.Errorf("readiness: %v, want not ready", err)
	}
	// The list that is held up begins with asking for etcd's revision, whenever that is.
	during := func(what func()) tally {
		got := f.requests.during(what)
		got.Revisions = 0
		return got
	}
	var pod *example.Pod
	got := during(func() { pod = f.create(t, newPod("a"))[0] })
	if got != (tally{Writes: 1}) {
		t.Errorf("create asked of etcd: %+v", got)
	}
	got = during(func() { f.update(t, pod, "1") })
	if got != (tally{Gets: 1, Writes: 1}) {
		t.Errorf("update asked of etcd: %+v, want a read because memory has no suggestion", got)
	}

	selecting := storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{"a": "b"}), Field: fields.Everything(), Limit: 10, GetAttrs: podAttrs}
	byField := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.OneTermEqualSelector("metadata.name", "a"), Limit: 10, GetAttrs: podAttrs}
	page := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), Limit: 10}
	for _, c := range []struct {
		name    string
		opts    storage.ListOptions
		refused bool
	}{
		{"everything", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, true},
		{"everything at 0", storage.ListOptions{Predicate: storage.Everything, Recursive: true, ResourceVersion: "0"}, true},
		{"exactly", storage.ListOptions{Predicate: storage.Everything, Recursive: true, ResourceVersion: pod.ResourceVersion,
			ResourceVersionMatch: metav1.ResourceVersionMatchExact}, true},
		{"page by label", storage.ListOptions{Predicate: selecting, Recursive: true}, true},
		{"page by field", storage.ListOptions{Predicate: byField, Recursive: true}, true},
		{"page", storage.ListOptions{Predicate: page, Recursive: true}, false},
		{"page at 0", storage.ListOptions{Predicate: page, Recursive: true, ResourceVersion: "0"}, false},
	} {
		list := &example.PodList{}
		ctx := ctx
		if c.refused {
			ctx = soon(t)
		}
		var err error
		got := during(func() { err = f.GetList(ctx, "/pods/", c.opts, list) })
		if !c.refused {
			if err != nil || podNames(list) != "a" || got != (tally{Ranges: 1}) {
				t.Errorf("list %s: %q, %v, asked of etcd: %+v", c.name, podNames(list), err, got)
			}
			continue
		}
		requireRetry(t, "list "+c.name, err)
		if got != (tally{}) {
			t.Errorf("list %s asked of etcd: %+v", c.name, got)
		}
	}
	for _, rv := range []string{"", "0", pod.ResourceVersion} {
		opts := everything()
		opts.ResourceVersion = rv
		_, err := f.Watch(soon(t), "/pods/", opts)
		requireRetry(t, "watch at "+rv, err)

		out := &example.Pod{}
		got := during(func() {
			if err := f.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rv}, out); err != nil {
				t.Errorf("get at %q: %v", rv, err)
			}
		})
		if got != (tally{Gets: 1}) || out.Annotations["value"] != "1" {
			t.Errorf("get at %q asked of etcd %+v and has %v", rv, got, out.Annotations)
		}
	}

	s.lists.open()
	if err := f.engine(t).resource.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	if err := f.ReadinessCheck(); err != nil {
		t.Errorf("readiness: %v", err)
	}
	if got := podNames(f.list(t, everything())); got != "a" {
		t.Errorf("list has %q", got)
	}
}

// soon returns the context of a request that has little time, so that its refusal does not take long.
func soon(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	t.Cleanup(cancel)
	return ctx
}

// TestPauseGrowsWithTheOutage: clients that are refused come back in 1 s at first and
// in 30 s at last; a new outage begins anew.
func TestPauseGrowsWithTheOutage(t *testing.T) {
	var o outage
	start := time.Now()
	for _, c := range []struct{ after, want time.Duration }{
		{0, time.Second},
		{5 * time.Second, time.Second},
		{12 * time.Second, 2 * time.Second},
		{30 * time.Second, 6 * time.Second},
		{time.Minute, 30 * time.Second},
		{time.Minute + outageGap, 30 * time.Second},
		{time.Hour, time.Second},
		{time.Hour + 12*time.Second, 2 * time.Second},
	} {
		if got := o.refuse(start.Add(c.after)); got != c.want {
			t.Errorf("after %s the pause is %s, want %s", c.after, got, c.want)
		}
	}
}

// requireRetry fails if err is not 429 with a pause.
func requireRetry(t *testing.T, what string, err error) {
	t.Helper()
	seconds, ok := apierrors.SuggestsClientDelay(err)
	if !apierrors.IsTooManyRequests(err) || !ok || seconds < 1 {
		t.Errorf("%s: %v, want 429 and when to come back", what, err)
	}
}
