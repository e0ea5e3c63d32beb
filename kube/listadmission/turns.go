package listadmission

import (
	"context"
	goruntime "runtime"
)

// encodingTurns returns how many lists of decoded objects may be encoded at the same time: all processors but one. A table or
// YAML of thousands of objects is computed for a second without a pause, so that with one for each processor the scheduler
// would let each short request wait for its time slices.
func encodingTurns() int { return max(1, goruntime.GOMAXPROCS(0)-1) }

// TakeTurn waits until the list may be encoded. Levels take turns, lists of a level are served first come, first served; exempt
// levels and small lists never wait. Error: that of ctx.
func (d *Decoded) TakeTurn(ctx context.Context) error {
	if d == nil || d.turn || d.needed <= freeListBytes || d.level.Exempt {
		return nil
	}
	a := d.lists
	a.mu.Lock()
	if a.freeTurns > 0 {
		a.freeTurns--
		a.mu.Unlock()
		d.turn = true
		return nil
	}
	granted := make(chan struct{})
	place := d.level.encoding.PushBack(granted)
	a.mu.Unlock()
	select {
	case <-granted:
		d.turn = true
	case <-ctx.Done():
		a.mu.Lock()
		defer a.mu.Unlock()
		select {
		case <-granted:
			d.turn = true
		default:
			d.level.encoding.Remove(place)
			return ctx.Err()
		}
	}
	return nil
}

// endTurn passes the turn on.
func (d *Decoded) endTurn() {
	if !d.turn {
		return
	}
	d.turn = false
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

// Yield calls f, which waits for a client, without the turn of the list, and takes it again unless last: nothing is left to
// be encoded.
func (d *Decoded) Yield(ctx context.Context, last bool, f func()) {
	had := d.turn
	d.endTurn()
	f()
	if had && !last {
		_ = d.TakeTurn(ctx) // the next write of a response that is over fails
	}
}
