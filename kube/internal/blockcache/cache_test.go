package blockcache

import (
	"testing"

	"github.com/stratakube/strata/mirror"
)

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
	c := New(10*(1000+Overhead), 0)
	slot := &mirror.Slot{}
	add := func() *Block { return c.Add(Payload{}, 1000, slot) }
	first := add()
	fill(t, 9, add) // blocks that were just read make no room
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
}

func TestCache_IdleObjectsMakeRoomWithinTheirLimit(t *testing.T) {
	const limit = 10 * (1000 + Overhead)
	c := New(4*limit, limit)
	slot := &mirror.Slot{}
	other := c.Add(Payload{}, 1000, slot)
	add := func() *Block { return c.AddObject(c, 1000, slot) }
	fill(t, 10, add)
	c.idle()
	fill(t, 10, add)
	if other.payload.Load() == nil {
		t.Error("a block of bytes was evicted for objects")
	}
	if n := c.objects.Load(); n > limit {
		t.Errorf("%d bytes of objects are held, want at most %d", n, limit)
	}
}

func TestCache_ManySmallBlocksMakeRoomForALargeOne(t *testing.T) {
	const large = 1 << 20
	c := New(large+Overhead, 0)
	slot := &mirror.Slot{}
	for c.Add(Payload{}, 1000, slot) != nil {
	}
	c.idle()
	if c.Add(Payload{}, large, slot) == nil {
		t.Error("no room was made for a large block")
	}
}

func TestCache_ReleaseClosed(t *testing.T) {
	c := New(1<<20, 1<<20)
	open, closed := &mirror.Slot{}, &mirror.Slot{}
	kept := c.Add(Payload{}, 1000, open)
	c.Add(Payload{}, 1000, closed)
	closed.Close()
	c.ReleaseClosed()
	if late := c.AddObject(c, 1000, closed); late.Load(Unread) != nil {
		t.Error("a block of a closed slot holds its payload")
	}
	if used := c.Stats().Used; used != 1000+Overhead {
		t.Errorf("%d bytes are held, want those of one block", used)
	}
	kept.Unref()
	if s := c.Stats(); s.Used != 0 || c.live.Load() != 0 || c.objects.Load() != 0 {
		t.Errorf("%+v after the last reference is gone", s)
	}
}
