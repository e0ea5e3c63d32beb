package mirror

import (
	"slices"
	"sort"
	"sync"
	"time"
)

// RevisionTime says that the published revision reached Revision at Time, on this machine's clock.
type RevisionTime struct {
	Revision Revision
	Time     time.Time
}

// timeline records when the published revision reached which value, at most twice a second. The
// writer adds to it.
type timeline struct {
	mu sync.Mutex // leaf
	// times are ascending by revision and by the monotonic clock; the last is of the newest
	// revision. Of three in a row, the last is at least a second after the first.
	times []RevisionTime
}

// add records that the published revision has reached rev, unless that was recorded. Within a
// second of the last record but one it replaces the last, so that the newest revision always has
// its own time, however long no other follows.
func (l *timeline) add(rev Revision, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.times)
	switch {
	case n > 0 && rev <= l.times[n-1].Revision:
	case n > 1 && now.Sub(l.times[n-2].Time) < markInterval:
		l.times[n-1] = RevisionTime{rev, now}
	default:
		l.times = append(l.times, RevisionTime{rev, now})
	}
}

// reset begins a new timeline: etcd was replaced, and its revisions are unrelated to those before.
func (l *timeline) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.times = nil
}

// trim drops the records from before the time, except for the newest of them.
func (l *timeline) trim(before time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := sort.Search(len(l.times), func(i int) bool { return l.times[i].Time.After(before) })
	l.times = l.times[max(0, n-1):]
}

// Times returns when the published revision reached which value, both ascending, at most twice a
// second, from the first list or the beginning of the window on: revisions that were restored from
// etcd's history have no times. If the clock was set back, times from before that are at most the
// time to which it was set. Cost is a copy of at most 7,200 elements for a window of an hour.
func (m *Mirror) Times() []RevisionTime { return m.timeline.timesOfDay(time.Now()) }

// timesOfDay returns the records without their monotonic times; none is later than now, or than the
// next.
func (l *timeline) timesOfDay(now time.Time) []RevisionTime {
	l.mu.Lock()
	times := slices.Clone(l.times)
	l.mu.Unlock()
	latest := now.Round(0)
	for i := len(times) - 1; i >= 0; i-- {
		if at := times[i].Time.Round(0); at.Before(latest) {
			latest = at
		}
		times[i].Time = latest
	}
	return times
}
