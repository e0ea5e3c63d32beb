package index

import (
	"math/rand/v2"
	"testing"

	"github.com/stratakube/strata/internal/test/testseed"
)

// TestDigest_BitsOf_AnyHashes_EqualsMap: the bits of a hash are found wherever the hash is
// expected, also if hashes are few or not evenly distributed.
func TestDigest_BitsOf_AnyHashes_EqualsMap(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	for range 2000 {
		mask := ^uint32(0) >> rnd.IntN(32)
		want := map[uint32]uint64{}
		var pairs []pair
		for range rnd.IntN(200) {
			hash, bit := rnd.Uint32()&mask, rnd.IntN(64)
			if rnd.IntN(4) == 0 {
				hash = ^hash // at the other end
			}
			want[hash] |= 1 << bit
			pairs = append(pairs, newPair(hash, bit))
		}
		d := newDigest(pairs, 0, 0)
		for range 20 {
			hash := rnd.Uint32() & mask
			if got := d.bitsOf(hash); got != want[hash] {
				t.Fatalf("hash %x: bits %x, want %x", hash, got, want[hash])
			}
		}
		for hash, bits := range want {
			if got := d.bitsOf(hash); got != bits {
				t.Fatalf("hash %x: bits %x, want %x", hash, got, bits)
			}
		}
	}
}
