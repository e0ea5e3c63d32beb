package listadmission

import (
	"context"
	"iter"
	goruntime "runtime"
	"sync/atomic"
	"time"
)

// computing is the number of lists of this process that are being encoded or that select objects.
var computing atomic.Int32

const (
	walkAtOnce = 256                   // objects, in about 0.1 ms
	yieldSleep = 50 * time.Microsecond // up to 1 ms on an otherwise idle processor
)

// Interruptible yields the elements of all, to a loop that does not wait for clients. If all
// processors encode or select, and there is more than one such loop, it sleeps after each
// walkAtOnce objects to leave its processor to short requests: the Go scheduler would preempt it
// only after 10 ms, and polls the network only on an idle processor.
func Interruptible[T any](all iter.Seq[T]) iter.Seq[T] {
	return func(yield func(T) bool) {
		computing.Add(1)
		defer computing.Add(-1)
		n := 0
		for v := range all {
			if n++; n%walkAtOnce == 0 && int(computing.Load()) >= max(2, goruntime.GOMAXPROCS(0)) {
				computing.Add(-1) // other loops need not sleep meanwhile
				time.Sleep(yieldSleep)
				computing.Add(1)
			}
			if !yield(v) {
				return
			}
		}
	}
}

// encodingTurns returns the number of lists of decoded objects that may be encoded concurrently:
// all processors but one. The encoding of a table or YAML of thousands of objects takes a second
// without a pause, so with one for each processor the scheduler would make each short request wait
// for its time slices.
func encodingTurns() int { return max(1, goruntime.GOMAXPROCS(0)-1) }

// TakeTurn waits until the list may be encoded. Levels take turns; lists of a level are served in
// order of arrival, lists that have begun first. Exempt levels and small lists never wait. Error:
// that of ctx.
func (d *Decoded) TakeTurn(ctx context.Context) error {
	if d == nil || d.hasTurn || d.needed <= freeListBytes || d.level.Exempt {
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

// Turn waits for the turn of a list of so many bytes that is encoded while it is written. Such a
// list holds few elements at a time. The caller ends the list. Error: that of ctx.
func (a *Admission) Turn(ctx context.Context, level Level, bytes int64) (*Decoded, error) {
	_, d := a.Begin(ctx, level, Form{})
	d.needed = bytes
	if err := d.TakeTurn(ctx); err != nil {
		d.End()
		return nil, err
	}
	return d, nil
}

func (d *Decoded) takeTurn() {
	d.hasTurn = true
	computing.Add(1)
}

// endTurn passes the turn on.
func (d *Decoded) endTurn() {
	if !d.hasTurn {
		return
	}
	d.hasTurn = false
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

// yieldAfter is how long a list waits for its client before it passes its turn on. Most writes take
// less time; a list that passed its turn on at each write would wait for another list each time.
const yieldAfter = 5 * time.Millisecond

// Yield calls f, which may wait for a client, and passes the turn of the list on if that takes
// longer than yieldAfter. Afterwards it has the turn again, unless ctx has ended.
func (d *Decoded) Yield(ctx context.Context, f func()) {
	if !d.hasTurn {
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
			_ = d.TakeTurn(ctx) // the next write of an ended response fails
		}
	}()
	f()
	panicked = false
}
