package informer_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/informer"
	"github.com/stratakube/strata/mirror"
)

const prefix = "/registry/things/"

// object is the type of the tests' objects. Its label "value" is the stored value.
type object = metav1.PartialObjectMetadata

// fixture is a mirror of a store in memory with one resource.
type fixture struct {
	t        testing.TB
	etcd     *memory.Store
	mirror   *mirror.Mirror
	resource *mirror.Resource
	// readable: values that begin with "!" can be decoded.
	readable atomic.Bool
	keep     bool // informer.Source.Keep
	decoded  atomic.Int64
}

func newFixture(t testing.TB, change func(*mirror.Options)) *fixture {
	t.Helper()
	f := &fixture{t: t, etcd: memory.New()}
	opts := mirror.Options{Prefix: "/registry/", Source: f.etcd, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if change != nil {
		change(&opts)
	}
	var err error
	if f.mirror, err = mirror.New(opts); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.mirror.Close)
	if f.resource, err = f.mirror.Claim(prefix); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *fixture) put(name, value string) { f.etcd.Put(prefix+name, value) }
func (f *fixture) delete(name string)     { f.etcd.Delete(prefix + name) }

// settle returns when every goroutine of the bubble waits, and the mirror has the newest revision.
func (f *fixture) settle() {
	f.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := f.mirror.Wait(ctx, f.etcd.Revision()); err != nil {
		f.t.Fatalf("published revision is %d, want %d: %v", f.mirror.PublishedRevision(), f.etcd.Revision(), err)
	}
	synctest.Wait()
}

// decode returns the object of an entry.
func (f *fixture) decode(e *mirror.Entry, rev mirror.Revision) (any, error) {
	value := string(e.Value())
	f.decoded.Add(1)
	if strings.HasPrefix(value, "!") && !f.readable.Load() {
		return nil, errors.New("cannot be decoded")
	}
	o := &object{}
	namespace, name, found := strings.Cut(strings.TrimPrefix(e.Key(), prefix), "/")
	if !found {
		namespace, name = "", namespace
	}
	o.Namespace, o.Name, o.ResourceVersion = namespace, name, strconv.FormatInt(rev, 10)
	o.Labels = map[string]string{"value": value}
	return o, nil
}

// open is the opener of the fixture's informers.
func (f *fixture) open(_ context.Context, transform cache.TransformFunc) (informer.Source, error) {
	decode := func(_ context.Context, e *mirror.Entry, rev mirror.Revision) (any, error) {
		obj, err := f.decode(e, rev)
		if err == nil && transform != nil {
			if obj, err = transform(obj); err != nil {
				return nil, &informer.TransformError{Err: err}
			}
		}
		return obj, err
	}
	return informer.Source{
		Keep:     f.keep,
		Resource: f.resource,
		Decode:   decode,
		Shared: func(ctx context.Context, e *mirror.Entry) (any, error) {
			return decode(ctx, e, e.ModRevision())
		},
	}, nil
}

// running is an informer of the fixture that records the errors which it reports.
type running struct {
	*informer.Informer
	stop func() // returns when it has stopped

	mu   sync.Mutex
	errs []string
}

func (f *fixture) informer(resync time.Duration, indexers cache.Indexers) *running {
	in := &running{Informer: informer.New(&object{}, f.open, resync, indexers)}
	if err := in.SetWatchErrorHandler(func(_ *cache.Reflector, err error) {
		in.mu.Lock()
		defer in.mu.Unlock()
		in.errs = append(in.errs, err.Error())
	}); err != nil {
		f.t.Fatal(err)
	}
	return in
}

// run starts an informer, which stops with the test at the latest. It has synced if it can.
func (f *fixture) run(in *running) *running {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		in.RunWithContext(ctx)
	}()
	in.stop = func() { cancel(); <-done }
	f.t.Cleanup(in.stop)
	synctest.Wait()
	return in
}

func (in *running) reported() []string {
	in.mu.Lock()
	defer in.mu.Unlock()
	return slices.Clone(in.errs)
}

// recorder is a handler that records its calls, and keeps the objects that it has got.
type recorder struct {
	name string
	// during is called in each callback, before it is recorded; it may be nil.
	during func(call string)

	mu    sync.Mutex
	calls []string
	state map[string]string // by key: value@resource version
	wrong []string          // calls that client-go would not make
}

func (r *recorder) OnAdd(obj any, initial bool) {
	call := "add"
	if initial {
		call = "initial"
	}
	r.record(call, nil, obj)
}
func (r *recorder) OnUpdate(old, obj any) { r.record("update", old, obj) }
func (r *recorder) OnDelete(obj any) {
	if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		if gone.Obj == nil {
			gone.Obj = &object{}
			gone.Obj.(*object).Namespace, gone.Obj.(*object).Name, _ = strings.Cut(gone.Key, "/")
		} else if key := cache.MetaObjectToName(gone.Obj.(*object)).String(); key != gone.Key {
			r.wrong = append(r.wrong, fmt.Sprintf("%s is the deletion of %s", key, gone.Key))
		}
		r.record("gone", nil, gone.Obj)
		return
	}
	r.record("delete", nil, obj)
}

// describe returns key=value@resource version.
func describe(obj any) string {
	key, state := keyAndState(obj)
	return key + "=" + state
}

func keyAndState(obj any) (key, state string) {
	o := obj.(*object)
	return cache.MetaObjectToName(o).String(), o.Labels["value"] + "@" + o.ResourceVersion
}

func (r *recorder) record(verb string, old, obj any) {
	call := verb + " " + describe(obj)
	if old != nil {
		call = verb + " " + describe(old) + " " + describe(obj)
	}
	if r.during != nil {
		r.during(call)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, call)
	if r.state == nil {
		r.state = map[string]string{}
	}
	key, state := keyAndState(obj)
	before, known := r.state[key]
	if isNew := verb == "add" || verb == "initial"; isNew == known {
		r.wrong = append(r.wrong, fmt.Sprintf("%s, object is %q", call, before))
	}
	if old != nil && describe(old) != key+"="+before {
		r.wrong = append(r.wrong, fmt.Sprintf("%s, object is %q", call, before))
	}
	if verb == "delete" || verb == "gone" {
		delete(r.state, key)
	} else {
		r.state[key] = state
	}
}

// take returns the calls since the last take.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	calls := r.calls
	r.calls = nil
	return calls
}

// want fails unless the calls since the last time are these.
func (r *recorder) want(t testing.TB, calls ...string) {
	t.Helper()
	if got := r.take(); !slices.Equal(got, calls) {
		t.Errorf("%s has the calls\n %s\nwant\n %s", r.name, strings.Join(got, "\n "), strings.Join(calls, "\n "))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, wrong := range r.wrong {
		t.Errorf("%s: %s", r.name, wrong)
	}
	r.wrong = nil
}

// add adds a recorder to an informer. It has the initial objects if the informer has.
func (in *running) add(t testing.TB, name string, o cache.HandlerOptions) (*recorder, cache.ResourceEventHandlerRegistration) {
	t.Helper()
	r := &recorder{name: name}
	return r, in.addHandler(t, r, o)
}

func (in *running) addHandler(t testing.TB, h cache.ResourceEventHandler, o cache.HandlerOptions) cache.ResourceEventHandlerRegistration {
	t.Helper()
	reg, err := in.AddEventHandlerWithOptions(h, o)
	if err != nil {
		t.Fatal(err)
	}
	synctest.Wait()
	return reg
}

func describeAll(objs []any) []string {
	all := make([]string, len(objs))
	for i, obj := range objs {
		all[i] = describe(obj)
	}
	return all
}

// wantList compares lists whose order does not matter.
func wantList[T any](t testing.TB, what string, got []T, err error, want ...T) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
	compare := func(a, b T) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
	got = slices.SortedFunc(slices.Values(got), compare)
	if slices.SortFunc(want, compare); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func objectMeta(value string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Labels: map[string]string{"value": value}}
}
