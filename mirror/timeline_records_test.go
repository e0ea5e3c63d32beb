package mirror

import (
	"slices"
	"testing"
	"time"
)

func TestTimeline_NewestRevision_HasItsOwnTime(t *testing.T) {
	t.Parallel()
	began := time.Now()
	at := func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond).Round(0) }
	var l timeline
	l.add(1, at(0))
	l.add(2, at(300))
	l.add(3, at(600))
	// The feed breaks; the next look at the published revision is ten minutes later.
	l.add(3, at(600_000))
	if got, want := l.timesOfDay(at(700_000)), []RevisionTime{{1, at(0)}, {3, at(600)}}; !slices.Equal(got, want) {
		t.Errorf("times are %v, want %v", got, want)
	}
	l.add(4, at(600_100))
	l.add(5, at(600_200))
	if got, want := l.timesOfDay(at(700_000)), []RevisionTime{{1, at(0)}, {3, at(600)}, {4, at(600_100)}, {5, at(600_200)}}; !slices.Equal(got, want) {
		t.Errorf("times are %v, want %v", got, want)
	}
}

// TestTimeline_ClockSetBack_TimesAscend: clients search the times.
func TestTimeline_ClockSetBack_TimesAscend(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	at := func(minutes int) time.Time { return noon.Add(time.Duration(minutes) * time.Minute) }
	l := timeline{times: []RevisionTime{{1, at(0)}, {2, at(10)}, {3, at(20)}, {4, at(5)}, {5, at(6)}, {6, at(30)}}}
	if got, want := l.timesOfDay(at(7)), []RevisionTime{{1, at(0)}, {2, at(5)}, {3, at(5)}, {4, at(5)}, {5, at(6)}, {6, at(7)}}; !slices.Equal(got, want) {
		t.Errorf("times are %v, want %v", got, want)
	}
}
