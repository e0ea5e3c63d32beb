package eventlog

import (
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// TestPostings_RandomSteps_EqualsSlice compares appends, trims and reads with a slice: a reader
// gets every number from its position on, or false if one was dropped, which happens only below the
// log's first event.
func TestPostings_RandomSteps_EqualsSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p Postings
		var model []uint64
		seq, first := uint64(0), uint64(0)
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				for range rapid.IntRange(1, 20).Draw(t, "n") {
					seq += uint64(rapid.IntRange(1, 3).Draw(t, "step"))
					p.Append(seq, first)
					model = append(model, seq)
				}
			},
			"trim": func(t *rapid.T) {
				first = max(first, uint64(rapid.IntRange(0, int(seq)+2).Draw(t, "first")))
				p.Trim(first)
				live, _ := slices.BinarySearch(model, first)
				needed := len(model) - live
				if cur := p.cur.Load(); cur != nil && len(cur.seqs) > min(needed, 1)*max(firstPostings, 4*needed) {
					t.Fatalf("room for %d numbers, %d needed", len(cur.seqs), needed)
				}
			},
			"": func(t *rapid.T) {
				from := uint64(rapid.IntRange(0, int(seq)+2).Draw(t, "from"))
				i, _ := slices.BinarySearch(model, from)
				got, whole := p.From(from)
				switch {
				case !whole && from >= first:
					t.Fatalf("From(%d) is incomplete, though the log starts at %d", from, first)
				case whole && !slices.Equal(got, model[i:]):
					t.Fatalf("from %d: %d, want %d", from, got, model[i:])
				}
			},
		})
	})
}

// TestPostings_ConcurrentReaders_SeeConsistentList: readers see a consistent list while the writer
// appends and trims.
func TestPostings_ConcurrentReaders_SeeConsistentList(t *testing.T) {
	const total = 100_000
	var p Postings
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for next := uint64(1); next < total; {
				seqs, whole := p.From(next)
				if !whole {
					next++
					continue
				}
				for _, seq := range seqs {
					if seq != next {
						t.Errorf("%d follows %d", seq, next-1)
						return
					}
					next++
				}
			}
		})
	}
	for seq := uint64(1); seq < total; seq++ {
		first := max(seq, 500) - 500
		p.Append(seq, first)
		if seq%97 == 0 {
			p.Trim(first)
		}
	}
	wg.Wait()
}

// TestPostings_Check_FindsBrokenLists: what Append would never do.
func TestPostings_Check_FindsBrokenLists(t *testing.T) {
	for name, c := range map[string]struct {
		lost uint64
		seqs []uint64
		good bool
	}{
		"ascending, from the first retained to the last": {lost: 2, seqs: []uint64{2, 5, 9}, good: true},
		"twice the same number":                          {seqs: []uint64{2, 5, 5}},
		"descending":                                     {seqs: []uint64{2, 5, 4}},
		"a number that may be dropped":                   {lost: 3, seqs: []uint64{2, 5}},
		"the end of the log":                             {seqs: []uint64{2, 10}},
	} {
		var p Postings
		if err := p.Check(10); err != nil || p.Len() != 0 {
			t.Errorf("an empty list: %v, %d numbers", err, p.Len())
		}
		list := &postings{lost: c.lost, seqs: c.seqs}
		list.n.Store(int64(len(c.seqs)))
		p.cur.Store(list)
		if err := p.Check(10); (err == nil) != c.good || p.Len() != len(c.seqs) {
			t.Errorf("%s: %v, %d numbers", name, err, p.Len())
		}
	}
}
