package mirror

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/compress"
)

// compression says which values are compressed.
type compression struct {
	age time.Duration // of the event that superseded a value
	// between two passes over the present entries; a value that is not read in between is
	// compressed
	unread   time.Duration
	minBytes int64 // of a resource, or of a thousand of its superseded values
	minValue int64 // bytes of a value
}

// defaultCompression excludes values that are read, and small ones. A superseded value is read by
// watches that are behind, and by lists that continue; a minute is longer than most of them. A
// present value is read once for each form of its object; lists in cached forms do not read it.
var defaultCompression = compression{age: time.Minute, unread: 2 * time.Minute, minBytes: 1 << 20, minValue: 128}

const (
	// compressedShare is the size of a compressed value, in relation to the value, above which it
	// is left alone.
	compressedShare = 0.75
	// compressorShare bounds the share of a processor that compression takes.
	compressorShare = 0.05
	// compressorRest is the time between two rounds that find nothing more to do.
	compressorRest = 10 * time.Second
	// Bounds of a batch: of its values' bytes, of its values, which the writer installs between two
	// batches of events, and of the entries examined for it.
	compressBytes    = 2 << 20
	compressValues   = 512
	compressExamined = 1 << 15
	// compressSamples is the number of values of which a dictionary is made.
	compressSamples = 32
	// compressRetry is the time until a dictionary is tried again for a resource whose values did
	// not become smaller, such as encrypted ones.
	compressRetry = time.Hour
)

// compressor compresses superseded values, and present ones that are not read. Readers decompress
// them. It examines the versions and logs as readers do, compresses on its own goroutine, and has
// the writer replace the entries' blocks.
type compressor struct {
	*shared
	compression
	resources map[*Resource]*compressing
}

// compressing is the state of the compressor for one resource.
type compressing struct {
	*Resource
	lin        *lineage
	dictionary *compress.Dictionary // nil: not made yet
	retry      time.Time            // when a dictionary is made

	// of the log: its first event in the last round, and the next to be examined
	first, next uint64
	pass        time.Time // when the next pass over the present entries begins
	from        string    // the key at which the present pass continues, "" if there is none
	compressed  int64     // values that the present pass has found compressed
	saves       int64     // the bytes of memory that they save
}

func newCompressor(s *shared, which compression) *compressor {
	return &compressor{shared: s, compression: which, resources: map[*Resource]*compressing{}}
}

// run compresses until ctx ends.
func (c *compressor) run(ctx context.Context) {
	timer := time.NewTimer(compressorRest)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		began := time.Now()
		more, err := c.round(ctx)
		if err != nil {
			return
		}
		rest := compressorRest
		if more {
			rest = time.Duration(float64(time.Since(began)) / compressorShare)
		}
		timer.Reset(rest)
	}
}

// round compresses a batch of each resource, and reports whether there is more to do at once.
func (c *compressor) round(ctx context.Context) (more bool, err error) {
	claimed := c.registry.claimed()
	for r := range c.resources {
		if !slices.Contains(claimed, r) {
			delete(c.resources, r)
		}
	}
	for _, r := range claimed {
		x := c.ofResource(r)
		if x == nil {
			continue
		}
		b := &compressedBatch{compressing: x}
		again := c.superseded(b)
		if c.unreadEntries(b) {
			again = true
		}
		more = more || again
		if len(b.values) == 0 {
			continue
		}
		if err := c.command(ctx, func(w *writer) { w.installCompressed(b) }); err != nil {
			return false, err
		}
	}
	return more, nil
}

// ofResource returns the state for a resource, nil if its values are not compressed.
func (c *compressor) ofResource(r *Resource) *compressing {
	lin := r.lineage.readable()
	x := c.resources[r]
	if x == nil || x.lin != lin {
		x = &compressing{Resource: r, lin: lin, pass: time.Now().Add(c.unread)}
		c.resources[r] = x
		r.counts.compressed.Store(0)
		r.counts.compressionSaves.Store(0)
	}
	if lin == nil {
		return nil
	}
	if x.dictionary == nil && !c.makeDictionary(x) {
		return nil
	}
	return x
}

// makeDictionary gives the resource a dictionary, and reports whether there is one: the resource is
// large enough, and its values become smaller.
func (c *compressor) makeDictionary(x *compressing) bool {
	if time.Now().Before(x.retry) {
		return false
	}
	head := x.lin.head.Load()
	if head == nil || head.tree.Bytes() < c.minBytes && int64(x.lin.log.Len())*1024 < c.minBytes {
		return false
	}
	name := strings.TrimPrefix(x.prefix, c.opts.Prefix)
	if x.dictionary = compress.Lookup(name); x.dictionary == nil {
		x.dictionary = compress.New(name, x.samples(head.tree), compressedShare)
	}
	if x.dictionary == nil {
		x.retry = time.Now().Add(compressRetry)
	}
	return x.dictionary != nil
}

// samples returns values from all over the resource: present ones, or those of events if there are
// more events.
func (x *compressing) samples(present tree) (values [][]byte) {
	add := func(e *Entry) {
		if e != nil && e.size > 0 {
			values = append(values, e.stored(nil))
		}
	}
	if first, events := x.lin.log.First(), x.lin.log.Len(); events > present.Len() {
		for i := range compressSamples {
			if ev := x.lin.log.At(first + uint64(i*events/compressSamples)); ev != nil {
				add(ev.Prev)
			}
		}
		return values
	}
	i, every := 0, max(1, present.Len()/compressSamples)
	for e := range present.All("", "") {
		if i++; i%every == 0 {
			add(e)
		}
	}
	return values
}

// superseded adds values to the batch that events have superseded some time ago, and reports
// whether there may be more of them.
func (c *compressor) superseded(b *compressedBatch) (more bool) {
	x := b.compressing
	log := x.lin.log
	first, end := log.First(), log.End()
	if first < x.first { // restored history was joined
		x.next = first
	}
	x.first, x.next = first, max(x.next, first)
	latest := driver.Now() - int64(c.age)
	for n := 0; x.next < end; n++ {
		ev := log.At(x.next)
		switch {
		case ev == nil || ev.Arrived != 0 && ev.Arrived > latest:
			return false
		case n == compressExamined || b.full():
			return true
		case ev.Prev != nil && c.worthwhile(ev.Prev):
			b.add(ev.Prev, x.next)
		}
		x.next++
	}
	return false
}

// unreadEntries adds present entries to the batch that were not read since the last pass, and
// reports whether the present pass has not ended.
func (c *compressor) unreadEntries(b *compressedBatch) (more bool) {
	x := b.compressing
	head := x.lin.head.Load()
	if head == nil || x.from == "" && time.Now().Before(x.pass) {
		return false
	}
	n := 0
	for e := range head.tree.All(x.from, "") {
		if n++; n == compressExamined || b.full() {
			x.from = strings.Clone(e.Key())
			return true
		}
		if e.marks.Load()&wasRead != 0 && !e.isCompressed() {
			e.marks.And(^uint32(wasRead))
		} else if c.worthwhile(e) {
			b.add(e, 0)
		}
		if e.isCompressed() { // in an earlier batch
			x.compressed++
			x.saves += e.saves()
		}
	}
	x.counts.compressed.Store(x.compressed)
	x.counts.compressionSaves.Store(x.saves)
	x.from, x.compressed, x.saves = "", 0, 0
	x.pass = time.Now().Add(c.unread)
	return false
}

// worthwhile reports whether the entry has a value that may be compressed.
func (c *compressor) worthwhile(e *Entry) bool {
	return int64(e.size) >= c.minValue && e.marks.Load()&incompressible == 0 && !e.isCompressed()
}

// compressedBatch contains compressed values of one lineage.
type compressedBatch struct {
	*compressing
	values []compressedValue
	bytes  int64 // before compression
	buf    []byte
}

// compressedValue is the block with which the writer replaces that of an entry.
type compressedValue struct {
	entry *Entry
	block *byte
	seq   uint64 // of the event that superseded the entry, 0 if it is present
}

func (b *compressedBatch) full() bool {
	return b.bytes >= compressBytes || len(b.values) == compressValues
}

// add compresses the value of an entry.
func (b *compressedBatch) add(e *Entry, seq uint64) {
	b.bytes += int64(e.size)
	b.buf = slices.Grow(b.buf[:0], compress.MaxSize(int(e.size)))
	b.buf = b.dictionary.Compress(b.buf, e.stored(nil))
	if float64(len(b.buf)) > compressedShare*float64(e.size) {
		e.marks.Or(incompressible)
		return
	}
	b.values = append(b.values, compressedValue{e, packedBlock(e.Key(), b.dictionary.ID(), b.buf), seq})
}

// installCompressed replaces blocks of entries by compressed ones, and subtracts from the history
// the memory that this saves. Entries that have changed their place meanwhile are left alone: those
// superseded since, which the history counts, and those whose event was dropped, which it does not
// count any more.
func (w *writer) installCompressed(b *compressedBatch) {
	t := w.tables[b.prefix]
	if t == nil || t.Resource != b.Resource || t.lineage.Load() != b.lin {
		return
	}
	first, present := b.lin.log.First(), b.lin.head.Load().tree
	for _, v := range b.values {
		before := v.entry.footprint()
		if v.seq == 0 {
			if e, ok := present.Get(v.entry.Key()); !ok || e != v.entry {
				continue
			}
			v.entry.block.Store(v.block)
		} else if v.seq >= first {
			v.entry.block.Store(v.block)
			saved := before - v.entry.footprint()
			t.history.bytes -= saved
			w.stats.HistoryBytes.Add(-saved)
		} else {
			continue
		}
		w.stats.CompressedValues.Add(1)
	}
}
