package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// TestConsistentRead_WritesOfOtherClients_AreSeen: a read without a resource version sees every
// write by any client that etcd acknowledged before it (I6).
func TestConsistentRead_WritesOfOtherClients_AreSeen(t *testing.T) {
	t.Parallel()
	f := setup(t)
	other, err := clientv3.New(clientv3.Config{Endpoints: f.client.Endpoints(), Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	defer other.Close()
	readOtherWrites(t, f, other)
	// A GET may go to etcd while the machine is full.
	if got := f.requests.tally(); got.Ranges != 0 {
		t.Errorf("requests to etcd: %+v", got)
	}
}

// TestConsistentRead_WritesOfOtherClients_NeedNoObjectOfEtcd: on a machine that is never full.
func TestConsistentRead_WritesOfOtherClients_NeedNoObjectOfEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := setup(t, inMemory(memory.New()))
		readOtherWrites(t, f, f.client.KV)
		if got := f.requests.tally(); got.Gets != 0 || got.Ranges != 0 {
			t.Errorf("requests to etcd: %+v", got)
		}
	})
}

// readOtherWrites writes with other, and reads each write by GET or LIST.
func readOtherWrites(t *testing.T, f *fixture, other clientv3.KV) {
	t.Helper()
	ctx := contextFor(t)
	for i := range 100 {
		pod := withLabel(newPod(fmt.Sprintf("pod-%d", i%7)), "i", fmt.Sprint(i))
		data, err := runtime.Encode(f.codec, pod)
		testcheck.NoError(t, err)
		resp, err := other.Put(ctx, etcdKey(pod), string(data))
		testcheck.NoError(t, err)
		want := fmt.Sprint(resp.Header.Revision)
		seen := &example.Pod{}
		if i%2 == 0 {
			err = f.Get(ctx, podKey(pod), storage.GetOptions{}, seen)
		} else {
			list := &example.PodList{}
			opts := everything()
			opts.Recursive = false
			err = f.GetList(ctx, podKey(pod), opts, list)
			for apierrors.IsTooManyRequests(err) { // the machine is full
				err = f.GetList(ctx, podKey(pod), opts, list)
			}
			if len(list.Items) == 1 {
				seen = &list.Items[0]
			}
			if parseRevision(t, list.ResourceVersion) < resp.Header.Revision {
				t.Errorf("listed at %s after a write at %s", list.ResourceVersion, want)
			}
		}
		if err != nil || seen.ResourceVersion != want || seen.Labels["i"] != fmt.Sprint(i) {
			t.Fatalf("read %d has revision %s, %v; written at %s", i, seen.ResourceVersion, err, want)
		}
	}
}

// TestConsistentRead_FeedStalled_Returns429: reads of the present are refused with 429, never
// passed on to etcd, except for a GET of one key; reads that accept older data are served.
func TestConsistentRead_FeedStalled_Returns429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stallable{}
		f := setup(t, inMemory(memory.New()), s.through)
		pod := f.create(t, newPod("a"))[0]
		f.catchUp(t)
		s.feed.shut()
		defer s.feed.open()
		written := f.putPod(t, withLabel(pod, "state", "new"))
		ctx := contextFor(t)

		get := func(rv string) (state string) {
			out := &example.Pod{}
			if err := f.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rv}, out); err != nil {
				t.Errorf("get at %q: %v", rv, err)
			}
			return out.Labels["state"]
		}
		got := f.requests.during(func() {
			if state := get(""); state != "new" {
				t.Errorf("get has the state %q, want the new one", state)
			}
		})
		if got.Gets != 1 || got.Ranges != 0 {
			t.Errorf("get: requests to etcd %+v, want one key", got)
		}
		got = f.requests.during(func() {
			if state := get("0"); state != "" {
				t.Errorf("get at 0 has the state %q, want the old one", state)
			}
			if got := podNames(f.list(t, afterRevision("0"))); got != "a" {
				t.Errorf("list at 0 has %q", got)
			}
			if w := f.watchPods(t, afterRevision("0")); nextPod(t, w, watch.Added).Name != "a" {
				t.Error("watch from 0 lacks the pod")
			}
		})
		if got != (tally{}) {
			t.Errorf("reads at resourceVersion 0: requests to etcd %+v", got)
		}

		got = f.requests.during(func() {
			var reads sync.WaitGroup // each waits for seconds
			refused := func(what string, ctx context.Context, read func(ctx context.Context) error) {
				reads.Go(func() { requireRetry(t, what, read(ctx)) })
			}
			list := func(opts storage.ListOptions) func(context.Context) error {
				return func(ctx context.Context) error { return f.GetList(ctx, "/pods/", opts, &example.PodList{}) }
			}
			startWatch := func(ctx context.Context) error {
				_, err := f.Watch(ctx, "/pods/", everything())
				return err
			}
			page := everything()
			page.Predicate.Limit = 1
			// etcd has confirmed that the revision exists, so this is not a client error either.
			exact := afterRevision(fmt.Sprint(written))
			exact.ResourceVersionMatch = metav1.ResourceVersionMatchExact
			refused("list", ctx, list(everything()))
			refused("page", ctx, list(page))
			refused("watch", ctx, startWatch)
			refused("exact list", ctx, list(exact))

			// A request with less time gets its answer before its deadline.
			short, cancel := context.WithTimeout(ctx, 2*time.Second)
			defer cancel()
			refused("list with a deadline", short, list(everything()))
			refused("watch with a deadline", short, startWatch)
			reads.Wait()
		})
		if got.Gets != 0 || got.Ranges != 0 {
			t.Errorf("list and watch: requests to etcd %+v, want revisions only", got)
		}

		// Writes succeed, and so do the reads that precede them.
		f.update(t, pod, "during the stall")
		f.remove(t, f.create(t, newPod("b"))[0])

		s.feed.open()
		f.catchUp(t)
		list := f.list(t, everything())
		if podNames(list) != "a" || list.Items[0].Annotations["value"] != "during the stall" {
			t.Errorf("after the stall list has %q %v", podNames(list), list.Items)
		}
	})
}

// TestRead_EtcdHangs_Returns429: reads that need etcd's revision do not wait for it longer than for
// memory, also a watch without initial events, whose request may last for hours.
func TestRead_EtcdHangs_Returns429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &stallable{}
		f := setup(t, inMemory(memory.New()), s.through)
		f.create(t, newPod("a"))
		f.catchUp(t)
		s.revision.shut()
		defer s.revision.open()
		no, fromNow, ahead := false, everything(), afterRevision(fmt.Sprint(f.cluster.mirror.PublishedRevision()+1))
		fromNow.SendInitialEvents = &no
		ahead.ResourceVersionMatch = metav1.ResourceVersionMatchExact
		for name, read := range map[string]func(context.Context) error{
			"list":                         func(ctx context.Context) error { return f.GetList(ctx, "/pods/", everything(), &example.PodList{}) },
			"exact list ahead of memory":   func(ctx context.Context) error { return f.GetList(ctx, "/pods/", ahead, &example.PodList{}) },
			"watch without initial events": func(ctx context.Context) error { _, err := f.Watch(ctx, "/pods/", fromNow); return err },
		} {
			began := time.Now()
			requireRetry(t, name, read(contextFor(t)))
			if took := time.Since(began); took != 3*time.Second {
				t.Errorf("%s: refused after %s, want 3s", name, took)
			}
			requireRetry(t, name+" with a deadline", read(soon(t)))
		}
	})
}

// loadingFeed is a client of a replica in place of etcd that is loading.
type loadingFeed struct {
	clientv3.KV
	loading atomic.Bool
}

func (l *loadingFeed) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if l.loading.Load() {
		return nil, status.Error(codes.Unavailable, "the replica is loading, and cannot feed others yet; retry")
	}
	return l.KV.Get(ctx, key, opts...)
}

// TestGet_FeedIsLoading_Returns429: with Retry-After, if memory cannot answer either. A read that
// accepts older data is served.
func TestGet_FeedIsLoading_Returns429(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, feed := &stallable{}, &loadingFeed{}
		f := setup(t, inMemory(memory.New()), s.through, withData(func(c *kubernetes.Client) {
			feed.KV = c.KV
			c.KV = feed
		}))
		pod := f.create(t, newPod("a"))[0]
		f.catchUp(t)
		s.revision.shut()
		defer s.revision.open()
		feed.loading.Store(true)
		get := func(rv string) error {
			return f.Get(contextFor(t), podKey(pod), storage.GetOptions{ResourceVersion: rv}, &example.Pod{})
		}
		requireRetry(t, "get", get(""))
		if err := get("0"); err != nil {
			t.Errorf("at 0: %v", err)
		}
		feed.loading.Store(false)
		if err := get(""); err != nil {
			t.Errorf("when the feed has loaded: %v", err)
		}
	})
}

// TestRead_FutureRevision_Returns504: reads wait for it and then fail with 504; a watch starts at
// once, and delivers only later events.
func TestRead_FutureRevision_Returns504(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newTwin(t, mirror.DefaultWindow), t.Context()
		now := w.put(t, newPod("a"))
		w.catchUp(t)
		future, key := fmt.Sprint(now+2), podKey(newPod("a"))
		if err := w.Get(ctx, key, storage.GetOptions{ResourceVersion: future}, &example.Pod{}); !storage.IsTooLargeResourceVersion(err) {
			t.Errorf("get: %v, want 504", err)
		}
		if err := w.GetList(ctx, "/pods/", afterRevision(future), &example.PodList{}); !storage.IsTooLargeResourceVersion(err) {
			t.Errorf("list: %v, want 504", err)
		}
		begun, err := w.Watch(ctx, "/pods/", afterRevision(future))
		testcheck.NoError(t, err)
		defer begun.Stop()
		for i := range 3 { // at now+1 to now+3
			w.put(t, withLabel(newPod("a"), "n", fmt.Sprint(i)))
		}
		if got := nextPod(t, begun, watch.Modified); got.ResourceVersion != fmt.Sprint(now+3) {
			t.Errorf("watch begins with %s, want %d", got.ResourceVersion, now+3)
		}
		if err := w.Get(ctx, key, storage.GetOptions{ResourceVersion: future}, &example.Pod{}); err != nil {
			t.Errorf("get at a revision that has come: %v", err)
		}
	})
}

// TestRead_RestoredEtcd_ReturnsItsContents: reads of the present are refused until everything is
// relisted, watches end with 410, and then reads return exactly etcd's contents.
func TestRead_RestoredEtcd_ReturnsItsContents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, ctx := newTwin(t, mirror.DefaultWindow), t.Context()
		list := func() (string, error) {
			out := &example.PodList{}
			err := w.GetList(ctx, "/pods/", everything(), out)
			return podNames(out), err
		}
		was := w.put(t, newPod("old"))
		if got, err := list(); got != "old" || err != nil {
			t.Fatalf("list has %q, %v", got, err)
		}
		begun, err := w.Watch(ctx, "/pods/", afterRevision(fmt.Sprint(was)))
		testcheck.NoError(t, err)
		defer begun.Stop()
		w.etcd.FailLists(errors.New("not yet")) // the restored state cannot be listed for a while
		w.etcd.Restore(was-1, map[string]string{etcdKey(newPod("new")): storedPod(t, newPod("new"))})
		_, err = list()
		requireRetry(t, "list", err)
		if _, err := w.Watch(ctx, "/pods/", everything()); err != nil {
			requireRetry(t, "watch", err)
		} else {
			t.Error("a watch from the latest revision began")
		}
		w.etcd.FailLists(nil)
		eventually(t, "the restored state is listed", func() bool { return w.mirror.PublishedRevision() < was && w.ReadinessCheck() == nil })
		if status := nextStatus(t, begun); status.Code != 410 {
			t.Errorf("the watch has %+v, want 410", status)
		}
		ended(t, begun)
		if got, err := list(); got != "new" || err != nil {
			t.Errorf("list has %q, %v", got, err)
		}
		if err := w.Get(ctx, podKey(newPod("old")), storage.GetOptions{ResourceVersion: "0"}, &example.Pod{}); !storage.IsNotFound(err) {
			t.Errorf("get an object from before the restore: %v, want not found", err)
		}
	})
}
