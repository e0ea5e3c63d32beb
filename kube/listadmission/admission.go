// Package listadmission bounds the lists that are under way at the same time: their bytes, and how many of decoded objects are
// encoded at once. It knows priority levels and no storage.
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
	// listBytesPerProcessor is, unless the limit is given, how many bytes of lists are under way at once
	// for each processor: what it encodes and encrypts in a few seconds.
	listBytesPerProcessor = 256 << 20
	// freeListBytes is what a list may have without being admitted: pages, and what controllers and people
	// list of one namespace, never wait.
	freeListBytes = 2 << 20
	// listWait is how long a list waits to be admitted, after priority and fairness has let it in, but no
	// longer than half of the time that its request has left.
	listWait = 30 * time.Second
	// listRetrySeconds is when a list that was refused may come again.
	listRetrySeconds = 5
	// usualLevels is how many priority levels divide what is reserved, at least: more than Kubernetes'
	// own configuration has that are not exempt.
	usualLevels = 8
	// knownLevels is how many levels are remembered without a list under way. Levels are objects that
	// administrators create and delete.
	knownLevels = 64
)

// Level is the level that priority and fairness has found for a request. The zero value is the
// one level that there is without.
type Level struct {
	Name   string
	Exempt bool
}

// Admission bounds the bytes of lists that are under way at the same time, by what is known of them
// beforehand: bytes that the read path encodes and sends (Enter), and the memory of lists that are made
// of decoded objects (Begin). Lists above the bound wait, first in, first out within their priority
// level, so that a server of which more is asked than it can give ends some lists in time and refuses
// others with 429.
//
// Priority levels are isolated from one another. A quarter of the limit is reserved, in equal parts; of
// the rest one level may take half, and a sixth is for lists of levels that have nothing under way. Such a level may always begin a list
// that is sent from memory. Exempt levels never wait, and take no room.
//
// Lists of decoded objects also take turns to be encoded, so that a processor is left for short requests (TakeTurn). Safe for
// concurrent use.
type Admission struct {
	limit int64

	mu     sync.Mutex // leaf
	levels []*levelLists
	turn   int // of levels, whose lists are admitted first

	freeTurns int // see TakeTurn
	nextTurn  int // of levels, whose list is encoded next
}

// levelLists are the lists of a priority level. Guarded by Admission.mu.
type levelLists struct {
	Level
	used     int64     // bytes
	waiting  list.List // of *waitingList
	encoding list.List // of chan struct{}, closed when the list may be encoded
	held     int       // by lists that may have no bytes: the level is not forgotten
	refused  map[string]int64
}

type waitingList struct {
	bytes    int64
	decoded  bool
	admitted chan struct{} // closed when it is
}

// Reasons for which lists are refused, as metrics tell.
const (
	refusedBusy     = "busy"
	refusedTooLarge = "too_large"
	refusedSlow     = "slow_client"
)

// New returns a bound of so many bytes; 0 is 256 MiB for each processor.
func New(limitBytes int64) *Admission {
	if limitBytes <= 0 {
		limitBytes = listBytesPerProcessor * int64(goruntime.GOMAXPROCS(0))
	}
	a := &Admission{limit: limitBytes, freeTurns: encodingTurns()}
	admissions.add(a)
	return a
}

// Enter waits for room for a list of so many bytes that are sent from memory. More than half of what its
// level may take is never needed. Error: 429 if there is no room in time. A nil share, of a small list
// or of a nil admission, holds nothing.
func (a *Admission) Enter(ctx context.Context, level Level, bytes int64) (*Share, error) {
	if a == nil || bytes <= freeListBytes {
		return nil, nil
	}
	s := &Share{admission: a}
	a.mu.Lock()
	s.level = a.levelLocked(level)
	s.level.held++
	s.bytes = min(bytes, a.levelMaxLocked()/2)
	a.mu.Unlock()
	defer func() {
		a.mu.Lock()
		s.level.held--
		a.mu.Unlock()
	}()
	if err := a.acquire(ctx, s.level, s.bytes, false); err != nil {
		return nil, err
	}
	return s, nil
}

// Share is what one list holds. Its methods are called by one goroutine at a time; those of a nil
// share do nothing.
type Share struct {
	admission *Admission
	level     *levelLists
	bytes     int64
}

// Fit returns a share for a list that has turned out to have so many bytes, which may be more than
// was known when s, which may be nil, was admitted. If it has to wait, it does with nothing held, so that
// lists do not wait for one another. Errors: those of Enter; s is left then.
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

// shrinkStep is how many bytes a share gives back at once.
const shrinkStep = 1 << 20

// Shrink gives back what is more than the bytes that are still to be sent.
func (s *Share) Shrink(left int64) {
	if s == nil || left > s.bytes-shrinkStep && left > 0 {
		return
	}
	left = max(left, 0)
	s.admission.release(s.level, s.bytes-left)
	s.bytes = left
}

// Leave gives back all.
func (s *Share) Leave() { s.Shrink(0) }

// InFlight returns the bytes of all lists under way, those of exempt levels included.
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

// levelLocked returns what is known of a priority level.
func (a *Admission) levelLocked(level Level) *levelLists {
	for _, l := range a.levels {
		if l.Level == level {
			return l
		}
	}
	if len(a.levels) >= knownLevels {
		a.levels = slices.DeleteFunc(a.levels, func(l *levelLists) bool {
			return l.used == 0 && l.held == 0 && l.waiting.Len() == 0
		})
	}
	l := &levelLists{Level: level, refused: map[string]int64{}}
	a.levels = append(a.levels, l)
	return l
}

// reservedLocked is what each level may take whatever the others have.
func (a *Admission) reservedLocked() int64 {
	return a.limit / 4 / int64(max(usualLevels, len(a.levels)))
}

// common is what the levels share beside that.
func (a *Admission) common() int64 { return a.limit - a.limit/4 }

// levelMaxLocked is what one level may take.
func (a *Admission) levelMaxLocked() int64 { return a.reservedLocked() + a.common()/2 }

// largest is the largest list of decoded objects: however many levels there are, it fits alone.
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
	a.admitLocked() // there may be room since
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
	a.admitLocked() // those behind may need less
	return a.refuseLocked(l)
}

// tryAcquire is acquire for those who cannot wait, or need not. A list that has begun may pass those that
// wait, and so may one from memory if its level has none under way.
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
	return apierrors.NewTooManyRequests("other lists of this priority level are under way, as many bytes as the server can send or hold", listRetrySeconds)
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

// admitLocked admits lists that wait and fit, one of each level in turn.
func (a *Admission) admitLocked() {
	for none := 0; none < len(a.levels); a.turn++ {
		l := a.levels[a.turn%len(a.levels)]
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

// nextLocked returns the place of the list of a level that is admitted next, nil if none fits now: the
// first, or, if that is one of decoded objects for which there is no room, the first from memory of a
// level without a list under way.
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
		"Bytes of lists that are encoded and sent from memory, and memory of those that are made of decoded objects, as far as they were admitted, by priority level.",
		[]string{"priority_level"}, nil, metrics.ALPHA, "")
	descListLimit   = metrics.NewDesc("strata_lists_in_flight_limit_bytes", "Bound of strata_lists_in_flight_bytes, of all levels but exempt ones.", nil, nil, metrics.ALPHA, "")
	descListWaiting = metrics.NewDesc("strata_lists_waiting", "Lists that wait to be admitted, by priority level.", []string{"priority_level"}, nil, metrics.ALPHA, "")
	descListRefused = metrics.NewDesc("strata_lists_refused_total",
		"Lists that were refused or ended, by priority level and reason: busy (429: no room in time), too_large (413: the form that was asked for would not fit alone), slow_client (broken off).",
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

// CollectWithStability implements metrics.StableCollector. Admissions of one process are added up.
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
