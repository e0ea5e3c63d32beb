package gzipjoin

import (
	"hash/crc32"
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestCombine_EqualsChecksumOfConcatenation(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := rapid.SliceOf(rapid.Byte()).Draw(t, "first")
		second := drawBytes(t, "second")
		want := crc32.Update(crc32.ChecksumIEEE(first), crc32.IEEETable, second)
		got := combine(crc32.ChecksumIEEE(first), crc32.ChecksumIEEE(second), int64(len(second)))
		if got != want {
			t.Fatalf("%d and %d bytes: %08x, want %08x", len(first), len(second), got, want)
		}
	})
}

// Lengths that are too large to hash in a test must be consistent with each other.
func TestCombine_AnyLength_IsAssociative(t *testing.T) {
	length := rapid.Int64Range(0, math.MaxInt64/2)
	rapid.Check(t, func(t *rapid.T) {
		a, b, c := rapid.Uint32().Draw(t, "a"), rapid.Uint32().Draw(t, "b"), rapid.Uint32().Draw(t, "c")
		n, m := length.Draw(t, "length of b"), length.Draw(t, "length of c")
		left, right := combine(combine(a, b, n), c, m), combine(a, combine(b, c, m), n+m)
		if left != right {
			t.Fatalf("%08x and %08x", left, right)
		}
	})
}
