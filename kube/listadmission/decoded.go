package listadmission

import (
	"context"
	"fmt"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// decodedOverhead is the memory of an object beside its stored bytes, before both are multiplied:
// its struct, its maps, its row in a table. A guess, about the size of a ConfigMap with one key.
const decodedOverhead = 512

// Form is a form of a list that is made of decoded objects: a table, YAML, indented JSON, or JSON
// and protobuf made by upstream's handlers. Such a list holds all objects, and its output, until
// the last byte is written. (A list that the read path writes itself holds some leaves of a tree.)
type Form struct {
	// Factor is the memory of the form, as a multiple of the stored bytes of its objects and of
	// their overhead.
	Factor int64
	// Plain: the list is never refused as too large. Clients that need a whole collection, such as
	// informers, cannot use another form.
	Plain bool
}

// Begin returns the context of a request whose list of decoded objects is admitted when its size is
// known: before the first object is decoded, or, with a selector, as objects are selected. End the
// list after the handler has returned.
func (a *Admission) Begin(ctx context.Context, level Level, form Form) (context.Context, *Decoded) {
	a.mu.Lock()
	d := &Decoded{lists: a, level: a.levelLocked(level), form: form}
	d.level.pins++
	a.mu.Unlock()
	return context.WithValue(ctx, decodedKey{}, d), d
}

// decodedBytes estimates the memory of a list with so many objects and stored bytes.
func decodedBytes(objects int, storedBytes, factor int64) int64 {
	return factor * (storedBytes + int64(objects)*decodedOverhead)
}

type decodedKey struct{}

// Decoded is a list of decoded objects in flight; a nil one is unbounded. Its methods except Held
// are called by one goroutine, that of the request's handler.
type Decoded struct {
	lists    *Admission
	level    *levelLists
	form     Form
	acquired atomic.Int64 // taken; read by others
	needed   int64        // so far
	hasTurn  bool         // see TakeTurn
	begun    bool         // has passed a turn on
}

// DecodedOf returns the list that Begin has put into a context, nil if there is none.
func DecodedOf(ctx context.Context) *Decoded {
	d, _ := ctx.Value(decodedKey{}).(*Decoded)
	return d
}

// Take waits for room for a list of so many objects. Errors: 429 if there is none in time, 413 if
// the list can never fit.
func (d *Decoded) Take(ctx context.Context, objects int, storedBytes int64) error {
	if d == nil {
		return nil
	}
	more, err := d.more(objects, storedBytes)
	if more == 0 || err != nil {
		return err
	}
	if err := d.lists.acquire(ctx, d.level, more, true); err != nil {
		return err
	}
	d.acquired.Add(more)
	return nil
}

// Grow is Take for one more object. It does not wait, because other lists may be waiting for the
// room that this list holds.
func (d *Decoded) Grow(storedBytes int64) error {
	if d == nil {
		return nil
	}
	more, err := d.more(1, storedBytes)
	if more == 0 || err != nil {
		return err
	}
	// in steps, not per object
	more = max(more, min(freeListBytes, d.lists.largest()-d.acquired.Load()))
	if !d.lists.tryAcquire(d.level, more, true, true) {
		return d.refuse()
	}
	d.acquired.Add(more)
	return nil
}

// more adds a list of so many objects to d.needed, and returns the number of bytes that must be
// acquired in addition to those held: 0 if they suffice or the list is small. Error: 413, counted,
// if the list can never fit and its form is not Plain.
func (d *Decoded) more(objects int, storedBytes int64) (int64, error) {
	d.needed += decodedBytes(objects, storedBytes, d.form.Factor)
	held := d.acquired.Load()
	if d.needed <= freeListBytes || d.needed <= held {
		return 0, nil
	}
	largest := d.lists.largest()
	if d.needed <= largest {
		return d.needed - held, nil
	}
	if d.form.Plain {
		return largest - held, nil
	}
	d.lists.mu.Lock()
	defer d.lists.mu.Unlock()
	d.level.refused[refusedTooLarge]++
	return 0, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("list needs about %d MiB of server memory in the requested encoding, the limit is %d MiB; "+
		"use pagination (limit), or request plain JSON or protobuf", d.needed>>20, largest>>20))
}

func (d *Decoded) refuse() error {
	d.lists.mu.Lock()
	defer d.lists.mu.Unlock()
	return d.lists.refuseLocked(d.level)
}

// Held returns the bytes that the list holds now. It may be called concurrently.
func (d *Decoded) Held() int64 { return d.acquired.Load() }

// End releases the bytes and the turn of the list. It is called once.
func (d *Decoded) End() {
	d.endTurn()
	d.lists.release(d.level, d.acquired.Swap(0))
	d.lists.mu.Lock()
	d.level.pins--
	d.lists.mu.Unlock()
}
