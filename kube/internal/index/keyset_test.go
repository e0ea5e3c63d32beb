package index

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// check returns an error if an invariant of the set is broken.
func (s *keySet) check() error {
	n := 0
	var last *hashed
	for i, c := range s.chunks {
		if c.n == 0 || c.n > keysInChunk {
			return fmt.Errorf("chunk %d has %d entries", i, c.n)
		}
		if i > 0 && c.n+s.chunks[i-1].n <= keysInChunk/2 {
			return fmt.Errorf("chunks %d and %d have %d entries together", i-1, i, c.n+s.chunks[i-1].n)
		}
		for j, e := range c.entries {
			if (e != nil) != (j < c.n) {
				return fmt.Errorf("entry %d of %d in chunk %d is %v", j, c.n, i, e)
			}
			if e == nil {
				continue
			}
			h := hashed{c.hashes[j], e}
			if last != nil && cmp.Or(cmp.Compare(last.hash, h.hash), strings.Compare(last.entry.Key(), e.Key())) >= 0 {
				return fmt.Errorf("%v is before %v", last, h)
			}
			last = &h
		}
		n += c.n
	}
	if n != s.n {
		return fmt.Errorf("%d entries, %d counted", n, s.n)
	}
	return nil
}

// TestKeySet_RandomSteps_EqualsModel changes a set of entries with few and with many values, and
// compares the entries of each value, in ranges, with a map.
func TestKeySet_RandomSteps_EqualsModel(t *testing.T) {
	f := newFixture(t)
	for i := range 1000 {
		f.Put(t, podtest.Pod(fmt.Sprintf("pod-%04d", i)))
	}
	f.CatchUp(t)
	entries := slices.Collect(f.Latest(t).All("", ""))
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SampledFrom([]int{1, 3, 500}).Draw(t, "values")
		model := map[*mirror.Entry]uint32{}
		var all []hashed
		for _, e := range entries[:rapid.IntRange(0, len(entries)).Draw(t, "built")] {
			model[e] = uint32(len(all) % values)
			all = append(all, hashed{model[e], e})
		}
		s := buildKeys(all)
		t.Repeat(map[string]func(*rapid.T){
			"set": func(t *rapid.T) {
				from := rapid.IntRange(0, len(entries)-1).Draw(t, "from")
				for i, e := range entries[from:min(len(entries), from+rapid.IntRange(1, 300).Draw(t, "n"))] {
					if hash, ok := model[e]; ok && !s.remove(hash, e.Key()) {
						t.Fatalf("%s was not found", e.Key())
					}
					model[e] = uint32((from + i) % values)
					s.set(hashed{model[e], e})
				}
			},
			"remove": func(t *rapid.T) {
				from := rapid.IntRange(0, len(entries)-1).Draw(t, "from")
				for _, e := range entries[from:min(len(entries), from+rapid.IntRange(1, 300).Draw(t, "n"))] {
					hash, ok := model[e]
					if got := s.remove(hash, e.Key()); got != ok {
						t.Fatalf("remove(%s) is %t", e.Key(), got)
					}
					delete(model, e)
				}
			},
			"": func(t *rapid.T) {
				if err := s.check(); err != nil || s.n != len(model) {
					t.Fatalf("%d entries, want %d: %v", s.n, len(model), err)
				}
				hash := uint32(rapid.IntRange(0, values).Draw(t, "value"))
				at := rapid.IntRange(0, len(entries)-1)
				start, end := entries[at.Draw(t, "start")].Key(), entries[at.Draw(t, "end")].Key()
				if rapid.Bool().Draw(t, "unbounded") {
					end = ""
				}
				var want []*mirror.Entry
				for _, e := range entries {
					if h, ok := model[e]; ok && h == hash && e.Key() >= start && (end == "" || e.Key() < end) {
						want = append(want, e)
					}
				}
				if got := slices.Collect(s.of(hash, start, end)); !slices.Equal(got, want) {
					t.Fatalf("%d entries of %d, want %d", len(got), hash, len(want))
				}
			},
		})
	})
}

// TestKeySet_Bytes_AreFewForAnyNumberOfValues: a set costs at most 24 bytes for each entry when it
// is built, and after its entries have moved between random values.
func TestKeySet_Bytes_AreFewForAnyNumberOfValues(t *testing.T) {
	f := newFixture(t)
	for i := range 10_000 {
		f.Etcd.Put(fmt.Sprintf("%spod-%05d", podtest.Root, i), "")
	}
	f.CatchUp(t)
	for _, values := range []int{1, 100, 10_000} {
		var all []hashed
		for e := range f.Latest(t).All("", "") {
			all = append(all, hashed{hashOf(fmt.Sprint(len(all) % values)), e})
		}
		s := buildKeys(all)
		for round := range 3 {
			if per := float64(s.bytes()) / float64(s.n); per > 24 || s.n != 10_000 {
				t.Errorf("%d values, round %d: %.1f bytes for each of %d entries", values, round, per, s.n)
			}
			for i := range all {
				h := &all[i*7919%len(all)]
				s.remove(h.hash, h.entry.Key())
				h.hash = hashOf(fmt.Sprint((i*31 + round) % values))
				s.set(*h)
			}
		}
	}
}
