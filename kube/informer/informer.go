package informer

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/mirror"
)

// Source is a resource with the decoding of its entries. Its functions may be called concurrently.
type Source struct {
	Resource *mirror.Resource
	// Decode returns the object of an entry with the resource version rev, transformed. The caller
	// owns it.
	Decode func(ctx context.Context, e *mirror.Entry, rev mirror.Revision) (any, error)
	// Shared returns the object that Decode returns for the entry's own revision. It may be shared
	// with other callers: do not write to it.
	Shared func(ctx context.Context, e *mirror.Entry) (any, error)
	// Loop returns Shared for a loop over many entries, which is not retained; nil: it is Shared.
	Loop func() func(ctx context.Context, e *mirror.Entry) (any, error)
	// Keep makes the store show an object as it was last decoded while it cannot be decoded, and
	// the informer sync only when every object was decoded, as those of client-go do. It costs one
	// object for each key. Without Keep such an object is an error of Get, and is missing in List.
	Keep bool
}

// TransformError is the error of a Source whose transform failed. The handler does not get the
// object, as in client-go.
type TransformError struct{ Err error }

func (e *TransformError) Error() string { return "transform: " + e.Err.Error() }
func (e *TransformError) Unwrap() error { return e.Err }

// Opener returns the source of an informer when its storage is open, or ctx's error. The source
// applies transform, which may be nil, to each object.
type Opener func(ctx context.Context, transform cache.TransformFunc) (Source, error)

// minimumResync is the shortest period of resyncs, as in client-go.
const minimumResync = time.Second

var errStarted = errors.New("informer has already started")

// Informer is a cache.SharedIndexInformer. Methods may be called concurrently.
type Informer struct {
	example runtime.Object
	open    Opener
	view    view
	synced  chan struct{} // closed when the view shows the resource

	mu            sync.Mutex // guards the fields below; taken before indexes.mu
	started       bool
	stopped       bool
	transform     cache.TransformFunc
	onError       cache.WatchErrorHandlerWithContext
	defaultResync time.Duration
	resyncCheck   time.Duration // the shortest period of handlers that were added before the start
	handlers      map[*registration]bool
	running       context.Context // of handlers; nil before the start
	goroutines    sync.WaitGroup  // of handlers
}

var _ cache.SharedIndexInformer = (*Informer)(nil)

// New returns an informer of objects of example's type. resync is the period of handlers that
// request none of their own; 0 is never. It does nothing before it runs.
func New(example runtime.Object, open Opener, resync time.Duration, indexers cache.Indexers) *Informer {
	in := &Informer{
		example:       example,
		open:          open,
		synced:        make(chan struct{}),
		onError:       cache.DefaultWatchErrorHandler,
		defaultResync: resync,
		resyncCheck:   resync,
		handlers:      map[*registration]bool{},
	}
	in.view.init(in.report, indexers)
	return in
}

// Run implements cache.SharedInformer.
func (in *Informer) Run(stop <-chan struct{}) { in.RunWithContext(wait.ContextForChannel(stop)) }

// RunWithContext implements cache.SharedInformer. It returns when ctx ends and all handlers have
// returned. An informer runs once.
func (in *Informer) RunWithContext(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !in.start(ctx) {
		klog.FromContext(ctx).Info("Informer has started before, and runs once", "type", in.name())
		return
	}
	defer in.stop(cancel)
	in.mu.Lock()
	transform := in.transform
	in.mu.Unlock()
	source, err := in.open(ctx, transform)
	if err != nil {
		if ctx.Err() == nil {
			in.report(ctx, err)
		}
		<-ctx.Done()
		return
	}
	if err := source.Resource.WaitReady(ctx); err != nil {
		if ctx.Err() == nil { // the mirror has closed
			in.report(ctx, err)
		}
		<-ctx.Done()
		return
	}
	if !source.Keep {
		in.view.source.Store(&source)
		close(in.synced)
		<-ctx.Done()
		return
	}
	k := &keeper{in: in, source: &source}
	if snap, ok := k.begin(ctx); ok {
		in.view.source.Store(&source)
		close(in.synced)
		k.follow(ctx, snap)
	}
	<-ctx.Done()
}

// start begins the goroutines of handlers. It reports false if the informer has started before.
func (in *Informer) start(ctx context.Context) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.started {
		return false
	}
	in.started, in.running = true, ctx
	for r := range in.handlers {
		r.resync = in.resyncPeriod(r.resync)
		in.runLocked(r)
	}
	return true
}

// stop refuses further handlers, and returns when all have ended.
func (in *Informer) stop(cancel func()) {
	in.mu.Lock()
	in.stopped = true
	in.mu.Unlock()
	cancel()
	in.goroutines.Wait()
}

// runLocked begins to deliver to a handler.
func (in *Informer) runLocked(r *registration) {
	ctx, cancel := context.WithCancel(in.running)
	r.cancel = cancel
	in.goroutines.Go(func() {
		defer close(r.finished)
		defer cancel()
		r.run(ctx)
	})
}

// resyncPeriod returns the period of a handler that requested one: none if the informer had none
// when it started, at least resyncCheck otherwise.
func (in *Informer) resyncPeriod(requested time.Duration) time.Duration {
	if requested == 0 || in.resyncCheck == 0 {
		return 0
	}
	return max(requested, in.resyncCheck)
}

// AddEventHandler implements cache.SharedInformer.
func (in *Informer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	return in.AddEventHandlerWithOptions(h, cache.HandlerOptions{})
}

// AddEventHandlerWithResyncPeriod implements cache.SharedInformer.
func (in *Informer) AddEventHandlerWithResyncPeriod(h cache.ResourceEventHandler, resync time.Duration) (cache.ResourceEventHandlerRegistration, error) {
	return in.AddEventHandlerWithOptions(h, cache.HandlerOptions{ResyncPeriod: &resync})
}

// AddEventHandlerWithOptions implements cache.SharedInformer. The handler gets the objects of the
// newest version, then every event after it. Error: the informer has stopped.
func (in *Informer) AddEventHandlerWithOptions(h cache.ResourceEventHandler, o cache.HandlerOptions) (cache.ResourceEventHandlerRegistration, error) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.stopped {
		// callers compare the end of client-go's message
		return nil, fmt.Errorf("handler %T was not added to shared informer because it has stopped already", h)
	}
	resync := in.defaultResync
	if o.ResyncPeriod != nil {
		resync = *o.ResyncPeriod
	}
	if resync > 0 {
		resync = max(resync, minimumResync)
	}
	r := newRegistration(in, h, resync)
	if o.Logger != nil {
		r.logger = *o.Logger
	}
	in.handlers[r] = true
	switch {
	case in.started:
		r.resync = in.resyncPeriod(resync)
		in.runLocked(r)
	case resync > 0 && resync < in.resyncCheck:
		in.resyncCheck = resync
	}
	return r, nil
}

// RemoveEventHandler implements cache.SharedInformer. It does not wait for a running callback; see
// cache.ShutDownEventHandler. Error: the handle is of another type of informer.
func (in *Informer) RemoveEventHandler(handle cache.ResourceEventHandlerRegistration) error {
	r, ok := handle.(*registration)
	if !ok {
		return fmt.Errorf("registration is a %T, want %T", handle, r)
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.handlers[r] {
		return nil
	}
	delete(in.handlers, r)
	if r.cancel == nil {
		close(r.finished)
	} else {
		r.cancel()
	}
	return nil
}

// GetStore implements cache.SharedInformer.
func (in *Informer) GetStore() cache.Store { return &in.view }

// GetIndexer implements cache.SharedIndexInformer.
func (in *Informer) GetIndexer() cache.Indexer { return &in.view }

// AddIndexers implements cache.SharedIndexInformer. Error: the informer has stopped, or there is an
// index with one of the names.
func (in *Informer) AddIndexers(indexers cache.Indexers) error {
	if in.IsStopped() {
		return errors.New("indexers were not added because the informer has stopped already")
	}
	return in.view.AddIndexers(indexers)
}

// GetController implements cache.SharedInformer.
func (in *Informer) GetController() cache.Controller { return controller{in} }

// controller is the part of an informer that client-go calls a controller. It runs nothing.
type controller struct{ *Informer }

func (controller) Run(<-chan struct{})            {}
func (controller) RunWithContext(context.Context) {}

// HasSynced implements cache.SharedInformer: the store shows the resource.
func (in *Informer) HasSynced() bool { return cache.IsDone(in.HasSyncedChecker()) }

// HasSyncedChecker implements cache.SharedInformer.
func (in *Informer) HasSyncedChecker() cache.DoneChecker {
	return done{name: "informer of " + in.name(), ch: in.synced}
}

type done struct {
	name string
	ch   <-chan struct{}
}

func (d done) Name() string          { return d.name }
func (d done) Done() <-chan struct{} { return d.ch }

// LastSyncResourceVersion implements cache.SharedInformer: the revision that the store shows, empty
// before it has synced.
func (in *Informer) LastSyncResourceVersion() string {
	return in.view.LastStoreSyncResourceVersion()
}

// SetWatchErrorHandler implements cache.SharedInformer.
func (in *Informer) SetWatchErrorHandler(h cache.WatchErrorHandler) error {
	return in.SetWatchErrorHandlerWithContext(func(_ context.Context, r *cache.Reflector, err error) { h(r, err) })
}

// SetWatchErrorHandlerWithContext implements cache.SharedInformer; nil is the default handler.
// Error: the informer has started.
func (in *Informer) SetWatchErrorHandlerWithContext(h cache.WatchErrorHandlerWithContext) error {
	if h == nil {
		h = cache.DefaultWatchErrorHandler
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.started {
		return errStarted
	}
	in.onError = h
	return nil
}

// SetTransform implements cache.SharedInformer. Error: the informer has started.
func (in *Informer) SetTransform(f cache.TransformFunc) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.started {
		return errStarted
	}
	in.transform = f
	return nil
}

// IsStopped implements cache.SharedInformer.
func (in *Informer) IsStopped() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.stopped
}

// name returns the type of the objects, for messages.
func (in *Informer) name() string { return reflect.TypeOf(in.example).String() }

// report passes an error to the WatchErrorHandler, with a Reflector that has a name and does not
// run.
func (in *Informer) report(ctx context.Context, err error) {
	in.mu.Lock()
	onError := in.onError
	in.mu.Unlock()
	onError(ctx, cache.NewNamedReflector("informer of "+in.name(), &cache.ListWatch{}, in.example, nil, 0), err)
}

// recentObjects bounds the decoded objects of events that handlers of one informer share. An object
// that changes often is its own predecessor in the next event. A guess.
const recentObjects = 64

// recent holds the objects of the newest events.
type recent struct {
	mu      sync.Mutex // leaf
	objects map[*mirror.Entry]*decoding
	ring    [recentObjects]*mirror.Entry
	next    int
}

// decoding is the object of an entry, which the first handler that needs it decodes for all.
type decoding struct {
	once sync.Once
	obj  any
	err  error
}

// get returns the object of an entry, which decode returns the first time. After an error it is
// decoded again.
func (r *recent) get(e *mirror.Entry, decode func() (any, error)) (any, error) {
	r.mu.Lock()
	d, ok := r.objects[e]
	if !ok {
		if r.objects == nil {
			r.objects = map[*mirror.Entry]*decoding{}
		}
		d = &decoding{}
		delete(r.objects, r.ring[r.next])
		r.objects[e], r.ring[r.next] = d, e
		r.next = (r.next + 1) % len(r.ring)
	}
	r.mu.Unlock()
	d.once.Do(func() { d.obj, d.err = decode() })
	if d.err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.objects[e] == d {
			delete(r.objects, e)
		}
	}
	return d.obj, d.err
}
