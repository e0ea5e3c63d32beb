package kubestorage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/watch"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/mirror"
)

// webhookTimeout is upstream's bound of one conversion, which takes no context.
const webhookTimeout = 30 * time.Second

// webhook is a codec of widgets that converts them from v2 to v1 as upstream's webhook converter
// does: a conversion blocks until open is closed, and fails after webhookTimeout.
type webhook struct {
	runtime.Codec
	open chan struct{}

	mu    sync.Mutex
	calls map[string]int // by the name of the object
}

func (h *webhook) Decode(data []byte, kind *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, was, err := h.Codec.Decode(data, kind, into)
	u, ok := obj.(*unstructured.Unstructured)
	if !ok || err != nil || u.GetAPIVersion() == "example.com/v1" {
		return obj, was, err
	}
	h.mu.Lock()
	h.calls[u.GetName()]++
	h.mu.Unlock()
	select {
	case <-h.open:
	case <-time.After(webhookTimeout):
		return nil, was, errors.New("the webhook has not answered")
	}
	u.SetAPIVersion("example.com/v1")
	return u, was, nil
}

// called returns the number of calls, and the largest one for one object.
func (h *webhook) called() (all, most int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range h.calls {
		all += n
		most = max(most, n)
	}
	return all, most
}

// newWebhookTwin returns a storage of n widgets that are stored in v2 and read in v1. At the end of
// the test the webhook answers.
func newWebhookTwin(t *testing.T, n int) (*twin, *webhook) {
	t.Helper()
	hook := &webhook{Codec: unstructured.UnstructuredJSONScheme, open: make(chan struct{}), calls: map[string]int{}}
	w := newTwinWith(t, mirror.DefaultWindow, func(cfg *storeConfig) {
		kind := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}
		cfg.Codec = hook
		cfg.GroupResource = schema.GroupResource{Group: "example.com", Resource: "widgets"}
		cfg.NewFunc = func() runtime.Object {
			u := &unstructured.Unstructured{}
			u.SetGroupVersionKind(kind)
			return u
		}
		cfg.NewListFunc = func() runtime.Object {
			u := &unstructured.UnstructuredList{}
			u.SetGroupVersionKind(kind.GroupVersion().WithKind("WidgetList"))
			return u
		}
		cfg.GetAttrs = storage.DefaultNamespaceScopedAttr
	})
	for i := range n {
		w.putWidget(t, i)
	}
	w.catchUp(t)
	return w, hook
}

func (w *twin) putWidget(t *testing.T, i int) {
	t.Helper()
	w.etcd.Put(fmt.Sprintf("%spods/ns/w%03d", testPrefix, i),
		fmt.Sprintf(`{"apiVersion":"example.com/v2","kind":"Widget","metadata":{"name":"w%03d","namespace":"ns","labels":{"n":"%d"}}}`, i, i))
}

// withLabels returns options for a read by a label that needs each object.
func withLabels(t *testing.T, opts storage.ListOptions) storage.ListOptions {
	t.Helper()
	selector, err := labels.Parse("n!=x")
	testcheck.NoError(t, err)
	opts.Predicate.Label, opts.Predicate.GetAttrs = selector, storage.DefaultNamespaceScopedAttr
	return opts
}

// ofJSON is a representation of unstructured objects.
var ofJSON = representation.Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
	data, err := obj.(*unstructured.Unstructured).MarshalJSON()
	return append(append(dst, bytes.TrimSpace(data)...), ','), err
}}

// discard is a Sink that reads the items of what it is given.
type discard struct {
	st  *watch.Stream
	rep *representation.Representation
}

func (d discard) Refresh() error { return nil }
func (d discard) Runs(runs []mirror.Run) error {
	return readParts(d.st.Context(), d.rep, slices.Values(runs))
}
func (d discard) Added(e *mirror.Entry) error {
	_, err := d.rep.Item(d.st.Context(), e)
	return err
}
func (d discard) Listed()                       {}
func (d discard) Bookmark(watch.Bookmark) error { return nil }
func (d discard) Flush() error                  { return nil }

// convertingReads returns reads of widgets by name. Each returns when it is answered or ctx has
// ended.
func (w *twin) convertingReads(t *testing.T) map[string]func(ctx context.Context) error {
	rep := w.Representation("widgets", ofJSON)
	atZero := everything()
	atZero.ResourceVersion = "0"
	list := func(opts storage.ListOptions) func(context.Context) error {
		return func(ctx context.Context) error {
			return w.GetList(ctx, "/pods/", opts, w.Kind().NewListFunc())
		}
	}
	initial := func(opts storage.ListOptions) func(context.Context) error {
		return func(ctx context.Context) error {
			st, err := w.openStream(ctx, "/pods/", opts)
			if err != nil {
				return err
			}
			defer st.Close()
			return pending(st, discardItems{discard{st, rep}})
		}
	}
	return map[string]func(ctx context.Context) error{
		"get": func(ctx context.Context) error {
			return w.Get(ctx, "/pods/ns/w000", storage.GetOptions{ResourceVersion: "0"}, w.Kind().NewFunc())
		},
		"list":             list(atZero),
		"list with labels": list(withLabels(t, atZero)),
		"get of bytes": func(ctx context.Context) error {
			e, _ := mustLatest(t, w.Store).Get(testPrefix + "pods/ns/w000")
			_, err := rep.Item(ctx, e)
			return err
		},
		"list of bytes": func(ctx context.Context) error {
			_, err := (&representation.List{Rep: rep}).Prepare(ctx, mustLatest(t, w.Store).Runs("", ""))
			return err
		},
		"initial events":             initial(atZero),
		"initial events with labels": initial(withLabels(t, atZero)),
	}
}

// discardItems is discard with the items of events.
type discardItems struct{ discard }

func (d discardItems) Event(_ apiwatch.EventType, ev *mirror.Event) error {
	_, err := d.rep.ItemAfter(d.st.Context(), ev)
	return err
}

// TestConversion_WebhookHangs_ReadsEndWithTheirContexts: a read whose objects wait for a webhook
// ends when its context does, not when the webhook gives up.
func TestConversion_WebhookHangs_ReadsEndWithTheirContexts(t *testing.T) {
	const patience = 2 * time.Second
	names := []string{"get", "list", "list with labels", "get of bytes", "list of bytes", "initial events", "initial events with labels"}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w, hook := newWebhookTwin(t, 6)
				defer close(hook.open)
				read := w.convertingReads(t)[name]
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				began := time.Now()
				err := read(ctx)
				if took := time.Since(began); err == nil || took > patience {
					t.Errorf("it ended after %v with %v, want an error after %v", took, err, patience)
				} else if !errors.Is(err, watch.ErrEnded) && (!apierrors.IsTimeout(err) || took == patience) {
					// At the deadline, upstream's timeout filter would cut off the answer.
					t.Errorf("it ended after %v with %v, want a 504 before %v", took, err, patience)
				}
				if all, _ := hook.called(); all > 1 {
					t.Errorf("the webhook was called %d times for a reader that waits for its first answer", all)
				}
			})
		})
	}
}

// TestConversion_ConcurrentReaders_CallWebhookOncePerObject: reads of all forms share the
// conversions, and what was converted after its readers had left is not converted again.
func TestConversion_ConcurrentReaders_CallWebhookOncePerObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const objects, each = 6, 5
		w, hook := newWebhookTwin(t, objects)
		reads := w.convertingReads(t)
		leaving, leave := context.WithCancel(t.Context())
		var left, stayed sync.WaitGroup
		for name, read := range reads {
			for range each {
				left.Go(func() {
					if err := read(leaving); err == nil {
						t.Errorf("%s: was answered while the webhook hung", name)
					}
				})
			}
		}
		synctest.Wait()
		leave()
		left.Wait()
		for name, read := range reads {
			for range each {
				stayed.Go(func() {
					if err := read(t.Context()); err != nil {
						t.Errorf("%s: %v", name, err)
					}
				})
			}
		}
		synctest.Wait()
		close(hook.open)
		stayed.Wait()
		if all, most := hook.called(); all != objects || most != 1 {
			t.Errorf("the webhook was called %d times, up to %d times for an object, want once for each of %d", all, most, objects)
		}
	})
}

// TestConversion_ReadersLeave_AbandonedOnesAreBounded: readers that give up leave no more than the
// bound of conversions behind, however many there are. Further readers wait as long as their
// contexts last, and are answered when the webhook is.
func TestConversion_ReadersLeave_AbandonedOnesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const objects, bound = 100, 32
		w, hook := newWebhookTwin(t, objects)
		get := func(ctx context.Context, i int) error {
			return w.Get(ctx, fmt.Sprintf("/pods/ns/w%03d", i), storage.GetOptions{ResourceVersion: "0"}, w.Kind().NewFunc())
		}
		const patience = 100 * time.Millisecond // so that all have left before the webhook gives up
		for i := range objects {
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			began := time.Now()
			if err := get(ctx, i); err == nil || time.Since(began) > patience {
				t.Fatalf("get %d ended after %v with %v, want an error after %v", i, time.Since(began), err, patience)
			}
			cancel()
		}
		if all, _ := hook.called(); all != bound {
			t.Errorf("%d calls of the webhook were left behind, want %d", all, bound)
		}
		answers := make(chan error, 1)
		go func() { answers <- get(t.Context(), objects-1) }()
		synctest.Wait()
		if len(answers) > 0 {
			t.Fatalf("a further get did not wait: %v", <-answers)
		}
		close(hook.open)
		if err := <-answers; err != nil {
			t.Error(err)
		}
	})
}

// TestConversion_WebhookHangs_StorageStops: neither a read nor a watch that waits for a webhook
// delays the end of its storage.
func TestConversion_WebhookHangs_StorageStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, hook := newWebhookTwin(t, 0)
		defer close(hook.open)
		opts := withLabels(t, w.fromNow())
		watcher, err := w.Watch(t.Context(), "/pods/", opts)
		testcheck.NoError(t, err)
		w.putWidget(t, 0)
		synctest.Wait()
		if all, _ := hook.called(); all == 0 {
			t.Fatal("the webhook was not called")
		}
		began := time.Now()
		w.cancel() // the first steps of stop, which the test's end calls
		w.goroutines.End()
		if took := time.Since(began); took > 0 {
			t.Errorf("the storage stopped after %v", took)
		}
		for range watcher.ResultChan() {
			t.Error("the watch has sent an event")
		}
	})
}

// TestConversion_WebhookFails_GetsReadNoEtcd: GETs share the failure of a conversion. They do not
// have upstream's store, in whose places other resources are read too, call the webhook again.
func TestConversion_WebhookFails_GetsReadNoEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, hook := newWebhookTwin(t, 1)
		defer close(hook.open)
		get := w.convertingReads(t)["get"]
		var gets sync.WaitGroup
		for range 5 {
			gets.Go(func() {
				if err := get(t.Context()); err == nil || err.Error() != "the webhook has not answered" {
					t.Errorf("got %v", err)
				}
			})
		}
		gets.Wait()
		if all, _ := hook.called(); all != 1 {
			t.Errorf("the webhook was called %d times, want 1", all)
		}
	})
}

// TestConversion_SlowForPastEvent_IsNotLost: a webhook that is slower than DecodeTimeout delays the
// past events of a watch, and does not expire it, although a current object needs no conversion.
func TestConversion_SlowForPastEvent_IsNotLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, hook := newWebhookTwin(t, 1)
		opts := withLabels(t, w.fromNow())
		w.putWidget(t, 0)
		w.putWidget(t, 0) // supersedes the object of the first event
		w.etcd.Put(testPrefix+"pods/ns/served", `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"served","namespace":"ns"}}`)
		w.catchUp(t)
		answer := sync.OnceFunc(func() { close(hook.open) })
		defer answer()
		time.AfterFunc(webhookTimeout-5*time.Second, answer)
		st := w.open(t, t.Context(), opts)
		if err := pending(st, discardItems{discard{st, w.Representation("widgets", ofJSON)}}); err != nil {
			t.Errorf("the watch ended with %v", err)
		}
	})
}

// withoutWebhook is the API group of a twin's resource whose definition has no webhook.
const withoutWebhook = "plain.example.com"

// openStream opens a watch; see watch.Env.Open.
func (s *Store) openStream(ctx context.Context, key string, opts storage.ListOptions) (*watch.Stream, error) {
	return s.watches.Open(ctx, key, opts)
}
