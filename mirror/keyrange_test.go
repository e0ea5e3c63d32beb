package mirror

import "testing"

// TestKeyRange_Prefix_IsWithinOrMeets: the bounds of ranges and of prefixes.
func TestKeyRange_Prefix_IsWithinOrMeets(t *testing.T) {
	for _, c := range []struct {
		start, end string
		meets, key bool // with the prefix /b/
	}{
		{"/b/", "/b0", true, false},
		{"/b/x", "/b/y", true, false},
		{"/b/x", "/b/x\x00", true, true},
		{"/a/", "/b/", false, false}, // ends where the prefix begins
		{"/a/", "/b/\x00", true, false},
		{"/b0", "/c", false, false},
		{"/b0", "", false, false},
		{"", "", true, false},
		{"/c", "", false, false},
		{"/b/", "", true, false},
	} {
		k := keyRange{start: c.start, end: c.end}
		if k.meets("/b/") != c.meets || k.isKey() != c.key {
			t.Errorf("[%q, %q) meets /b/: %t, is a key: %t", c.start, c.end, k.meets("/b/"), k.isKey())
		}
	}
}
