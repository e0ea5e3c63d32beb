package blockcache

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/mirror/memo"
)

// check returns an error if the counters of the cache disagree with its blocks: used is the bytes
// of the blocks with a payload plus outside, the bytes reserved or charged, objects those of
// decoded objects, live their number. A block with a payload is in the ring exactly once. No method
// may be running.
func (c *Cache) check(outside int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	used, objects, live := outside, int64(0), int64(0)
	seen := map[*Block]bool{}
	for _, b := range c.ring {
		if seen[b] {
			return fmt.Errorf("a block is in the ring twice")
		}
		seen[b] = true
		if b.payload.Load() == nil {
			continue
		}
		if b.refs.Load() <= 0 {
			return fmt.Errorf("a block without references has a payload of %d bytes", b.size)
		}
		if b.memoKey.Closed() {
			return fmt.Errorf("a block of a closed memoKey has a payload of %d bytes", b.size)
		}
		live++
		used += b.size
		if b.object {
			objects += b.size
		}
	}
	if c.used.Load() != used || c.objects.Load() != objects || c.live.Load() != live {
		return fmt.Errorf("counted %d bytes, %d of objects, %d blocks; held %d, %d, %d",
			c.used.Load(), c.objects.Load(), c.live.Load(), used, objects, live)
	}
	return nil
}

func (c *Cache) requireCheck(t interface{ Fatal(...any) }, outside int64) {
	if err := c.check(outside); err != nil {
		t.Fatal(err)
	}
}

// TestCache_RandomCalls_CountersEqualBlocks calls all methods at random. After each, the counters
// agree with the blocks, and only charges may exceed the limit.
func TestCache_RandomCalls_CountersEqualBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit, objectLimit = 50_000, 20_000
		c := New(limit, limit, objectLimit)
		memoKeys := []*memo.Key{{}, {}}
		var refs []*Block // one element for each reference
		var charged int64
		held := func(b *Block) {
			if b != nil {
				refs = append(refs, b)
			}
		}
		size := func(t *rapid.T) int64 { return rapid.Int64Range(0, 4000).Draw(t, "size") }
		memoKey := func(t *rapid.T) *memo.Key { return rapid.SampledFrom(memoKeys).Draw(t, "memoKey") }
		t.Repeat(map[string]func(*rapid.T){
			"add":        func(t *rapid.T) { held(c.Add(Payload{}, size(t), memoKey(t))) },
			"add object": func(t *rapid.T) { held(c.AddObject(c, size(t), memoKey(t))) },
			"reserve and fill": func(t *rapid.T) {
				if n := size(t); c.Reserve(n) {
					c.requireCheck(t, charged+n+overhead)
					held(c.Fill(Payload{}, n, memoKey(t)))
				}
			},
			"ref": func(t *rapid.T) {
				if len(refs) > 0 {
					b := rapid.SampledFrom(refs).Draw(t, "block")
					b.Ref()
					refs = append(refs, b)
				}
			},
			"unref": func(t *rapid.T) {
				if len(refs) > 0 {
					i := rapid.IntRange(0, len(refs)-1).Draw(t, "i")
					refs[i].Unref()
					refs[i] = refs[len(refs)-1]
					refs = refs[:len(refs)-1]
				}
			},
			"charge": func(t *rapid.T) {
				n := max(rapid.Int64Range(-10_000, 10_000).Draw(t, "bytes"), -charged)
				c.Charge(n)
				charged += n
			},
			"room":  func(t *rapid.T) { c.HasRoom(size(t)) },
			"idle":  func(*rapid.T) { c.idle() },
			"flush": func(*rapid.T) { c.flush() },
			"close": func(t *rapid.T) {
				i := rapid.IntRange(0, len(memoKeys)-1).Draw(t, "memoKey")
				memoKeys[i].Close()
				c.ReleaseClosed()
				memoKeys[i] = &memo.Key{}
			},
			"": func(t *rapid.T) {
				c.requireCheck(t, charged)
				if n := c.objects.Load(); n > objectLimit {
					t.Fatalf("%d bytes of objects, want at most %d", n, objectLimit)
				}
			},
		})
	})
}

// flush drops all payloads.
func (c *Cache) flush() { c.releaseIf(func(*Block) bool { return true }) }

// TestCache_ConcurrentUse_CountersEqualBlocks adds, reads and releases blocks on some
// goroutines while others flush.
func TestCache_ConcurrentUse_CountersEqualBlocks(t *testing.T) {
	c := New(100_000, 100_000, 40_000)
	memoKey := &memo.Key{}
	var wg sync.WaitGroup
	for i := range 4 {
		rnd := rand.New(rand.NewPCG(1, uint64(i)))
		wg.Go(func() {
			for range 2000 {
				n := rnd.Int64N(4000)
				b := c.Add(Payload{}, n, memoKey)
				if rnd.IntN(2) == 0 {
					if o := c.AddObject(c, n, memoKey); o != nil && rnd.IntN(2) == 0 {
						o.Unref()
					}
				}
				if b == nil {
					continue
				}
				b.Load(c.Now())
				if rnd.IntN(2) == 0 {
					b.Unref()
				}
				if rnd.IntN(100) == 0 {
					c.flush()
				}
			}
		})
	}
	wg.Wait()
	c.requireCheck(t, 0)
}

// idle makes all blocks idle.
func (c *Cache) idle() { c.start = c.start.Add(-2 * idleTime) }

// fill adds blocks until one is refused, and fails unless there was room for n.
func fill(t *testing.T, n int, add func() *Block) {
	t.Helper()
	for range n {
		if add() == nil {
			t.Fatal("refused although there is room")
		}
	}
	if add() != nil {
		t.Fatal("added although there is no room")
	}
}

func TestCache_IdleBlocksMakeRoom(t *testing.T) {
	c := New(10*(1000+overhead), 10*(1000+overhead), 0)
	memoKey := &memo.Key{}
	add := func() *Block { return c.Add(Payload{}, 1000, memoKey) }
	first := add()
	fill(t, 9, add) // blocks that were just read are not evicted
	if n := c.Stats().Refusals; n != 1 {
		t.Errorf("%d refusals, want 1", n)
	}
	c.idle()
	first.Load(c.Now())
	fill(t, 9, add)
	if first.payload.Load() == nil {
		t.Error("a block was evicted although it was just read")
	}
	if s := c.Stats(); s.Used > s.Limit {
		t.Errorf("%d bytes are held, want at most %d", s.Used, s.Limit)
	}
	first.read.Store(c.Now() + 1) // read during the search
	if add() != nil || first.payload.Load() == nil {
		t.Error("a block was evicted although it was read during the search")
	}
	c.requireCheck(t, 0)
}

func TestCache_IdleObjectsMakeRoomWithinTheirLimit(t *testing.T) {
	const limit = 10 * (1000 + overhead)
	c := New(4*limit, 4*limit, limit)
	memoKey := &memo.Key{}
	other := c.Add(Payload{}, 1000, memoKey)
	add := func() *Block { return c.AddObject(c, 1000, memoKey) }
	fill(t, 10, add)
	c.idle()
	fill(t, 10, add)
	if other.payload.Load() == nil {
		t.Error("a block of bytes was evicted for objects")
	}
	if n := c.objects.Load(); n > limit {
		t.Errorf("%d bytes of objects are held, want at most %d", n, limit)
	}
	c.requireCheck(t, 0)
}

func TestCache_LargeBlock_EvictsManySmallOnes(t *testing.T) {
	const large = 1 << 20
	c := New(large+overhead, large+overhead, 0)
	memoKey := &memo.Key{}
	for c.Add(Payload{}, 1000, memoKey) != nil {
	}
	c.idle()
	if c.Add(Payload{}, large, memoKey) == nil {
		t.Error("no block was evicted for a large block")
	}
	c.requireCheck(t, 0)
}

func TestCache_ReleaseClosed_ReleasesBlocksOfClosedKeys(t *testing.T) {
	c := New(1<<20, 1<<20, 1<<20)
	open, closed := &memo.Key{}, &memo.Key{}
	kept := c.Add(Payload{}, 1000, open)
	c.Add(Payload{}, 1000, closed)
	closed.Close()
	c.ReleaseClosed()
	if late := c.AddObject(c, 1000, closed); late.Load(Unread) != nil {
		t.Error("a block of a closed memoKey holds its payload")
	}
	if used := c.Stats().Used; used != 1000+overhead {
		t.Errorf("%d bytes are held, want those of one block", used)
	}
	kept.Unref()
	if s := c.Stats(); s.Used != 0 || c.live.Load() != 0 || c.objects.Load() != 0 {
		t.Errorf("%+v after the release of the last reference", s)
	}
	c.requireCheck(t, 0)
}

// TestCache_BeyondRest_DropsBlocksWithinMinute: blocks beyond the size at rest are dropped within a
// minute after their last read, those within it stay, and so do blocks that are read.
func TestCache_BeyondRest_DropsBlocksWithinMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 1000 - overhead
		key := &memo.Key{}
		c := New(100_000, 20_000, 0)
		var blocks []*Block
		for range 100 {
			blocks = append(blocks, c.Add(Payload{Data: []byte("x")}, size, key))
		}
		time.Sleep(40 * time.Second)
		if used := c.Stats().Used; used != 100_000 {
			t.Errorf("after 40 seconds %d bytes are used, want all", used)
		}
		for range 10 { // half of them are read every 10 seconds
			for _, b := range blocks[50:] {
				b.Load(c.Now())
			}
			time.Sleep(10 * time.Second)
		}
		if used := c.Stats().Used; used != 50_000 {
			t.Errorf("%d bytes are used, want those of the blocks that were read", used)
		}
		for _, b := range blocks[50:] {
			if b.Load(Unread) == nil {
				t.Fatal("a block that was read was dropped")
			}
		}
		time.Sleep(time.Minute)
		if used := c.Stats().Used; used != 20_000 {
			t.Errorf("at rest %d bytes are used, want 20,000", used)
		}
		if c.trimming.Load() {
			t.Error("a search is scheduled at rest")
		}
	})
}
