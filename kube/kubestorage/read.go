package kubestorage

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// ErrReadEtcd: memory does not answer this list, etcd does: the revision is older
// than memory, a gate is off, or the resource is not loaded and the page is small.
var ErrReadEtcd = errors.New("to be read from etcd")

// Reading is what a LIST is about: a revision of the resource and the part of it
// that was asked for. It is how bytes are served without making objects first:
//
//	r, err := store.Read(ctx, key, opts)
//	for run := range r.Runs() {
//		for _, e := range run.Items() {
//			data, err := representation.Bytes(ctx, e) // made once per entry
//		}
//	}
//
// It may be read concurrently and keeps its revision alive for as long as it is held.
type Reading struct {
	Snapshot mirror.Snapshot
	// Prefix is the etcd key prefix of the request, to which continue tokens are
	// relative; Start <= key < End are the keys still to be walked.
	Prefix, Start, End string
	// Limit is the number of selected objects asked for, 0 for all.
	Limit int64

	selector selector
	index    *indexed // nil: none helps
	value    string   // to look up in it
}

// Runs yields the entries to be walked in key order, leaf by leaf, before
// selection. See Candidates for a request that an index helps with.
func (r *Reading) Runs() iter.Seq[mirror.Run] { return r.Snapshot.Runs(r.Start, r.End) }

// Candidates yields, in key order, entries among which are all that the request
// selects: those of the index if there is one for the selector, else all of Runs.
func (r *Reading) Candidates() iter.Seq[*mirror.Entry] {
	if r.index != nil {
		return r.index.entries(r.value, r.Start, r.End)
	}
	return r.Snapshot.All(r.Start, r.End)
}

// Count returns the number of Candidates. Cost is O(log n).
func (r *Reading) Count() int {
	if r.index != nil {
		return r.index.count(r.value, r.Start, r.End)
	}
	n, _ := r.Snapshot.Count(r.Start, r.End)
	return n
}

// Selective reports whether Matches has to be asked at all.
func (r *Reading) Selective() bool { return !r.selector.all }

// Matches reports whether the request selects the entry's object. The object is
// decoded if no reader has needed its labels and fields before; the error is that
// of decoding it.
func (r *Reading) Matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	return r.selector.matches(ctx, e)
}

// Read resolves a LIST: it waits for the revision that the options ask for and
// returns it. What each combination of resource version, match, limit and continue
// means is KEP-2340's table and KEP-4988; see Store.snapshot. Errors: ErrReadEtcd,
// and API errors for the client (400, 410, 429, 504).
func (s *Store) Read(ctx context.Context, key string, opts storage.ListOptions) (*Reading, error) {
	prefix, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	exact, start, err := storage.ValidateListOptions(prefix, s.versioner, opts)
	if err != nil {
		return nil, err
	}
	if exact < 0 { // beyond what a revision can reach
		exact = math.MaxInt64
	}
	if !s.resource.Ready() {
		if opts.Predicate.Limit > 0 && opts.Predicate.Empty() {
			return nil, ErrReadEtcd // a small page is cheap for etcd (KEP-4568)
		}
		return nil, s.notReady()
	}
	if !s.fromMemory(opts, exact) {
		return nil, ErrReadEtcd
	}
	snap, err := s.snapshot(ctx, opts, exact)
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		// Older than memory: etcd has it, or knows that it is gone (D7).
		return nil, ErrReadEtcd
	case errors.Is(err, mirror.ErrNotReady):
		return nil, s.notReady()
	case err != nil:
		return nil, err
	}
	r := &Reading{Snapshot: snap, Prefix: prefix, Start: prefix, End: after(prefix), Limit: opts.Predicate.Limit,
		selector: s.view.selector(opts.Predicate)}
	if !opts.Recursive {
		r.End = prefix + "\x00"
	} else if start != "" {
		r.Start = start
	} else if info, ok := request.RequestInfoFrom(ctx); ok && info.Namespace == "" {
		// A field selector for one namespace narrows the first page, but not the
		// following ones, to the keys of the namespace: their tokens are relative
		// to what the client asked for.
		r.Prefix = s.resource.Prefix()
	}
	if opts.ResourceVersion == "0" && exact == 0 && opts.Predicate.Continue == "" {
		r.Limit = 0 // KEP-2340: resource version 0 ignores the limit
	}
	if exact == 0 {
		s.useIndex(ctx, r)
	}
	return r, nil
}

// useIndex narrows a reading of the present to what an index finds. The index may
// be a little newer than the snapshot, which then follows it: the request asked for
// a revision or later.
func (s *Store) useIndex(ctx context.Context, r *Reading) {
	x, value := s.indexFor(r.selector.pred)
	if x == nil {
		return
	}
	cur, err := x.at(ctx, r.Snapshot.Rev)
	if err != nil {
		return // the walk over everything meets the same error and words it
	}
	if snap, err := s.resource.At(cur.rev); err == nil {
		r.Snapshot, r.index, r.value = snap, cur, value
	}
}

// Representation is one way to encode the objects of a store: what an encoder
// makes of an entry is kept on the entry and found by every later reader, of
// whatever revision. Safe for concurrent use.
type Representation struct {
	store   *Store
	encoder runtime.Encoder
	slot    *mirror.Slot
	limit   int64

	used      atomic.Int64 // bytes kept, including those of entries that are gone by now
	recountMu sync.Mutex
	recounted time.Time
}

// encoded is what a Representation keeps on an entry.
type encoded struct{ data []byte }

// recountInterval is how often at most a full representation looks for room.
const recountInterval = time.Second

// NewRepresentation returns a representation that keeps at most limitBytes; what
// does not fit is encoded at each use. Close it when it is of no more use.
func (s *Store) NewRepresentation(encoder runtime.Encoder, limitBytes int64) *Representation {
	return &Representation{store: s, encoder: encoder, slot: &mirror.Slot{}, limit: limitBytes}
}

// Close lets go of the bytes that are kept, as their entries are written to or go.
func (p *Representation) Close() { p.slot.Close() }

// Bytes returns the entry's object as encoded, resource version included. The
// bytes are shared: do not write to them. Cost is a load if they are kept, else
// decoding and encoding the object.
func (p *Representation) Bytes(ctx context.Context, e *mirror.Entry) ([]byte, error) {
	if enc, ok := e.Memo(p.slot).(*encoded); ok {
		return enc.data, nil
	}
	obj, err := p.store.view.decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	if err := p.encoder.Encode(obj, &buf); err != nil {
		return nil, err
	}
	data := bytes.Clone(buf.Bytes()) // without the buffer's spare room
	if p.room(int64(len(data))) && e.SwapMemo(p.slot, nil, &encoded{data}) {
		p.used.Add(int64(len(data)))
	}
	return data, nil
}

// room reports whether n more bytes may be kept. When the bound is reached it
// counts anew: entries that were replaced took their bytes with them.
func (p *Representation) room(n int64) bool {
	if p.used.Load()+n <= p.limit {
		return true
	}
	if !p.recountMu.TryLock() {
		return false
	}
	defer p.recountMu.Unlock()
	if time.Since(p.recounted) < recountInterval {
		return false
	}
	p.recounted = time.Now()
	snap, err := p.store.resource.Latest()
	if err != nil {
		return false
	}
	var used int64
	for e := range snap.All("", "") {
		if enc, ok := e.Memo(p.slot).(*encoded); ok {
			used += int64(len(enc.data))
		}
	}
	p.used.Store(used)
	return used+n <= p.limit
}
