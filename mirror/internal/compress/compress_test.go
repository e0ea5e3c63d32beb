package compress

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testseed"
)

// values returns n values of a resource, which share all but a few bytes.
func values(rnd *rand.Rand, n int) (all [][]byte) {
	for i := range n {
		all = append(all, fmt.Appendf(nil, `{"metadata":{"name":"object-%d","namespace":"default","uid":"%x"},"spec":{"replicas":%d,"template":%q}}`,
			i, rnd.Uint64(), i%7, strings.Repeat("the same in all of them, ", 8)))
	}
	return all
}

func random(rnd *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(rnd.Uint32())
	}
	return b
}

func TestDictionary_AnyValue_RoundTrips(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	d := New(t.Name(), values(rnd, 32), 0.75)
	if d == nil {
		t.Fatal("no dictionary")
	}
	similar := values(rnd, 40)
	var buf, out []byte
	for i := range 600 {
		value := random(rnd, rnd.IntN(1<<rnd.IntN(18)))
		switch i % 3 {
		case 0:
			value = similar[i%len(similar)]
		case 1:
			value = bytes.Repeat(value[:min(len(value), 100)], rnd.IntN(2000))
		}
		if i%2 == 0 {
			buf = make([]byte, 0, MaxSize(len(value)))
		}
		data := d.Compress(buf, value)
		if len(data) > MaxSize(len(value)) {
			t.Fatalf("%d bytes compressed to %d, more than %d", len(value), len(data), MaxSize(len(value)))
		}
		out = Decompress(out, d.ID(), data)
		if !bytes.Equal(out, value) {
			t.Fatalf("%d bytes differ after compression", len(value))
		}
	}
}

func TestDictionary_SimilarValues_BecomeSmall(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	d := New(t.Name(), values(rnd, 32), 0.75)
	for _, value := range values(rnd, 100) {
		if data := d.Compress(nil, value); len(data) > len(value)/4 {
			t.Fatalf("%d bytes compressed to %d", len(value), len(data))
		}
	}
}

func TestNew_RandomValues_MakesNone(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	var all [][]byte
	for range 32 {
		all = append(all, random(rnd, 1000))
	}
	if New(t.Name(), all, 0.75) != nil || Lookup(t.Name()) != nil {
		t.Error("a dictionary was made of random values")
	}
	if New(t.Name(), nil, 0.75) != nil || New(t.Name(), values(rnd, 1), 0.75) != nil {
		t.Error("a dictionary was made of too few values")
	}
}

func TestNew_SameName_IsShared(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	d := New(t.Name(), values(rnd, 32), 0.75)
	if New(t.Name(), values(rnd, 32), 0.75) != d || Lookup(t.Name()) != d {
		t.Error("there are two dictionaries of one name")
	}
	if other := New(t.Name()+" other", values(rnd, 32), 0.75); other == nil || other.ID() == d.ID() {
		t.Errorf("dictionaries of two names: %v, %v", d, other)
	}
}

// This test is the last, because it leaves no room for other dictionaries.
func TestNew_TooMany_MakesNone(t *testing.T) {
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	samples := values(rnd, 32)
	names := 0
	for i := range 2 * maxDictionaries {
		if New(fmt.Sprintf("%s %d", t.Name(), i), samples, 0.75) == nil {
			break
		}
		names++
	}
	if names > maxDictionaries || names < maxDictionaries-10 {
		t.Errorf("%d dictionaries were made", names)
	}
	value := samples[0]
	for _, d := range dictionaries.byName {
		if !bytes.Equal(Decompress(nil, d.ID(), d.Compress(nil, value)), value) {
			t.Fatalf("dictionary %d does not return the value", d.ID())
		}
	}
}
