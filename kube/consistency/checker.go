// Package consistency compares resources of a mirror with etcd (KEP-4988, D11): keys and revisions
// only, at every interval and on demand.
package consistency

import (
	"container/heap"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/mirror"
)

// DefaultInterval is that of KEP-4988.
const DefaultInterval = 5 * time.Minute

// uncheckedInterval is the longest time between two comparisons where the store does not count the
// writes to a key: a comparison is then the only way to find a lost event. A guess.
const uncheckedInterval = time.Minute

// Values of Result.Status, the label status of upstream's metric.
const (
	Success = "success"
	Failure = "failure" // memory differs from etcd
	Error   = "error"   // not compared, for example because etcd was compacted meanwhile
)

// checkTimeout bounds a comparison, so that an etcd that hangs does not delay the others: 300,000
// keys take a second. answerTime is how long before the deadline of its request a comparison on
// demand ends, so that the request is answered.
const (
	checkTimeout = 30 * time.Second
	answerTime   = time.Second
)

// reportedKeys bounds the keys named in the log and in a Result.
const reportedKeys = 20

var (
	checkSeconds = metrics.NewHistogram(&metrics.HistogramOpts{
		Name: "strata_consistency_check_seconds", StabilityLevel: metrics.ALPHA,
		Help:    "Duration of a comparison of a resource with etcd.",
		Buckets: []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10, 60},
	})
	registerMetrics = sync.OnceFunc(func() {
		cachermetrics.Register()
		legacyregistry.MustRegister(checkSeconds)
	})
)

// Checker compares resources of a mirror with etcd (D11): each at every interval, and on demand,
// one at a time, so that the load on etcd does not grow with the number of resources. Methods may
// be called concurrently.
type Checker struct {
	opts Options

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	turn   chan struct{}
	// earlier has one place: the first time of the queue was set.
	earlier chan struct{}

	mu      sync.Mutex // leaf
	checked map[*mirror.Resource]*checked
	queue   queue
	running bool // schedule
}

// checked is a resource that is served from memory, by one storage or more.
type checked struct {
	resource *mirror.Resource
	group    schema.GroupResource
	last     atomic.Pointer[Result]
	ctx      context.Context
	cancel   context.CancelFunc

	// Guarded by Checker.mu.
	stores int
	at     time.Time // of the next comparison
	place  int       // in the queue, -1 if it is not there
}

// Options configures a Checker.
type Options struct {
	// Interval is the time between two comparisons of a resource; 0 means DefaultInterval, a
	// negative one compares on demand only.
	Interval time.Duration
	// Off disables comparisons, on demand as well.
	Off bool
	// VerifiesVersions reports whether events are checked when they arrive; otherwise comparisons
	// are more frequent.
	VerifiesVersions func() bool
	// OnFailure, if set, is called with each result of status Failure after it was logged.
	OnFailure func(Result)
	Logger    *slog.Logger
}

// New returns a checker without resources. Close it after use.
func New(opts Options) *Checker {
	registerMetrics()
	if opts.Interval == 0 {
		opts.Interval = DefaultInterval
	}
	k := &Checker{opts: opts, turn: make(chan struct{}, 1), earlier: make(chan struct{}, 1), checked: map[*mirror.Resource]*checked{}}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// Close ends the comparisons and waits for them.
func (k *Checker) Close() {
	k.mu.Lock() // no comparison starts after this
	k.cancel()
	k.mu.Unlock()
	k.wg.Wait()
}

// Add compares a resource until remove is called, once. It may be added several times, by storages
// that share it.
func (k *Checker) Add(r *mirror.Resource, group schema.GroupResource) (remove func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	x := k.checked[r]
	if x == nil {
		x = &checked{resource: r, group: group, place: -1}
		x.ctx, x.cancel = context.WithCancel(k.ctx)
		k.checked[r] = x
	}
	if x.stores++; x.stores == 1 && k.periodic() && k.ctx.Err() == nil {
		k.enqueueLocked(x, time.Now().Add(checkWait(k.opts.Interval, k.opts.VerifiesVersions(), false)))
		if !k.running {
			k.running = true
			k.wg.Go(k.schedule)
		}
	}
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if x.stores--; x.stores == 0 {
			x.cancel()
			delete(k.checked, r)
			if x.place >= 0 {
				heap.Remove(&k.queue, x.place)
			}
		}
	}
}

// check compares a resource with etcd in turn. It returns nil if ctx ends, or if its deadline is
// too close when the turn comes.
func (k *Checker) check(ctx context.Context, x *checked) *Result {
	inTime := ctx
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		inTime, cancel = context.WithDeadline(ctx, end.Add(-answerTime))
		defer cancel()
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-inTime.Done():
		return nil
	}
	if inTime.Err() != nil {
		return nil // both cases were ready: a late start must not count as a failure of etcd
	}
	began := time.Now()
	bound, cancel := context.WithTimeout(inTime, checkTimeout)
	defer cancel()
	r := k.compare(bound, x)
	if ctx.Err() != nil && r.Status == Error {
		return nil // ctx has ended; the check has not failed
	}
	r.Time, r.Seconds = metav1.NewTime(began), time.Since(began).Seconds()
	checkSeconds.Observe(r.Seconds)
	cachermetrics.StorageConsistencyCheckTotal.WithLabelValues(x.group.Group, x.group.Resource, r.Status).Inc()
	x.last.Store(r)
	if r.Status == Failure {
		k.enqueue(x) // sooner
	}
	k.report(r)
	return r
}

// compare is the check itself.
func (k *Checker) compare(ctx context.Context, x *checked) *Result {
	r := &Result{Group: x.group.Group, Resource: x.group.Resource, Status: Success}
	prefix := x.resource.Prefix()
	etcd := newDigest(prefix)
	c, err := x.resource.Check(ctx, etcd.add)
	if c != nil {
		r.hash(prefix, c.Snapshot)
		if c.Count > 0 {
			r.Status, r.EtcdHash, r.Differences, r.Repaired = Failure, etcd.sum(), c.Count, c.Repaired
			for _, d := range c.Differences[:min(reportedKeys, len(c.Differences))] {
				to := &r.Differing
				switch {
				case d.Cached == 0:
					to = &r.Missing
				case d.Etcd == 0:
					to = &r.Extra
				}
				*to = append(*to, strings.TrimPrefix(d.Key, prefix))
			}
		}
	}
	if err != nil {
		r.Error = err.Error()
		if r.Status == Success {
			r.Status = Error
		}
	}
	return r
}

// report logs a result.
func (k *Checker) report(r *Result) {
	log := k.opts.Logger.With("group", r.Group, "resource", r.Resource, "revision", r.Revision, "objects", r.Keys)
	switch r.Status {
	case Success:
		log.Debug("Memory matches etcd", "hash", r.Hash)
	case Error:
		log.Warn("Failed to compare memory with etcd", "err", r.Error)
	case Failure:
		log.Error("Memory differs from etcd; ending the resource's watches, and reading lists at old revisions from etcd until a check finds no difference",
			"differences", r.Differences, "missing", r.Missing, "extra", r.Extra, "differing", r.Differing,
			"repaired", r.Repaired, "hash", r.Hash, "etcdHash", r.EtcdHash, "err", r.Error)
		if k.opts.OnFailure != nil {
			k.opts.OnFailure(*r)
		}
	}
}

// selected returns the resources of the checker that pass the filter, if there is one.
func (k *Checker) selected(only *schema.GroupResource) (all []*checked) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, x := range k.checked {
		if only == nil || *only == x.group {
			all = append(all, x)
		}
	}
	return all
}

var (
	// ErrOff: Options.Off.
	ErrOff = errors.New("feature gate DetectCacheInconsistency is disabled")
	// ErrLate: ctx has ended, or is about to.
	ErrLate = errors.New("checks did not complete before the request deadline; results of completed checks are recorded")
)

// Check compares all resources now, or the one given by only, if it is not nil. Errors: ErrOff,
// ErrLate.
func (k *Checker) Check(ctx context.Context, only *schema.GroupResource) (all []Result, err error) {
	if k.opts.Off {
		return nil, ErrOff
	}
	for _, x := range k.selected(only) {
		done := make(chan *Result, 1)
		k.mu.Lock()
		if k.ctx.Err() == nil {
			// On a separate goroutine: a panic here must end the process, and not be recovered as
			// one of a request.
			k.wg.Go(func() {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				defer context.AfterFunc(x.ctx, cancel)()
				done <- k.check(ctx, x)
			})
		} else {
			done <- nil
		}
		k.mu.Unlock()
		if r := <-done; r != nil {
			all = append(all, *r)
		} else if end, ok := ctx.Deadline(); ctx.Err() != nil || ok && time.Until(end) <= answerTime {
			return all, ErrLate
		}
	}
	return all, nil
}

// Hashes returns the hash of memory at a revision, the latest if it is 0. It does not read from
// etcd.
func (k *Checker) Hashes(rev mirror.Revision, only *schema.GroupResource) (all []Result) {
	for _, x := range k.selected(only) {
		r := Result{Group: x.group.Group, Resource: x.group.Resource, Time: metav1.Now()}
		began := time.Now()
		s, err := x.resource.Latest()
		if err == nil && rev > 0 {
			s, err = x.resource.At(rev)
		}
		if err != nil {
			r.Revision, r.Error = rev, err.Error()
		} else {
			r.hash(x.resource.Prefix(), s)
		}
		r.Seconds = time.Since(began).Seconds()
		all = append(all, r)
	}
	return all
}

// Last returns the last result of each resource that has one.
func (k *Checker) Last(only *schema.GroupResource) (all []Result) {
	for _, x := range k.selected(only) {
		if r := x.last.Load(); r != nil {
			all = append(all, *r)
		}
	}
	return all
}

// Checkers are the checkers of all mirrors of a process.
type Checkers []*Checker

func byResource(a, b Result) int {
	return strings.Compare(a.Resource+"."+a.Group, b.Resource+"."+b.Group)
}

// Check compares resources with etcd now, all that are served from memory or one: keys and resource
// versions, never a value (KEP-4988). Differences are repaired as by a scheduled comparison.
// Results are in alphabetical order. Errors: ErrOff, ErrLate.
func (all Checkers) Check(ctx context.Context, only *schema.GroupResource) (results []Result, err error) {
	for _, k := range all {
		some, err := k.Check(ctx, only)
		if results = append(results, some...); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(results, byResource)
	return results, nil
}

// Last returns the last result of each resource that has one.
func (all Checkers) Last(only *schema.GroupResource) (results []Result) {
	for _, k := range all {
		results = append(results, k.Last(only)...)
	}
	slices.SortFunc(results, byResource)
	return results
}

// Hashes returns the hashes of memory at a revision, for comparison with those of another server.
// It does not read from etcd. A resource whose revision is not in memory has an Error.
func (all Checkers) Hashes(rev int64, only *schema.GroupResource) (results []Result) {
	for _, k := range all {
		results = append(results, k.Hashes(rev, only)...)
	}
	slices.SortFunc(results, byResource)
	return results
}

// serves reports whether the resource is served from memory.
func (all Checkers) serves(resource schema.GroupResource) bool {
	return slices.ContainsFunc(all, func(k *Checker) bool { return len(k.selected(&resource)) > 0 })
}
