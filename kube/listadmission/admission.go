// Package listadmission bounds the lists in flight: their bytes, and the number of lists of decoded
// objects that are encoded concurrently. It depends on priority levels, not on a storage.
package listadmission

import (
	"container/list"
	"context"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const (
	// listBytesPerProcessor is the default limit of the bytes of lists in flight, per processor:
	// about as many as one processor encodes and encrypts in a few seconds.
	listBytesPerProcessor = 256 << 20
	// freeListBytes is the size up to which a list is not admitted: pages, and typical lists of one
	// namespace by controllers and people, never wait.
	freeListBytes = 2 << 20
	// listWait bounds the wait of a list for its admission, after priority and fairness has
	// admitted its request. A list waits no longer than half of the time left to its request.
	listWait = 30 * time.Second
	// listRetrySeconds is the Retry-After of a refused list.
	listRetrySeconds = 5
	// usualLevels is the least number of priority levels that share the reserved part: more than
	// the non-exempt levels of Kubernetes' own configuration.
	usualLevels = 8
	// knownLevels bounds the levels that are kept without a list in flight. Levels are objects that
	// administrators create and delete.
	knownLevels = 64
)

// Level is the priority level of a request. The zero value is the only level if priority and
// fairness is off.
type Level struct {
	Name   string
	Exempt bool
}

// Admission bounds the bytes of lists in flight, by their size estimated beforehand: bytes that the
// read path encodes and sends (Enter), and the memory of lists that are made of decoded objects
// (Begin). Lists above the bound wait, first in, first out within their priority level, so that an
// overloaded server finishes some lists in time and refuses others with 429.
//
// Priority levels are isolated from one another. A quarter of the limit is reserved, in equal
// parts; of the rest one level may take half, and a sixth is for lists of levels with no list in
// flight. Such a level may always start a list that is sent from memory. Exempt levels never wait,
// and take no room.
//
// Lists of decoded objects also take turns to be encoded, so that a processor is left for short
// requests (TakeTurn). Safe for concurrent use.
type Admission struct {
	limit int64

	mu        sync.Mutex // leaf
	levels    []*levelLists
	nextLevel int // of levels: next to have lists admitted

	freeTurns int // see TakeTurn
	nextTurn  int // of levels: next to have a list encoded
}

// levelLists are the lists of a priority level. Guarded by Admission.mu.
type levelLists struct {
	Level
	used     int64     // bytes
	waiting  list.List // of *waitingList
	encoding list.List // of chan struct{}, closed when the list may be encoded
	pins     int       // by lists that may have no bytes: the level is not dropped
	refused  map[string]int64
}

type waitingList struct {
	bytes    int64
	decoded  bool
	admitted chan struct{} // closed on admission
}

// Reasons of refusals, as metric labels.
const (
	refusedBusy     = "busy"
	refusedTooLarge = "too_large"
	refusedSlow     = "slow_client"
)

// New returns an admission with a limit of so many bytes; 0 means 256 MiB for each processor.
func New(limitBytes int64) *Admission {
	if limitBytes <= 0 {
		limitBytes = listBytesPerProcessor * int64(goruntime.GOMAXPROCS(0))
	}
	a := &Admission{limit: limitBytes, freeTurns: encodingTurns()}
	admissions.add(a)
	return a
}

// Enter waits for room for a list of so many bytes that are sent from memory. It takes at most half
// of its level's maximum. Error: 429 if there is no room in time. The share is nil, and takes no
// room, for a small list or a nil admission.
func (a *Admission) Enter(ctx context.Context, level Level, bytes int64) (*Share, error) {
	if a == nil || bytes <= freeListBytes {
		return nil, nil
	}
	s := &Share{admission: a}
	a.mu.Lock()
	s.level = a.levelLocked(level)
	s.level.pins++
	s.bytes = min(bytes, a.levelMaxLocked()/2)
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		s.level.pins--
		a.mu.Unlock()
	}()
	if err := a.acquire(ctx, s.level, s.bytes, false); err != nil {
		return nil, err
	}
	return s, nil
}

// Share is the room taken by one list. Its methods are called by one goroutine at a time; those of
// a nil share do nothing.
type Share struct {
	admission *Admission
	level     *levelLists
	bytes     int64
}

// Fit returns a share for a list whose size turned out to be bytes, which may be more than the
// estimate with which s was admitted; s may be nil. If Fit has to wait, it releases s first, so
// that lists do not wait for one another. Errors: those of Enter; s is then released.
func (s *Share) Fit(ctx context.Context, a *Admission, level Level, bytes int64) (*Share, error) {
	if s != nil && s.bytes > 0 {
		a.mu.Lock()
		more := min(bytes, a.levelMaxLocked()/2) - s.bytes
		a.mu.Unlock()
		if more <= 0 {
			s.Shrink(bytes)
			return s, nil
		}
		if a.tryAcquire(s.level, more, false, true) {
			s.bytes += more
			return s, nil
		}
	}
	s.Leave()
	return a.Enter(ctx, level, bytes)
}

// shrinkStep is the minimum number of bytes that a share releases early.
const shrinkStep = 1 << 20

// Shrink releases the room beyond the bytes that are still to be sent.
func (s *Share) Shrink(left int64) {
	if s == nil || left > s.bytes-shrinkStep && left > 0 {
		return
	}
	left = max(left, 0)
	s.admission.release(s.level, s.bytes-left)
	s.bytes = left
}

// Leave releases the share.
func (s *Share) Leave() { s.Shrink(0) }

// InFlight returns the bytes of all lists in flight, exempt levels included.
func (a *Admission) InFlight() (bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range a.levels {
		bytes += l.used
	}
	return bytes
}

// Slow counts a list that was ended because its client did not read it.
func (a *Admission) Slow(level Level) {
	if a == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.levelLocked(level).refused[refusedSlow]++
}

// levelLocked returns the state of a priority level, which it adds if it is new.
func (a *Admission) levelLocked(level Level) *levelLists {
	for _, l := range a.levels {
		if l.Level == level {
			return l
		}
	}
	if len(a.levels) >= knownLevels {
		a.levels = slices.DeleteFunc(a.levels, func(l *levelLists) bool {
			return l.used == 0 && l.pins == 0 && l.waiting.Len() == 0
		})
	}
	l := &levelLists{Level: level, refused: map[string]int64{}}
	a.levels = append(a.levels, l)
	return l
}

// reservedLocked is the reserved part of each level, which other levels cannot take.
func (a *Admission) reservedLocked() int64 {
	return a.limit / 4 / int64(max(usualLevels, len(a.levels)))
}

// common is the part that the levels share.
func (a *Admission) common() int64 { return a.limit - a.limit/4 }

// levelMaxLocked is the maximum of one level.
func (a *Admission) levelMaxLocked() int64 { return a.reservedLocked() + a.common()/2 }

// largest is the size limit of a list of decoded objects, which fits on its own with any number of
// levels.
func (a *Admission) largest() int64 { return a.common() / 2 }

// fitsLocked reports whether a level may take so many bytes now.
func (a *Admission) fitsLocked(l *levelLists, bytes int64, decoded bool) bool {
	reserved, used := a.reservedLocked(), l.used+bytes
	switch {
	case l.Exempt, used <= reserved, l.used == 0 && !decoded:
		return true
	case used > a.levelMaxLocked():
		return false
	}
	common := used - reserved
	for _, o := range a.levels {
		if o != l && !o.Exempt {
			common += max(0, o.used-reserved)
		}
	}
	if sixth := a.common() / 6; l.used > 0 || used-reserved > sixth {
		return common <= a.common()-sixth
	}
	return common <= a.common()
}

// acquire takes bytes for a level, waiting for them. Error: 429.
func (a *Admission) acquire(ctx context.Context, l *levelLists, bytes int64, decoded bool) error {
	if a.tryAcquire(l, bytes, decoded, false) {
		return nil
	}
	w := &waitingList{bytes: bytes, decoded: decoded, admitted: make(chan struct{})}
	a.mu.Lock()
	place := l.waiting.PushBack(w)
	a.admitLocked() // room may have been released since
	a.mu.Unlock()

	wait := listWait
	if deadline, ok := ctx.Deadline(); ok {
		wait = min(wait, time.Until(deadline)/2)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-w.admitted:
		return nil
	case <-timer.C:
	case <-ctx.Done():
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	select {
	case <-w.admitted:
		return nil
	default:
	}
	l.waiting.Remove(place)
	a.admitLocked() // later lists in the queue may be smaller
	return a.refuseLocked(l)
}

// tryAcquire is acquire without a wait. A list that has begun may pass waiting lists, and so may
// one from memory if its level has none in flight.
func (a *Admission) tryAcquire(l *levelLists, bytes int64, decoded, begun bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	queued := l.waiting.Len() > 0 && !begun && !l.Exempt && (decoded || l.used > 0)
	if queued || !a.fitsLocked(l, bytes, decoded) {
		return false
	}
	l.used += bytes
	return true
}

func (a *Admission) refuseLocked(l *levelLists) error {
	l.refused[refusedBusy]++
	return apierrors.NewTooManyRequests("too many bytes of lists in flight for this priority level, please try again later", listRetrySeconds)
}

func (a *Admission) release(l *levelLists, bytes int64) {
	if bytes == 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	l.used -= bytes
	a.admitLocked()
}

// admitLocked admits waiting lists that fit, one of each level in turn.
func (a *Admission) admitLocked() {
	for none := 0; none < len(a.levels); a.nextLevel++ {
		l := a.levels[a.nextLevel%len(a.levels)]
		next := a.nextLocked(l)
		if next == nil {
			none++
			continue
		}
		none = 0
		w := l.waiting.Remove(next).(*waitingList)
		l.used += w.bytes
		close(w.admitted)
	}
}

// nextLocked returns the queue element of the next list of a level to admit, nil if none fits now.
// That is the first one, or, if the first is of decoded objects and does not fit, the first that
// does, but only in a level without a list in flight.
func (a *Admission) nextLocked(l *levelLists) *list.Element {
	for place := l.waiting.Front(); place != nil; place = place.Next() {
		w := place.Value.(*waitingList)
		if a.fitsLocked(l, w.bytes, w.decoded) {
			return place
		}
		if l.used > 0 || !w.decoded {
			return nil
		}
	}
	return nil
}

// Metrics of the lists of this process.
var (
	descListBytes = metrics.NewDesc("strata_lists_in_flight_bytes",
		"Estimated bytes of the admitted lists in flight.",
		[]string{"priority_level"}, nil, metrics.ALPHA, "")
	descListLimit   = metrics.NewDesc("strata_lists_in_flight_limit_bytes", "Bound of strata_lists_in_flight_bytes.", nil, nil, metrics.ALPHA, "")
	descListWaiting = metrics.NewDesc("strata_lists_waiting", "Lists that wait for room.", []string{"priority_level"}, nil, metrics.ALPHA, "")
	descListRefused = metrics.NewDesc("strata_lists_refused_total",
		"Lists refused or ended, by reason: busy (429: no room in time), too_large (413), slow_client (aborted).",
		[]string{"priority_level", "reason"}, nil, metrics.ALPHA, "")

	admissions        = &admissionCollector{}
	registerAdmission sync.Once
)

type admissionCollector struct {
	metrics.BaseStableCollector
	mu  sync.Mutex // before Admission.mu
	all []*Admission
}

func (c *admissionCollector) add(a *Admission) {
	c.mu.Lock()
	c.all = append(c.all, a)
	c.mu.Unlock()
	registerAdmission.Do(func() { legacyregistry.CustomMustRegister(c) })
}

// DescribeWithStability implements metrics.StableCollector.
func (c *admissionCollector) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- descListBytes
	ch <- descListLimit
	ch <- descListWaiting
	ch <- descListRefused
}

// CollectWithStability implements metrics.StableCollector. It reports the sums over all admissions
// of the process.
func (c *admissionCollector) CollectWithStability(ch chan<- metrics.Metric) {
	type level struct {
		used, waiting int64
		refused       map[string]int64
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var limit int64
	levels := map[string]*level{}
	for _, a := range c.all {
		limit += a.limit
		a.mu.Lock()
		for _, l := range a.levels {
			sum := levels[l.Name]
			if sum == nil {
				sum = &level{refused: map[string]int64{}}
				levels[l.Name] = sum
			}
			sum.used += l.used
			sum.waiting += int64(l.waiting.Len() + l.encoding.Len())
			for reason, n := range l.refused {
				sum.refused[reason] += n
			}
		}
		a.mu.Unlock()
	}
	ch <- metrics.NewLazyConstMetric(descListLimit, metrics.GaugeValue, float64(limit))
	for name, l := range levels {
		ch <- metrics.NewLazyConstMetric(descListBytes, metrics.GaugeValue, float64(l.used), name)
		ch <- metrics.NewLazyConstMetric(descListWaiting, metrics.GaugeValue, float64(l.waiting), name)
		for reason, n := range l.refused {
			ch <- metrics.NewLazyConstMetric(descListRefused, metrics.CounterValue, float64(n), name, reason)
		}
	}
}
