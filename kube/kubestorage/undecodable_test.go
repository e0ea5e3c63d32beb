package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/client/v3/kubernetes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// Objects that cannot be decrypted or decoded. The suites of upstream corrupt objects that a
// storage has cached before; here objects are corrupt from the start.

// corruptFrom makes a fixture whose etcd has, before the first read, the good pod and unreadable
// values: one under an unknown key, and one that is not an object.
func corruptFrom(t *testing.T, opts ...func(*options)) (f *fixture, good, undecryptable, undecodable *example.Pod) {
	t.Helper()
	good, undecryptable, undecodable = newPod("good"), newPod("undecryptable"), newPod("undecodable")
	undecryptable.Namespace, undecodable.Namespace = "bad", "bad"
	swap := newSwappable(podtest.Encryption(t, "1"))
	put := func(client *kubernetes.Client) {
		for pod, tr := range map[*example.Pod]value.Transformer{good: swap, undecryptable: podtest.Encryption(t, "2"), undecodable: swap} {
			data, err := runtime.Encode(testCodec(), pod)
			if pod == undecodable {
				data = []byte("not an object")
			}
			if err == nil {
				data, err = tr.TransformToStorage(contextFor(t), data, value.DefaultContext(etcdKey(pod)))
			}
			if err == nil {
				_, err = client.Put(contextFor(t), etcdKey(pod), string(data))
			}
			testcheck.NoError(t, err)
		}
	}
	f = setupInMemory(t, append(opts, withTransformer(swap), withData(put))...)
	return f, good, undecryptable, undecodable
}

// TestUndecodableObject_Reads_FailAsUpstream: reads of such an object fail as upstream's do, those
// of its neighbours succeed, and LISTs that contain it fail with upstream's error.
func TestUndecodableObject_Reads_FailAsUpstream(t *testing.T) {
	for _, unsafeDelete := range []bool{false, true} {
		t.Run(fmt.Sprintf("AllowUnsafeMalformedObjectDeletion=%t", unsafeDelete), func(t *testing.T) {
			featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, unsafeDelete)
			f, good, undecryptable, undecodable := corruptFrom(t)
			s, ctx := f.engine(t), contextFor(t)

			for _, pod := range []*example.Pod{good, undecryptable, undecodable} {
				for _, rv := range []string{"", "0"} {
					get := func(from storage.Interface) error {
						return from.Get(ctx, podKey(pod), storage.GetOptions{ResourceVersion: rv}, &example.Pod{})
					}
					requireSameError(t, "get "+pod.Name, get(s), get(s.etcd), pod != good)
				}
			}
			for _, key := range []string{"/pods/", "/pods/ns/", "/pods/bad/", podKey(undecodable)} {
				for _, rv := range []string{"", "0"} {
					list := func(from storage.Interface) error {
						opts := everything()
						opts.ResourceVersion = rv
						opts.Recursive = key != podKey(undecodable)
						return from.GetList(ctx, key, opts, &example.PodList{})
					}
					requireSameError(t, "list "+key, list(s), list(s.etcd), key != "/pods/ns/")
				}
			}

			// The namespace of the good pod can be watched, and so can the pod.
			for _, key := range []string{"/pods/ns/", podKey(good)} {
				opts := everything()
				opts.Recursive = key != podKey(good)
				w, err := f.Watch(ctx, key, opts)
				testcheck.NoError(t, err)
				defer w.Stop()
				if got := nextPod(t, w, watch.Added); got.Name != "good" {
					t.Errorf("watch %s begins with %s", key, got.Name)
				}
				updated := f.update(t, good, key)
				if got := nextPod(t, w, watch.Modified); got.ResourceVersion != updated.ResourceVersion {
					t.Errorf("watch %s has %s, want %s", key, got.ResourceVersion, updated.ResourceVersion)
				}
			}
			// The others cannot be watched from the start: their state is the first event.
			w := f.watchPods(t, everything())
			if status := nextStatusAfterPods(t, w); status.Code != 500 {
				t.Errorf("watch of everything: %+v, want an internal error", status)
			}

			// They cannot be written either, unless the write ignores the stored value.
			err := f.GuaranteedUpdate(ctx, podKey(undecryptable), &example.Pod{}, false, nil, storage.SimpleUpdate(
				func(obj runtime.Object) (runtime.Object, error) { return obj, nil }), nil)
			if err == nil {
				t.Error("an object that cannot be read was updated")
			}
			err = f.Delete(ctx, podKey(undecryptable), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
			if err == nil {
				t.Error("an object that cannot be read was deleted")
			}
		})
	}
}

// TestUnsafeDeletion_UnreadableObject_IsDeleted: with AllowUnsafeMalformedObjectDeletion an
// unreadable object can be deleted; watchers get the deletion, and the remaining objects can be
// listed.
func TestUnsafeDeletion_UnreadableObject_IsDeleted(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, true)
	f, _, undecryptable, undecodable := corruptFrom(t)
	ctx := contextFor(t)
	for _, pod := range []*example.Pod{undecryptable, undecodable} {
		f.catchUp(t)
		opts := afterRevision(fmt.Sprint(f.engine(t).mirror.PublishedRevision()))
		all := f.watchPods(t, opts)
		opts.Recursive = false
		one, err := f.Watch(ctx, podKey(pod), opts)
		testcheck.NoError(t, err)
		defer one.Stop()
		err = f.Delete(ctx, podKey(pod), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, expectUnreadable())
		if err != nil {
			t.Fatalf("delete %s: %v", pod.Name, err)
		}
		for _, w := range []watch.Interface{all, one} {
			if status := nextStatus(t, w); status.Reason != metav1.StatusReasonStoreReadError || status.Code != 500 {
				t.Errorf("watch has %+v, want that the deleted object is corrupt", status)
			}
			ended(t, w)
		}
		if err := f.Get(ctx, podKey(pod), storage.GetOptions{}, &example.Pod{}); !storage.IsNotFound(err) {
			t.Errorf("get %s: %v, want not found", pod.Name, err)
		}
	}
	if got := podNames(f.list(t, everything())); got != "good" {
		t.Errorf("list has %q", got)
	}
}

// TestUndecodableEvent_IsRetriedInOrder: a watcher waits for the event's object, in order, and
// continues when it can be read, for example because the KMS is back. Watchers of other objects do
// not wait.
func TestUndecodableEvent_IsRetriedInOrder(t *testing.T) {
	t.Parallel()
	swap := newSwappable(storagetesting.NewPrefixTransformer([]byte("x"), false))
	f := setupInMemory(t, withTransformer(swap))
	good, bad := f.create(t, newPod("good"))[0], f.create(t, newPod("bad"))[0]
	f.catchUp(t)
	if got := f.engine(t).watches.RetryFor; got != undecodableFor {
		t.Errorf("events are retried for %s, want %s", got, undecodableFor)
	}
	f.engine(t).watches.RetryFor = patience
	all := f.watchPods(t, afterRevision(bad.ResourceVersion))
	one, err := f.Watch(contextFor(t), podKey(good), storage.ListOptions{Predicate: storage.Everything, ResourceVersion: bad.ResourceVersion})
	testcheck.NoError(t, err)
	defer one.Stop()

	working := swap.get()
	swap.set(failingFor{working, etcdKey(bad)})
	first := fmt.Sprint(f.putPod(t, withLabel(bad, "a", "b"), working))
	second := f.update(t, good, "1")
	if got := nextPod(t, one, watch.Modified); got.ResourceVersion != second.ResourceVersion {
		t.Errorf("the watcher of another object has %s, want %s", got.ResourceVersion, second.ResourceVersion)
	}
	select {
	case e := <-all.ResultChan():
		t.Errorf("the watcher of all has %s %v before the object could be read", e.Type, e.Object)
	default:
	}
	swap.set(working)
	for _, want := range []string{first, second.ResourceVersion} {
		if got := nextPod(t, all, watch.Modified); got.ResourceVersion != want {
			t.Errorf("the watcher of all has %s, want %s", got.ResourceVersion, want)
		}
	}
	if got := podNames(f.list(t, everything())); got != "bad good" {
		t.Errorf("list has %q", got)
	}
}

// TestUndecodableEvent_StaysUndecodable_EndsWatch when it stays undecodable: with an error, and
// without a later event.
func TestUndecodableEvent_StaysUndecodable_EndsWatch(t *testing.T) {
	swap := newSwappable(storagetesting.NewPrefixTransformer([]byte("x"), false))
	f := setupInMemory(t, withTransformer(swap))
	f.engine(t).watches.RetryFor = 500 * time.Millisecond
	pod := f.create(t, newPod("a"))[0]
	w := f.watchPods(t, afterRevision(pod.ResourceVersion))
	if _, err := f.client.Put(contextFor(t), etcdKey(newPod("bad")), "no prefix"); err != nil {
		t.Fatal(err)
	}
	f.update(t, pod, "1")
	if status := nextStatus(t, w); status.Code != 500 {
		t.Errorf("got %+v, want an internal error", status)
	}
	ended(t, w)
}

// TestUndecodableEvent_OfPast_EndsWatchWith410: a watch that reaches a past event whose states
// cannot be decrypted any more ends at once with 410, if the present can be read.
func TestUndecodableEvent_OfPast_EndsWatchWith410(t *testing.T) {
	t.Parallel()
	removed, kept := podtest.Encryption(t, "1"), newSwappable(podtest.Encryption(t, "2"))
	var first mirror.Revision
	put := func(client *kubernetes.Client) {
		write := func(tr value.Transformer, name, label string) mirror.Revision {
			t.Helper()
			pod := newPod(name)
			pod.Labels = map[string]string{"value": label}
			data, err := runtime.Encode(testCodec(), pod)
			if err == nil {
				data, err = tr.TransformToStorage(contextFor(t), data, value.DefaultContext(etcdKey(pod)))
			}
			testcheck.NoError(t, err)
			resp, err := client.Put(contextFor(t), etcdKey(pod), string(data))
			testcheck.NoError(t, err)
			return resp.Header.Revision
		}
		first = write(removed, "a", "1") - 1
		write(removed, "a", "2")
		write(kept, "a", "3")
		write(removed, "b", "1")
		if _, err := client.KV.Delete(contextFor(t), etcdKey(newPod("b"))); err != nil {
			t.Fatal(err)
		}
	}
	f := setupInMemory(t, withTransformer(kept), withData(put))
	if got := podNames(f.list(t, everything())); got != "a" {
		t.Fatalf("list has %q", got)
	}
	selected := storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{"value": "3"}), Field: fields.Everything(), GetAttrs: podAttrs}
	for what, from := range map[string]mirror.Revision{
		"a superseded state":         first,
		"the state before":           first + 2,
		"the state that was deleted": first + 4,
	} {
		t.Run(what, func(t *testing.T) {
			began := time.Now()
			w := f.watchPods(t, storage.ListOptions{ResourceVersion: fmt.Sprint(from), Predicate: selected, Recursive: true})
			if status := nextStatus(t, w); status.Code != 410 {
				t.Errorf("got %+v, want 410", status)
			}
			if took := time.Since(began); took >= undecodableFor {
				t.Errorf("after %s", took)
			}
			ended(t, w)
		})
	}
}

// failingFor is a transformer that cannot decrypt the value of one key.
type failingFor struct {
	value.Transformer
	key string
}

func (f failingFor) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	if string(dataCtx.AuthenticatedData()) == f.key {
		return nil, false, errors.New("the KMS is down")
	}
	return f.Transformer.TransformFromStorage(ctx, data, dataCtx)
}

// requireSameError fails if the client-visible errors of the engine and upstream's store differ.
func requireSameError(t *testing.T, what string, engine, upstream error, wanted bool) {
	t.Helper()
	if (upstream != nil) != wanted {
		t.Fatalf("%s: upstream's store has the error %v, want one: %t", what, upstream, wanted)
	}
	var got, want apierrors.APIStatus
	if errors.As(upstream, &want) && errors.As(engine, &got) {
		got, want := got.Status(), want.Status()
		if strings.HasSuffix(want.Message, " from the storage") {
			// before v0.37 the message has no cause
			got.Message, _, _ = strings.Cut(got.Message, ": ")
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: status\n%+v, want\n%+v", what, got, want)
		}
		return
	}
	if fmt.Sprint(engine) != fmt.Sprint(upstream) {
		t.Errorf("%s: error\n%v, want\n%v", what, engine, upstream)
	}
}

// nextStatusAfterPods returns the status of the first event that is an error.
func nextStatusAfterPods(t *testing.T, w watch.Interface) metav1.Status {
	t.Helper()
	for {
		if e := next(t, w); e.Type == watch.Error {
			return *e.Object.(*metav1.Status)
		}
	}
}
