package kubestorage

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const (
	// decodedOverhead is what an object costs beside its stored bytes, before both are
	// multiplied: its struct, its maps, its row in a table. A guess, of the size of what
	// a ConfigMap of one key takes.
	decodedOverhead = 512
	// freeDecodedBytes is what a list may hold without asking: pages of clients that read in
	// pages, and what controllers and people list of one namespace, are never refused.
	freeDecodedBytes = 2 << 20
	// decodedWait is how long a list waits for others to end.
	decodedWait = 3 * time.Second
	// decodedRetrySeconds is when a list that was refused may come again.
	decodedRetrySeconds = 1
)

// DecodedLists bounds the bytes that lists of decoded objects hold at the same time, by an
// estimate that is made before anything is decoded: tables, YAML, indented JSON, and
// whatever else the byte path passes on. Upstream's handlers hold all objects of such a
// list, and what they make of them, until the last byte is written. (What the byte path
// writes itself holds some leaves of its tree.)
//
// A list of which the size is known beforehand waits for its share, at most 3 s. One with a
// selector takes its share as objects are selected. Safe for concurrent use.
type DecodedLists struct {
	limit int64
	room  *semaphore.Weighted
	used  atomic.Int64

	busy, tooLarge atomic.Int64 // refused
}

// NewDecodedLists returns a bound of so many bytes.
func NewDecodedLists(limitBytes int64) *DecodedLists {
	l := &DecodedLists{limit: limitBytes, room: semaphore.NewWeighted(limitBytes)}
	decodedLists.add(l)
	return l
}

// Limit returns the bound in bytes.
func (l *DecodedLists) Limit() int64 { return l.limit }

// Refused returns how many lists were refused: because others held the room, and because they
// would not fit alone.
func (l *DecodedLists) Refused() (busy, tooLarge int64) { return l.busy.Load(), l.tooLarge.Load() }

// Begin returns the context of a request whose list this bounds. What the request holds is
// factor times the stored bytes of its objects, and of their overhead. end says that it
// holds nothing any more; it is called once, after the handler has returned.
func (l *DecodedLists) Begin(ctx context.Context, factor int64) (_ context.Context, end func()) {
	d := &decodedList{lists: l, factor: factor}
	return context.WithValue(ctx, decodedKey{}, d), d.end
}

// DecodedBytes estimates what a list of so many objects and stored bytes holds.
func DecodedBytes(objects int, storedBytes, factor int64) int64 {
	return factor * (storedBytes + int64(objects)*decodedOverhead)
}

type decodedKey struct{}

// decodedList is what one request holds; nil is one that nothing bounds. Its methods are
// called by one goroutine, that of the request's handler.
type decodedList struct {
	lists  *DecodedLists
	factor int64
	held   int64 // taken from the room
	needed int64 // so far
}

func decodedListOf(ctx context.Context) *decodedList {
	d, _ := ctx.Value(decodedKey{}).(*decodedList)
	return d
}

// take waits for room for a list of so many objects. Errors: 429 if there is none for 3 s, 413
// if there can be none.
func (d *decodedList) take(ctx context.Context, objects int, storedBytes int64) error {
	if d == nil {
		return nil
	}
	more, err := d.more(objects, storedBytes)
	if more == 0 || err != nil {
		return err
	}
	ctx, cancel := waitContext(ctx, decodedWait)
	defer cancel()
	if d.lists.room.Acquire(ctx, more) != nil {
		return d.refuse()
	}
	d.hold(more)
	return nil
}

// grow is take for one object more, which does not wait: what is held may be what others wait for.
func (d *decodedList) grow(storedBytes int64) error {
	if d == nil {
		return nil
	}
	more, err := d.more(1, storedBytes)
	if more == 0 || err != nil {
		return err
	}
	more = max(more, min(freeDecodedBytes, d.lists.limit-d.held)) // not for each object anew
	if !d.lists.room.TryAcquire(more) {
		return d.refuse()
	}
	d.hold(more)
	return nil
}

// more returns how many bytes are to be taken from the room.
func (d *decodedList) more(objects int, storedBytes int64) (int64, error) {
	d.needed += DecodedBytes(objects, storedBytes, d.factor)
	if d.needed <= freeDecodedBytes || d.needed <= d.held {
		return 0, nil
	}
	if d.needed > d.lists.limit {
		d.lists.tooLarge.Add(1)
		return 0, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("this list would take about %d MiB of the server's memory in the form that was asked for, "+
			"of which it may take %d; ask for it in pages (limit), or as plain JSON or protobuf", d.needed>>20, d.lists.limit>>20))
	}
	return d.needed - d.held, nil
}

func (d *decodedList) refuse() error {
	d.lists.busy.Add(1)
	return apierrors.NewTooManyRequests("other lists hold the memory that this one needs in the form that was asked for", decodedRetrySeconds)
}

func (d *decodedList) hold(bytes int64) {
	d.held += bytes
	d.lists.used.Add(bytes)
}

func (d *decodedList) end() {
	if d.held > 0 {
		d.lists.used.Add(-d.held)
		d.lists.room.Release(d.held)
		d.held = 0
	}
}

// admit takes what the reading will hold, if that is known; see decodedList.grow for one that is
// selective.
func (d *decodedList) admit(ctx context.Context, r *Reading) error {
	if d == nil || r.Selective() {
		return nil
	}
	objects := r.Objects()
	if r.FromEtcd() {
		objects = r.past.held // about as large as they are now
	}
	n, bytes := objects.Count(r.Start, r.End)
	n, bytes = pageShare(n, bytes, r.Limit)
	return d.take(ctx, n, bytes)
}

// admitEtcd is admit for a list that upstream's store answers.
func (d *decodedList) admitEtcd(ctx context.Context, s *Store, q listRequest) error {
	if d == nil || !q.opts.Predicate.Empty() {
		return nil
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil // only small pages are read while a resource is not loaded
	}
	start, end := q.bounds()
	n, bytes := snap.Count(start, end)
	n, bytes = pageShare(n, bytes, q.limit())
	return d.take(ctx, n, bytes)
}

// pageShare returns what a page of at most limit objects has of all of them.
func pageShare(objects int, bytes, limit int64) (int, int64) {
	if 0 < limit && limit < int64(objects) {
		return int(limit), int64(float64(bytes) / float64(objects) * float64(limit))
	}
	return objects, bytes
}

// Metrics of the bounds of this process.
var (
	descDecoded = metrics.NewDesc("strata_decoded_list_bytes",
		"Bytes that lists of decoded objects may hold now, by an estimate that is made before they are decoded.", nil, nil, metrics.ALPHA, "")
	descDecodedLimit = metrics.NewDesc("strata_decoded_list_limit_bytes", "Bound of strata_decoded_list_bytes.", nil, nil, metrics.ALPHA, "")
	descDecodedGone  = metrics.NewDesc("strata_decoded_lists_refused_total",
		"Lists of decoded objects that were refused, by reason: busy (429: others held the room for 3 s), too_large (413: it would not fit alone).",
		[]string{"reason"}, nil, metrics.ALPHA, "")

	decodedLists    = &decodedCollector{}
	registerDecoded sync.Once
)

type decodedCollector struct {
	metrics.BaseStableCollector
	mu  sync.Mutex
	all []*DecodedLists
}

func (c *decodedCollector) add(l *DecodedLists) {
	c.mu.Lock()
	c.all = append(c.all, l)
	c.mu.Unlock()
	registerDecoded.Do(func() { legacyregistry.CustomMustRegister(c) })
}

// DescribeWithStability implements metrics.StableCollector.
func (c *decodedCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- descDecoded
	ch <- descDecodedLimit
	ch <- descDecodedGone
}

// CollectWithStability implements metrics.StableCollector.
func (c *decodedCollector) CollectWithStability(ch chan<- metrics.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var used, limit, busy, tooLarge int64
	for _, l := range c.all {
		used, limit = used+l.used.Load(), limit+l.limit
		busy, tooLarge = busy+l.busy.Load(), tooLarge+l.tooLarge.Load()
	}
	ch <- metrics.NewLazyConstMetric(descDecoded, metrics.GaugeValue, float64(used))
	ch <- metrics.NewLazyConstMetric(descDecodedLimit, metrics.GaugeValue, float64(limit))
	ch <- metrics.NewLazyConstMetric(descDecodedGone, metrics.CounterValue, float64(busy), "busy")
	ch <- metrics.NewLazyConstMetric(descDecodedGone, metrics.CounterValue, float64(tooLarge), "too_large")
}
