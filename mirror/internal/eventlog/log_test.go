package eventlog

import (
	"sync"
	"testing"

	"pgregory.net/rapid"
)

type ev struct{ rev, id int64 }

func (e *ev) Revision() int64 { return e.rev }

// TestLog_RandomSteps_EqualsSliceWithFloor compares appends, drops and searches with a slice.
func TestLog_RandomSteps_EqualsSliceWithFloor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := New[ev](10)
		var model []*ev // all events ever, dropped ones nil
		rev, floor, start := int64(10), int64(10), uint64(Start)
		dropped := false
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				var batch []*ev
				for range rapid.IntRange(0, 300).Draw(t, "n") {
					if rapid.IntRange(0, 3).Draw(t, "same") != 0 || rev == 10 {
						rev++
					}
					batch = append(batch, &ev{rev, int64(len(model) + len(batch))})
				}
				l.Append(batch...)
				model = append(model, batch...)
				rev++ // a revision is never split over two appends
			},
			"drop": func(t *rapid.T) {
				to := rapid.Int64Range(floor-2, max(floor, rev-1)).Draw(t, "to")
				l.Drop(to, nil)
				if to > floor {
					dropped = true
					floor = to
					for i, e := range model {
						if e != nil && e.rev <= to {
							model[i] = nil
						}
					}
				}
			},
			"prepend": func(t *rapid.T) {
				if dropped || floor < 5 {
					t.Skip("too late")
				}
				older := make([]*ev, rapid.IntRange(0, 300).Draw(t, "n"))
				for i := range older {
					older[i] = &ev{floor - int64(2*(len(older)-1-i)/max(1, len(older))), int64(-i)}
				}
				floor -= 2
				l.Prepend(floor, older)
				model = append(older, model...)
				start -= uint64(len(older))
			},
			"": func(t *rapid.T) {
				if l.Floor() != floor || l.End() != start+uint64(len(model)) {
					t.Fatalf("floor %d end %d, want %d %d", l.Floor(), l.End(), floor, start+uint64(len(model)))
				}
				held := 0
				for i, e := range model {
					if got := l.At(start + uint64(i)); got != e {
						t.Fatalf("At(%d) = %v, want %v", i, got, e)
					}
					if e != nil {
						held++
					}
				}
				if l.At(start+uint64(len(model))) != nil || l.At(start-1) != nil || l.Len() != held {
					t.Fatalf("holds %d events, want %d", l.Len(), held)
				}
				after := rapid.Int64Range(floor, max(floor, rev)+1).Draw(t, "after")
				want := start + uint64(len(model))
				for i, e := range model {
					if e != nil && e.rev > after {
						want = start + uint64(i)
						break
					}
				}
				if got := l.After(after); got != want {
					t.Fatalf("After(%d) = %d, want %d", after, got, want)
				}
			},
		})
	})
}

// TestLog_Table_GrowsAndShrinksByChunks: only a step over the end of a chunk replaces the table. A
// dropped chunk is released.
func TestLog_Table_GrowsAndShrinksByChunks(t *testing.T) {
	l := New[ev](0)
	rev, before := int64(0), l.table.Load()
	step := func(what string, change func(), replaces bool) {
		change()
		now := l.table.Load()
		if held := (l.End()-1)/chunkSize - l.First()/chunkSize + 1; (now != before) != replaces || len(now.chunks) != int(held) {
			t.Fatalf("revision %d %s: %d chunks, want %d; table replaced: %v", rev, what, len(now.chunks), held, now != before)
		}
		before = now
	}
	for rev = 1; rev <= 3*chunkSize; rev++ {
		step("added", func() { l.Append(&ev{rev, rev}) }, rev%chunkSize == 1)
	}
	for rev = 1; rev < 3*chunkSize; rev++ {
		step("dropped", func() { l.Drop(rev, nil) }, rev%chunkSize == 0)
	}
}

// TestLog_ConcurrentReaders_SeeEachEventOnceOrGap runs readers against a writer that drops old
// events.
func TestLog_ConcurrentReaders_SeeEachEventOnceOrGap(t *testing.T) {
	const total = 50_000
	l := New[ev](0)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			seq, gaps := uint64(Start), 0
			for seq < Start+total {
				if seq >= l.End() {
					continue
				}
				e := l.At(seq)
				if e == nil {
					if l.First() <= seq {
						t.Errorf("event %d is missing, but the log begins at %d", seq, l.First())
						return
					}
					gaps++
					seq = l.First()
					continue
				}
				if e.id != int64(seq-Start) {
					t.Errorf("event %d at %d", e.id, seq)
					return
				}
				seq++
			}
		})
	}
	for i := range int64(total) {
		l.Append(&ev{i + 1, i})
		if i%100 == 0 {
			l.Drop(i-2_000, nil)
		}
	}
	wg.Wait()
}

// TestLog_Prepend_ReadersSeeAllOrOldFloor runs readers against a writer that prepends: a reader
// that finds the lower floor finds every event above it.
func TestLog_Prepend_ReadersSeeAllOrOldFloor(t *testing.T) {
	const older = 1000
	for range 200 {
		l := New[ev](older)
		l.Append(&ev{older + 1, older})
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for {
					floor := l.Floor()
					seq := l.After(floor)
					for id := floor; id <= older; id++ {
						if e := l.At(seq + uint64(id-floor)); e == nil || e.id != id {
							t.Errorf("floor %d: event %d is %v", floor, id, e)
							return
						}
					}
					if floor == 0 {
						return
					}
				}
			})
		}
		events := make([]*ev, older)
		for i := range events {
			events[i] = &ev{int64(i) + 1, int64(i)}
		}
		l.Prepend(0, events)
		wg.Wait()
	}
}
