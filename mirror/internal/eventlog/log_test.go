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
		rev, floor := int64(10), int64(10)
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
					floor = to
					for i, e := range model {
						if e != nil && e.rev <= to {
							model[i] = nil
						}
					}
				}
			},
			"": func(t *rapid.T) {
				if l.Floor() != floor || l.End() != uint64(len(model)) {
					t.Fatalf("floor %d end %d, want %d %d", l.Floor(), l.End(), floor, len(model))
				}
				held := 0
				for i, e := range model {
					if got := l.At(uint64(i)); got != e {
						t.Fatalf("At(%d) = %v, want %v", i, got, e)
					}
					if e != nil {
						held++
					}
				}
				if l.At(uint64(len(model))) != nil || l.Len() != held {
					t.Fatalf("holds %d events, want %d", l.Len(), held)
				}
				after := rapid.Int64Range(floor, max(floor, rev)+1).Draw(t, "after")
				want := uint64(len(model))
				for i, e := range model {
					if e != nil && e.rev > after {
						want = uint64(i)
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

// TestLog_ConcurrentReaders_SeeEachEventOnceOrGap runs readers against a writer that drops old events.
func TestLog_ConcurrentReaders_SeeEachEventOnceOrGap(t *testing.T) {
	const total = 50_000
	l := New[ev](0)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			seq, gaps := uint64(0), 0
			for seq < total {
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
				if e.id != int64(seq) {
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
