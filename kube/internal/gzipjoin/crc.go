package gzipjoin

import "hash/crc32"

// A CRC-32 is a polynomial over GF(2) modulo that of crc32.IEEE. Its coefficients
// are stored in reverse: bit 31 is that of x^0, bit 0 that of x^31.

// shifts[k] is x^(8·2^k): the factor of a checksum that 2^k bytes follow.
var shifts = func() (s [63]uint32) {
	s[0] = 1 << (31 - 8)
	for k := 1; k < len(s); k++ {
		s[k] = multiply(s[k-1], s[k-1])
	}
	return s
}()

// multiply returns the product of two polynomials. It has no branches that depend on
// its arguments, which would be mispredicted.
func multiply(a, b uint32) (product uint32) {
	for range 32 {
		product ^= b & -(a >> 31)
		a <<= 1
		b = b>>1 ^ crc32.IEEE&-(b&1)
	}
	return product
}

// combine returns the CRC-32 of a concatenation: first is that of its first part,
// second that of the rest, which is n bytes long. The cost is one multiplication per
// bit that is set in n.
func combine(first, second uint32, n int64) uint32 {
	for k := 0; n > 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			first = multiply(first, shifts[k])
		}
	}
	return first ^ second
}
