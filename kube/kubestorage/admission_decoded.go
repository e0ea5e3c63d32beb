package kubestorage

import (
	"context"
	"fmt"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// decodedOverhead is what an object costs beside its stored bytes, before both are
// multiplied: its struct, its maps, its row in a table. A guess, of the size of what
// a ConfigMap of one key takes.
const decodedOverhead = 512

// DecodedForm is a form of a list that is made of decoded objects: a table, YAML, indented JSON, or JSON
// and protobuf if upstream's handlers make them. They hold all objects, and what they make of them, until
// the last byte is written. (A list that the read path writes itself holds some leaves of a tree.)
type DecodedForm struct {
	// Factor is what the form holds, as a multiple of the stored bytes of its objects and of their
	// overhead.
	Factor int64
	// Plain: the list is never refused as too large. Clients that need all of a collection, such as
	// informers, cannot ask for another form.
	Plain bool
}

// Begin returns the context of a request whose list of decoded objects is admitted when its size is
// known: before anything is decoded, or, with a selector, as objects are selected. End the list after the
// handler has returned.
func (a *ListAdmission) Begin(ctx context.Context, level PriorityLevel, form DecodedForm) (context.Context, *DecodedList) {
	a.mu.Lock()
	d := &DecodedList{lists: a, level: a.levelLocked(level), form: form}
	a.mu.Unlock()
	return context.WithValue(ctx, decodedKey{}, d), d
}

// DecodedBytes estimates what a list of so many objects and stored bytes holds.
func DecodedBytes(objects int, storedBytes, factor int64) int64 {
	return factor * (storedBytes + int64(objects)*decodedOverhead)
}

type decodedKey struct{}

// DecodedList is a list of decoded objects under way; a nil one is unbounded. Its methods but Held are called by one
// goroutine, that of the request's handler.
type DecodedList struct {
	lists  *ListAdmission
	level  *levelLists
	form   DecodedForm
	held   atomic.Int64 // taken; read by others
	needed int64        // so far
	turn   bool         // see takeTurn
}

func decodedListOf(ctx context.Context) *DecodedList {
	d, _ := ctx.Value(decodedKey{}).(*DecodedList)
	return d
}

// take waits for room for a list of so many objects. Errors: 429 if there is none in time, 413
// if there can be none.
func (d *DecodedList) take(ctx context.Context, objects int, storedBytes int64) error {
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
	d.held.Add(more)
	return nil
}

// grow is take for one object more, which does not wait: what is held may be what others wait for.
func (d *DecodedList) grow(storedBytes int64) error {
	if d == nil {
		return nil
	}
	more, err := d.more(1, storedBytes)
	if more == 0 || err != nil {
		return err
	}
	more = max(more, min(freeListBytes, d.lists.largest()-d.held.Load())) // not for each object anew
	if !d.lists.tryAcquire(d.level, more, true, true) {
		return d.refuse()
	}
	d.held.Add(more)
	return nil
}

// more returns how many bytes are to be taken.
func (d *DecodedList) more(objects int, storedBytes int64) (int64, error) {
	d.needed += DecodedBytes(objects, storedBytes, d.form.Factor)
	held := d.held.Load()
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
	return 0, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("this list would take about %d MiB of the server's memory in the form that was asked for, "+
		"of which it may take %d; ask for it in pages (limit), or as plain JSON or protobuf", d.needed>>20, largest>>20))
}

func (d *DecodedList) refuse() error {
	d.lists.mu.Lock()
	defer d.lists.mu.Unlock()
	return d.lists.refuseLocked(d.level)
}

// Held returns how many bytes the list holds now. It may be called concurrently.
func (d *DecodedList) Held() int64 { return d.held.Load() }

// End gives back the bytes and the turn of the list.
func (d *DecodedList) End() {
	d.endTurn()
	d.lists.release(d.level, d.held.Swap(0))
}

// admit takes what the reading will hold, if that is known; see DecodedList.grow for one that is
// selective, and admitPast for one that is read from etcd.
func (d *DecodedList) admit(ctx context.Context, r *Reading) error {
	if d == nil || r.Selective() || r.FromEtcd() {
		return nil
	}
	n, bytes := r.Objects().Count(r.Start, r.End)
	n, bytes = pageShare(n, bytes, r.Limit)
	return d.take(ctx, n, bytes)
}

// admitPast admits a list that is read from etcd, by what its range is now, before anything of it is read.
func admitPast(ctx context.Context, s *Store, r *Reading) error {
	held, err := s.resource.Latest()
	if err != nil {
		return s.notReady()
	}
	n, bytes := held.Count(r.Start, r.End)
	if r.Selective() {
		bytes = min(bytes, 2*pastKeep) // what such a list holds at most
	} else {
		n, bytes = pageShare(n, bytes, r.Limit)
	}
	if d := decodedListOf(ctx); d != nil && !r.Selective() {
		return d.take(ctx, n, bytes)
	}
	if admit, ok := ctx.Value(admitKey{}).(func(int64) error); ok {
		return admit(bytes)
	}
	return nil
}

// admitEtcd is admit for a list that upstream's store answers.
func (d *DecodedList) admitEtcd(ctx context.Context, s *Store, q listRequest) error {
	if d == nil || !q.opts.Predicate.Empty() {
		return nil
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil // only small pages are read while a resource is not loaded
	}
	start, end := q.bounds()
	n, bytes := snap.Count(start, end)
	n, bytes = pageShare(n, bytes, q.limit())
	return d.take(ctx, n, bytes)
}

// pageShare returns what a page of at most limit objects has of all of them.
func pageShare(objects int, bytes, limit int64) (int, int64) {
	if 0 < limit && limit < int64(objects) {
		return int(limit), int64(float64(bytes) / float64(objects) * float64(limit))
	}
	return objects, bytes
}
