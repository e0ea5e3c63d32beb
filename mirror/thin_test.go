package mirror

import "testing"

// TestThinKeepsFewAndNoneTooFar: the first and the last stay, the distance between
// neighbours is bounded by their age, and the number grows with the logarithm.
func TestThinKeepsFewAndNoneTooFar(t *testing.T) {
	const events = 10
	cps := []*version{{}}
	for n := uint64(1); n <= 200_000/events; n++ {
		newest := &version{rev: Revision(n * events), seq: n * events}
		oldest := cps[0]
		cps = thin(append(cps, newest), events)
		if cps[0] != oldest || cps[len(cps)-1] != newest {
			t.Fatalf("after %d: the first or the last is gone", n)
		}
		for i := len(cps) - 1; i > 0; i-- {
			distance := cps[i].seq - cps[i-1].seq
			if cps[i].seq <= cps[i-1].seq {
				t.Fatalf("after %d: out of order", n)
			}
			// Neighbours were judged when they were younger, so one step more is allowed.
			if limit := uint64(events) << min((len(cps)-i)/thinSteps+1, thinLimit); distance > limit {
				t.Fatalf("after %d: %d events between versions %d and %d from the end, limit %d", n, distance, len(cps)-i, len(cps)-i+1, limit)
			}
		}
	}
	// Of 20,000 versions: eight for each of six distances, then one for 640 events.
	if got := len(cps); got < 200_000/(events<<thinLimit) || got > 2*200_000/(events<<thinLimit) {
		t.Errorf("%d versions are kept", got)
	}
}
