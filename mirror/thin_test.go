package mirror

import "testing"

// TestThin_BoundsNumberAndDistance: the first and the last version stay, the distance between
// neighbours is bounded by their age, no version between two neighbours could be dropped within the
// bound, and the number grows logarithmically until the distance reaches its maximum.
func TestThin_BoundsNumberAndDistance(t *testing.T) {
	const events, total = 10, 200_000
	cps := []*version{{}}
	for n := uint64(1); n <= total/events; n++ {
		newest := &version{rev: Revision(n * events), seq: n * events}
		oldest := cps[0]
		cps = thinCheckpoints(append(cps, newest), events)
		if cps[0] != oldest || cps[len(cps)-1] != newest {
			t.Fatalf("after %d: the first or the last was evicted", n)
		}
		for i := len(cps) - 1; i > 0; i-- {
			newer, older := cps[i].seq, cps[i-1].seq
			limit := min(max(newest.seq-newer, events), events<<thinLimit)
			if newer <= older || newer-older > limit {
				t.Fatalf("after %d: versions at %d and %d, limit %d", n, older, newer, limit)
			}
			if i < len(cps)-1 {
				limit := min(max(newest.seq-cps[i+1].seq, events), events<<thinLimit)
				if cps[i+1].seq-older <= limit {
					t.Fatalf("after %d: the version at %d between %d and %d could go, limit %d", n, newer, older, cps[i+1].seq, limit)
				}
			}
		}
	}
	if got, most := len(cps), 2*total/(events<<thinLimit)+2*thinLimit; got > most {
		t.Errorf("%d cached versions, want at most %d", got, most)
	}
}
