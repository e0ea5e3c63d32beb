package kubestorage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
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

// DefaultConsistencyCheckInterval is KEP-4988's.
const DefaultConsistencyCheckInterval = 5 * time.Minute

// uncheckedInterval is the longest time between two comparisons where the store does not count the writes to a
// key: a comparison is then the only way to find a lost event. A guess.
const uncheckedInterval = time.Minute

// Outcomes of a check: the label status, as upstream's checker has it.
const (
	checkSuccess = "success"
	checkFailure = "failure" // memory differs from etcd
	checkError   = "error"   // no word on either, for example because etcd was compacted meanwhile
)

// panicOnInconsistency makes a check that finds a difference end the process, for tests: the
// environment variable, and what it does, are upstream's.
var panicOnInconsistency, _ = strconv.ParseBool(os.Getenv("KUBE_WATCHCACHE_CONSISTENCY_CHECKER"))

// checkTimeout bounds a check, so that an etcd that hangs does not keep the others waiting: 300,000
// keys take a second. One on demand ends checkAnswer before its request does, which
// is told what has come of it.
const (
	checkTimeout = 30 * time.Second
	checkAnswer  = time.Second
)

// toldKeys is how many keys are named in the log and in a ConsistencyCheck.
const toldKeys = 20

var (
	checkSeconds = metrics.NewHistogram(&metrics.HistogramOpts{
		Name: "strata_consistency_check_seconds", StabilityLevel: metrics.ALPHA,
		Help:    "How long it took to compare a resource with etcd (apiserver_storage_consistency_checks_total), whatever came of it.",
		Buckets: []float64{.001, .005, .01, .05, .1, .5, 1, 5, 10, 60},
	})
	registerCheckMetrics = sync.OnceFunc(func() {
		cachermetrics.Register()
		legacyregistry.MustRegister(checkSeconds)
	})
)

// ConsistencyCheck is what the comparison of a resource with etcd has come to (KEP-4988).
type ConsistencyCheck struct {
	Group    string `json:"group"`
	Resource string `json:"resource"`
	// Revision is what was compared, or hashed.
	Revision int64 `json:"revision,omitempty"`
	// Keys is how many objects memory has there.
	Keys int `json:"keys"`
	// Hash is that of memory: FNV-64 over namespace, name and resource version of each object,
	// joined by slashes, in hexadecimal. Servers whose hashes of one revision differ do
	// not have the same objects.
	Hash string `json:"hash,omitempty"`
	// Status is success, failure (memory differs from etcd) or error (it could not be
	// compared); "" if etcd was not asked.
	Status string `json:"status,omitempty"`
	Error  string `json:"error,omitempty"`

	// Of a failure: etcd's hash, the number of objects that differ, and the first of them, as
	// namespace/name: those that memory lacks, those that etcd lacks, and those of another
	// revision.
	EtcdHash    string   `json:"etcdHash,omitempty"`
	Differences int      `json:"differences,omitempty"`
	Missing     []string `json:"missing,omitempty"`
	Extra       []string `json:"extra,omitempty"`
	Differing   []string `json:"differing,omitempty"`
	// Mended: they were read again. Else the resource is being listed anew.
	Mended bool `json:"mended,omitempty"`

	Time    metav1.Time `json:"time"`
	Seconds float64     `json:"seconds"`
}

// checker compares the resources of a cluster with etcd (D11): each at every interval, and on
// demand, one at a time, so that it is no load for etcd whatever the number of resources.
type checker struct {
	cluster  *cluster
	off      bool          // the gate
	interval time.Duration // of the schedule, 0: there is none
	panics   bool

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	turn   chan struct{}

	mu      sync.Mutex // leaf
	checked map[*mirror.Resource]*checked
}

// checked is a resource that is served from memory, by one storage or more.
type checked struct {
	resource *mirror.Resource
	group    schema.GroupResource
	last     atomic.Pointer[ConsistencyCheck]
	failed   chan struct{} // one place: a check has found a difference

	stores int // guarded by checker.mu
	ctx    context.Context
	cancel context.CancelFunc
}

func newChecker(c *cluster) *checker {
	registerCheckMetrics()
	k := &checker{cluster: c, off: !c.opts.enabled(DetectCacheInconsistency), interval: c.opts.ConsistencyCheckInterval,
		panics: panicOnInconsistency, turn: make(chan struct{}, 1), checked: map[*mirror.Resource]*checked{}}
	if k.interval == 0 {
		k.interval = DefaultConsistencyCheckInterval
	}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	return k
}

// close ends the checks and waits for them.
func (k *checker) close() {
	k.mu.Lock() // nobody begins one now
	k.cancel()
	k.mu.Unlock()
	k.wg.Wait()
}

// add has the resource checked until remove is called, once.
func (k *checker) add(r *mirror.Resource, group schema.GroupResource) (remove func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	x := k.checked[r]
	if x == nil {
		x = &checked{resource: r, group: group, failed: make(chan struct{}, 1)}
		x.ctx, x.cancel = context.WithCancel(k.ctx)
		k.checked[r] = x
		if !k.off && k.interval > 0 && k.ctx.Err() == nil {
			k.wg.Go(func() { k.schedule(x) })
		}
	}
	x.stores++
	return func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		if x.stores--; x.stores == 0 {
			x.cancel()
			delete(k.checked, r)
		}
	}
}

// schedule checks a resource at every interval, prolonged at random by up to a half so that
// servers and resources do not move in step. While it is suspect it is checked ten times as
// often: a check that finds nothing is what has lists of the past answered from memory again.
func (k *checker) schedule(x *checked) {
	if x.resource.WaitReady(x.ctx) != nil { // what is known of the store before is nothing
		return
	}
	for {
		select {
		case <-time.After(checkWait(k.interval, k.cluster.mirror.ChecksArrival(), x.resource.Suspect())):
			k.check(x.ctx, x)
		case <-x.failed: // by a check on demand
		case <-x.ctx.Done():
			return
		}
	}
}

// checkWait returns the time until the next comparison of a resource: the interval and up to a half of it, so that not all
// resources are compared at once. Where events are not checked when they arrive it is no longer than uncheckedInterval, and for
// a resource that may have lost an event a tenth.
func checkWait(interval time.Duration, checksArrival, suspect bool) time.Duration {
	wait := interval + rand.N(interval/2+1)
	if !checksArrival && wait > uncheckedInterval {
		wait = uncheckedInterval/2 + rand.N(uncheckedInterval/2+1)
	}
	if suspect {
		wait /= 10
	}
	return wait
}

// check compares a resource with etcd when it is its turn, and returns nil if that does not
// come, or ctx ends.
func (k *checker) check(ctx context.Context, x *checked) *ConsistencyCheck {
	inTime := ctx
	if end, ok := ctx.Deadline(); ok {
		var cancel context.CancelFunc
		inTime, cancel = context.WithDeadline(ctx, end.Add(-checkAnswer))
		defer cancel()
	}
	select {
	case k.turn <- struct{}{}:
		defer func() { <-k.turn }()
	case <-inTime.Done():
		return nil
	}
	if inTime.Err() != nil {
		return nil // both were ready: an etcd that is asked too late is not the one that fails
	}
	began := time.Now()
	bound, cancel := context.WithTimeout(inTime, checkTimeout)
	defer cancel()
	r := k.compare(bound, x)
	if ctx.Err() != nil && r.Status == checkError {
		return nil // it is not the check that has failed
	}
	r.Time, r.Seconds = metav1.NewTime(began), time.Since(began).Seconds()
	checkSeconds.Observe(r.Seconds)
	cachermetrics.StorageConsistencyCheckTotal.WithLabelValues(x.group.Group, x.group.Resource, r.Status).Inc()
	x.last.Store(r)
	if r.Status == checkFailure {
		select {
		case x.failed <- struct{}{}:
		default:
		}
	}
	k.report(r)
	return r
}

// compare is the check itself.
func (k *checker) compare(ctx context.Context, x *checked) *ConsistencyCheck {
	r := &ConsistencyCheck{Group: x.group.Group, Resource: x.group.Resource, Status: checkSuccess}
	prefix := x.resource.Prefix()
	etcd := newDigest(prefix)
	c, err := x.resource.Check(ctx, etcd.add)
	if c != nil {
		r.hash(prefix, c.Snapshot)
		if c.Count > 0 {
			r.Status, r.EtcdHash, r.Differences, r.Mended = checkFailure, etcd.sum(), c.Count, c.Mended
			for _, d := range c.Differences[:min(toldKeys, len(c.Differences))] {
				to := &r.Differing
				switch {
				case d.Held == 0:
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
		if r.Status == checkSuccess {
			r.Status = checkError
		}
	}
	return r
}

// report tells the log.
func (k *checker) report(r *ConsistencyCheck) {
	log := k.cluster.opts.Logger.With("group", r.Group, "resource", r.Resource, "revision", r.Revision, "objects", r.Keys)
	switch r.Status {
	case checkSuccess:
		log.Debug("memory was compared with etcd", "hash", r.Hash)
	case checkError:
		log.Warn("memory could not be compared with etcd", "error", r.Error)
	case checkFailure:
		log.Error("memory differs from etcd; watches of the resource start over, and lists of the past go to etcd until a check finds no difference",
			"differences", r.Differences, "missing", r.Missing, "extra", r.Extra, "differing", r.Differing,
			"mended", r.Mended, "hash", r.Hash, "etcdHash", r.EtcdHash, "error", r.Error)
		if k.panics {
			panic(fmt.Sprintf("memory differs from etcd (KUBE_WATCHCACHE_CONSISTENCY_CHECKER): %+v", *r))
		}
	}
}

// hash tells the hash of a snapshot.
func (r *ConsistencyCheck) hash(prefix string, s mirror.Snapshot) {
	d := newDigest(prefix)
	for e := range s.All("", "") {
		d.key = append(d.key[:0], e.Key()...)
		d.add(d.key, e.ModRevision())
		r.Keys++
	}
	r.Revision, r.Hash = s.Rev, d.sum()
}

// digest is KEP-4988's hash of a list, made of keys: those of namespaced objects end with
// namespace and name, those of others with the name.
type digest struct {
	hash   hash.Hash64
	prefix int
	buf    []byte
	key    []byte // of whoever has strings
}

func newDigest(prefix string) *digest { return &digest{hash: fnv.New64(), prefix: len(prefix)} }

// add adds an object to the hash. Cost is O(length of the key), no allocation.
func (d *digest) add(key []byte, mod mirror.Revision) {
	key = key[d.prefix:]
	d.buf = d.buf[:0]
	if bytes.IndexByte(key, '/') < 0 {
		d.buf = append(d.buf, '/') // no namespace
	}
	d.buf = append(append(d.buf, key...), '/')
	d.buf = strconv.AppendInt(d.buf, mod, 10)
	_, _ = d.hash.Write(d.buf)
}

func (d *digest) sum() string { return strconv.FormatUint(d.hash.Sum64(), 16) }

// selected returns the resources that are checked, those of the filter if there is one.
func (k *checker) selected(only *schema.GroupResource) (all []*checked) {
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
	// errChecksOff: the gate is off.
	errChecksOff = errors.New("the feature gate DetectCacheInconsistency is off")
	// errChecksLate: ctx has ended, or is about to.
	errChecksLate = errors.New("checks take longer than the request may; those that have ended were counted")
)

// demand checks resources now, and returns what has come of it.
func (k *checker) demand(ctx context.Context, only *schema.GroupResource) (all []ConsistencyCheck, err error) {
	if k.off {
		return nil, errChecksOff
	}
	for _, x := range k.selected(only) {
		done := make(chan *ConsistencyCheck, 1)
		k.mu.Lock()
		if k.ctx.Err() == nil {
			// On a goroutine of its own: what panics here is to end the process.
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
		} else if end, ok := ctx.Deadline(); ctx.Err() != nil || ok && time.Until(end) <= checkAnswer {
			return all, errChecksLate
		}
	}
	return all, nil
}

// hashes returns the hash of memory at a revision, the present if it is 0. It asks nothing of etcd.
func (k *checker) hashes(rev mirror.Revision, only *schema.GroupResource) (all []ConsistencyCheck) {
	for _, x := range k.selected(only) {
		r := ConsistencyCheck{Group: x.group.Group, Resource: x.group.Resource, Time: metav1.Now()}
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

// last returns what the last check of each resource has come to.
func (k *checker) last(only *schema.GroupResource) (all []ConsistencyCheck) {
	for _, x := range k.selected(only) {
		if r := x.last.Load(); r != nil {
			all = append(all, *r)
		}
	}
	return all
}

// checkers returns those of all clusters.
func (e *Engine) checkers() (all []*checker) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.clusters {
		if c.checker != nil {
			all = append(all, c.checker)
		}
	}
	return all
}

func byResource(a, b ConsistencyCheck) int {
	return strings.Compare(a.Resource+"."+a.Group, b.Resource+"."+b.Group)
}

// CheckConsistency compares resources with etcd now, all that are served from memory or one: keys
// and resource versions, never a value (KEP-4988). What differs is mended as a scheduled
// check would. Resources come in alphabetical order. Error: the gate is off, or ctx ends in a
// second.
func (e *Engine) CheckConsistency(ctx context.Context, only *schema.GroupResource) (all []ConsistencyCheck, err error) {
	for _, k := range e.checkers() {
		some, err := k.demand(ctx, only)
		if all = append(all, some...); err != nil {
			return nil, err
		}
	}
	slices.SortFunc(all, byResource)
	return all, nil
}

// ConsistencyChecks returns what the last check of each resource has come to, of those that
// have had one.
func (e *Engine) ConsistencyChecks(only *schema.GroupResource) (all []ConsistencyCheck) {
	for _, k := range e.checkers() {
		all = append(all, k.last(only)...)
	}
	slices.SortFunc(all, byResource)
	return all
}

// ConsistencyHashes returns the hashes of memory at a revision, to be compared with those of another
// server. It asks nothing of etcd. A resource whose revision is not in memory has an Error.
func (e *Engine) ConsistencyHashes(rev int64, only *schema.GroupResource) (all []ConsistencyCheck) {
	for _, k := range e.checkers() {
		all = append(all, k.hashes(rev, only)...)
	}
	slices.SortFunc(all, byResource)
	return all
}
