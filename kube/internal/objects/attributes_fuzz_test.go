package objects

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/fields"
)

// FuzzSet stores any map, as labels and as fields: a read returns the same map.
func FuzzSet(f *testing.F) {
	f.Add("a", "b", "", "", "c", "")
	f.Add("", "", "a", "a", "aa", strings.Repeat("v", 200))
	f.Add(strings.Repeat("k", 128), "x", "k", strings.Repeat("v", 20_000), "\x00", "\xff")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2, k3, v3 string) {
		m := map[string]string{k1: v1, k2: v2, k3: v3}
		var view View
		// with the same names, and with others
		before := view.newFieldSet(fields.Set{k1: v2, k2: v3, k3: v1})
		for range 4 {
			s, f := newSet(m), view.newFieldSet(m)
			for _, key := range []string{k1, k2, k3, "", "a", k1 + k2, v1, k1 + "\x00"} {
				want, held := m[key]
				got, ok := s.Lookup(key)
				if got != want || ok != held || s.Has(key) != held || s.Get(key) != want {
					t.Fatalf("%q of %q: %q, %v", key, m, got, ok)
				}
				if got, ok := f.lookup(key); got != want || ok != held || f.Has(key) != held || f.Get(key) != want {
					t.Fatalf("field %q of %q: %q, %v", key, m, got, ok)
				}
			}
			if shared := f.names == before.names; shared != (len(m) == len(*before.names)) {
				t.Fatalf("%d and %d names, shared: %v", len(m), len(*before.names), shared)
			}
			for key := range m {
				delete(m, key)
				break
			}
		}
	})
}
