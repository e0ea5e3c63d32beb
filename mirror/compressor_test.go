package mirror_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/internal/compress"
)

// makeDictionary makes the dictionary of a resource, whatever the values are that a test will
// write.
func makeDictionary(t *testing.T, prefix string) {
	t.Helper()
	var samples [][]byte
	for i := range 32 {
		samples = append(samples, []byte(strings.Repeat(fmt.Sprint(i), 100)))
	}
	if compress.New(strings.TrimPrefix(prefix, root), samples, 1) == nil {
		t.Fatal("no dictionary")
	}
}

// similarValue returns a value of a KB that has a tenth of its bytes for itself.
func similarValue(i, variant int) string {
	random := rand.New(rand.NewPCG(uint64(i), uint64(variant)))
	text := fmt.Sprintf(`{"name":"object-%d","uid":"`, i)
	for range 10 {
		text += fmt.Sprintf("%08x", random.Uint32())
	}
	return text + `","spec":` + strings.Repeat(`{"a field with a long name":"and a value"},`, 22) + `}`
}

// compressed is a mirror of one resource, in a bubble.
type compressed struct {
	*model
	m *mirror.Mirror
	r *mirror.Resource
}

const compressedObjects = 1500

func newCompressed(t *testing.T, window time.Duration, value func(i int) string) *compressed {
	t.Helper()
	c := &compressed{model: newModel()}
	var all []memory.Op
	for i := range compressedObjects {
		all = append(all, memory.Op{Key: compressedKey(i), Value: value(i)})
	}
	c.txn(all...)
	var err error
	if c.m, err = mirror.New(mirror.Options{Prefix: root, Source: c.store, Logger: quiet(), Window: mirror.Window{MaxAge: window}}); err != nil {
		t.Fatal(err)
	}
	if c.r, err = c.m.Claim(root + "a/"); err != nil {
		t.Fatal(err)
	}
	testcheck.NoError(t, c.r.WaitReady(context.Background()))
	return c
}

func compressedKey(i int) string { return fmt.Sprintf("%sa/%05d", root, i) }

// count returns how many present values are compressed.
func (c *compressed) count(t *testing.T) (n int) {
	t.Helper()
	s, err := c.r.Latest()
	testcheck.NoError(t, err)
	for e := range s.All("", "") {
		if e.Compressed() {
			n++
		}
	}
	return n
}

// requireSame fails unless the resource is as etcd was at the revision.
func (c *compressed) requireSame(t *testing.T, rev mirror.Revision) {
	t.Helper()
	s, err := c.r.At(rev)
	testcheck.NoError(t, err)
	if got, want := read(s), c.want(rev, root+"a/"); !maps.Equal(got, want) {
		t.Fatalf("at %d: %s", rev, diff(got, want))
	}
	testcheck.NoError(t, c.m.Check())
}

func TestCompressor_UnreadValues_AreCompressed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCompressed(t, 5*time.Minute, func(i int) string { return similarValue(i, 0) })
		defer c.m.Close()
		for range 10 {
			time.Sleep(time.Minute)
			s, err := c.r.Latest()
			testcheck.NoError(t, err)
			for i := range 100 {
				if e, ok := s.Get(compressedKey(i)); !ok || len(e.Value()) == 0 {
					t.Fatal("a value is missing")
				}
			}
		}
		if n := c.count(t); n != compressedObjects-100 {
			t.Errorf("%d of %d values are compressed, 100 of which are read every minute", n, compressedObjects)
		}
		st := c.r.Stats()
		if st.Compressed != compressedObjects-100 || st.CompressionSaves < st.Bytes/2 || st.CompressionSaves > st.Bytes {
			t.Errorf("counted %d compressed values that save %d of %d bytes", st.Compressed, st.CompressionSaves, st.Bytes)
		}
		c.requireSame(t, c.store.Revision())
		// A value that is written again is not compressed, as long as it is new.
		c.txn(memory.Op{Key: compressedKey(200), Value: similarValue(200, 1)})
		synctest.Wait()
		if n := c.count(t); n != compressedObjects-101 {
			t.Errorf("%d values are compressed after a write", n)
		}
		c.requireSame(t, c.store.Revision())
		c.requireSame(t, c.store.Revision()-1)
	})
}

func TestCompressor_SupersededValues_AreCompressed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newCompressed(t, 5*time.Minute, func(i int) string { return similarValue(i, 0) })
		defer c.m.Close()
		began := c.store.Revision()
		for i := 0; i < compressedObjects; i += 10 {
			var ops []memory.Op
			for k := i; k < i+10; k++ {
				ops = append(ops, memory.Op{Key: compressedKey(k), Value: similarValue(k, 1), Delete: k == i})
			}
			c.txn(ops...)
		}
		synctest.Wait()
		before := c.m.Stats().HistoryBytes
		time.Sleep(90 * time.Second)
		after := c.m.Stats().HistoryBytes
		if after > before/2 {
			t.Errorf("the history has %d bytes, and had %d before it was compressed", after, before)
		}
		if n := c.count(t); n != 0 {
			t.Errorf("%d present values are compressed after 90 seconds", n)
		}
		for rev := began; rev <= c.store.Revision(); rev += mirror.Revision(testrace.Count(7, 31)) {
			c.requireSame(t, rev)
		}
		// The window drops what the history has counted.
		time.Sleep(10 * time.Minute)
		if bytes := c.m.Stats().HistoryBytes; bytes != 0 {
			t.Errorf("%d bytes of history after the window", bytes)
		}
		c.requireSame(t, c.store.Revision())
	})
}

func TestCompressor_RandomValues_StayAsTheyAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCompressed(t, 5*time.Minute, func(i int) string {
			random := rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)})
			b := make([]byte, 1000)
			random.Read(b)
			return string(b)
		})
		defer c.m.Close()
		r, err := c.m.Claim(root + "encrypted/") // a name without a dictionary
		testcheck.NoError(t, err)
		defer r.Release()
		var ops []memory.Op
		for i := range 2000 {
			b := make([]byte, 1000)
			rand.NewChaCha8([32]byte{byte(i), byte(i >> 8), 1}).Read(b)
			ops = append(ops, memory.Op{Key: fmt.Sprintf("%sencrypted/%d", root, i), Value: string(b)})
		}
		c.txn(ops...)
		time.Sleep(time.Hour)
		if n := c.m.Stats().CompressedValues; n != 0 {
			t.Errorf("%d values are compressed", n)
		}
		c.requireSame(t, c.store.Revision())
	})
}

func TestCompressor_ConcurrentReaders_ReadTheSameValues(t *testing.T) {
	makeDictionary(t, root+"a/")
	c := newCompressed(t, 5*time.Minute, func(i int) string { return similarValue(i, 0) })
	defer c.m.Close()
	s, err := c.r.Latest()
	testcheck.NoError(t, err)
	done := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			var buf []byte
			for i := 0; ; i = (i + 1) % compressedObjects {
				select {
				case <-done:
					return
				default:
				}
				e, ok := s.Get(compressedKey(i))
				if !ok || e.Key() != compressedKey(i) || !bytes.Equal(e.ValueIn(&buf), []byte(similarValue(i, 0))) {
					t.Error("a value has changed")
					return
				}
			}
		})
	}
	for i := 0; c.m.CompressAll() < compressedObjects || i < 20; i++ {
		var ops []memory.Op
		for k := range 50 { // some are superseded meanwhile
			ops = append(ops, memory.Op{Key: compressedKey(k), Value: similarValue(k, i+1)})
		}
		c.txn(ops...)
	}
	close(done)
	readers.Wait()
	c.requireSame(t, s.Rev)
	// More than a batch of them is left.
	var ops []memory.Op
	for i := range compressedObjects {
		ops = append(ops, memory.Op{Key: compressedKey(i), Value: similarValue(i, 1)})
	}
	c.txn(ops...)
	testcheck.NoError(t, c.m.Wait(t.Context(), c.store.Revision()))
	if c.m.CompressAll(); c.count(t) != compressedObjects {
		t.Errorf("%d of %d values are compressed", c.count(t), compressedObjects)
	}
}

// TestCompressor_ChangeMeanwhile_IsCounted: between the compression of values and its installation,
// their place in the history changes.
func TestCompressor_ChangeMeanwhile_IsCounted(t *testing.T) {
	makeDictionary(t, root+"a/")
	for name, meanwhile := range map[string]func(t *testing.T, c *compressed){
		"superseded": func(t *testing.T, c *compressed) {
			for i := range 500 {
				c.txn(memory.Op{Key: compressedKey(i), Value: similarValue(i, 2), Delete: i%2 == 0})
			}
		},
		"dropped by the window": func(*testing.T, *compressed) { time.Sleep(45 * time.Second) },
		"divided by a claim": func(t *testing.T, c *compressed) {
			inner, err := c.m.Claim(root + "a/inner/")
			testcheck.NoError(t, err)
			testcheck.NoError(t, inner.WaitReady(context.Background()))
		},
		"released and claimed": func(t *testing.T, c *compressed) {
			c.r.Release()
			var err error
			if c.r, err = c.m.Claim(root + "a/"); err != nil {
				t.Fatal(err)
			}
			testcheck.NoError(t, c.r.WaitReady(context.Background()))
		},
		"listed again": func(t *testing.T, c *compressed) {
			c.store.Stall(true)
			c.txn(memory.Op{Key: compressedKey(0), Value: similarValue(0, 2)})
			c.store.Compact(c.store.Revision())
			c.store.Break()
			c.store.Stall(false)
			time.Sleep(time.Minute)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCompressed(t, 40*time.Second, func(i int) string { return similarValue(i, 0) })
				defer c.m.Close()
				for i := range 100 {
					c.txn(memory.Op{Key: compressedKey(i), Value: similarValue(i, 1)},
						memory.Op{Key: fmt.Sprintf("%sa/inner/%d", root, i/2), Value: similarValue(i, i)})
				}
				synctest.Wait()
				if n := c.m.CompressMeanwhile(func() {
					meanwhile(t, c)
					synctest.Wait()
				}); n < mirror.CompressValues {
					t.Fatalf("%d values were compressed", n)
				}
				if err := c.m.Check(); err != nil {
					t.Error(err)
				}
				// What is counted is subtracted when the window drops it.
				time.Sleep(20 * time.Minute)
				if n := c.m.Stats().HistoryBytes; n != 0 {
					t.Errorf("%d bytes of history after the window", n)
				}
				if err := c.m.Check(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}
