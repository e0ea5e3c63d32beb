package listadmission

import (
	"context"
	"iter"
	goruntime "runtime"
	"sync/atomic"
	"time"
)

// computing is how many lists of this process are encoded or select objects now.
var computing atomic.Int32

const (
	walkAtOnce = 256                   // objects, in about 0.1 ms
	rest       = 50 * time.Microsecond // up to 1 ms if the processor has nothing else to do
)

// Interruptible yields what all yields, to a loop that does not wait for clients. If all processors encode or select, and
// there are others that do, it leaves its own to short requests after each walkAtOnce objects: the Go scheduler would only
// do so after 10 ms, and looks for connections that can be read only when a processor has nothing to do.
func Interruptible[T any](all iter.Seq[T]) iter.Seq[T] {
	return func(yield func(T) bool) {
		computing.Add(1)
		defer computing.Add(-1)
		n := 0
		for v := range all {
			if n++; n%walkAtOnce == 0 && int(computing.Load()) >= max(2, goruntime.GOMAXPROCS(0)) {
				computing.Add(-1) // others need not rest meanwhile
				time.Sleep(rest)
				computing.Add(1)
			}
			if !yield(v) {
				return
			}
		}
	}
}

// encodingTurns returns how many lists of decoded objects may be encoded at the same time: all processors but one. A table or
// YAML of thousands of objects is computed for a second without a pause, so that with one for each processor the scheduler
// would let each short request wait for its time slices.
func encodingTurns() int { return max(1, goruntime.GOMAXPROCS(0)-1) }

// TakeTurn waits until the list may be encoded. Levels take turns, lists of a level are served first come, first served, those
// that have begun before others; exempt levels and small lists never wait. Error: that of ctx.
func (d *Decoded) TakeTurn(ctx context.Context) error {
	if d == nil || d.turn || d.needed <= freeListBytes || d.level.Exempt {
		return nil
	}
	a := d.lists
	a.mu.Lock()
	if a.freeTurns > 0 {
		a.freeTurns--
		a.mu.Unlock()
		d.takeTurn()
		return nil
	}
	granted := make(chan struct{})
	push := d.level.encoding.PushBack
	if d.begun {
		push = d.level.encoding.PushFront
	}
	place := push(granted)
	a.mu.Unlock()
	select {
	case <-granted:
		d.takeTurn()
	case <-ctx.Done():
		a.mu.Lock()
		defer a.mu.Unlock()
		select {
		case <-granted:
			d.takeTurn()
		default:
			d.level.encoding.Remove(place)
			return ctx.Err()
		}
	}
	return nil
}

func (d *Decoded) takeTurn() {
	d.turn = true
	computing.Add(1)
}

// endTurn passes the turn on.
func (d *Decoded) endTurn() {
	if !d.turn {
		return
	}
	d.turn = false
	computing.Add(-1)
	a := d.lists
	a.mu.Lock()
	defer a.mu.Unlock()
	for range a.levels {
		a.nextTurn++
		waiting := &a.levels[a.nextTurn%len(a.levels)].encoding
		if first := waiting.Front(); first != nil {
			close(waiting.Remove(first).(chan struct{}))
			return
		}
	}
	a.freeTurns++
}

// yieldAfter is how long a list waits for its client before it passes its turn on. Most writes end at once; a list that passed its
// turn on at each write would wait for another list each time.
const yieldAfter = 5 * time.Millisecond

// Yield calls f, which may wait for a client, and passes the turn of the list on if that takes longer than yieldAfter.
// Afterwards it has the turn again, unless ctx has ended.
func (d *Decoded) Yield(ctx context.Context, f func()) {
	if !d.turn {
		f()
		return
	}
	passed := make(chan struct{})
	timer := time.AfterFunc(yieldAfter, func() {
		d.endTurn()
		close(passed)
	})
	panicked := true
	defer func() {
		if timer.Stop() {
			return
		}
		<-passed
		if d.begun = true; !panicked {
			_ = d.TakeTurn(ctx) // the next write of a response that is over fails
		}
	}()
	f()
	panicked = false
}
