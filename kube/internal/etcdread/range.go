package etcdread

import (
	"context"
	"errors"
	"iter"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// Reader is the etcd that lists at old revisions are read from.
type Reader struct {
	Places Places      // one for each page
	Ranges clientv3.KV // responses are no larger than a page may be
	Mirror *mirror.Mirror
	Group  schema.GroupResource // of metrics
	// Keep bounds the bytes of objects that are not in memory and that a list keeps until it is
	// written; with more, its pages are read again for the write. An unchanged object is shared
	// with memory and costs a pointer.
	Keep int64
}

// Range is a range of keys at a revision that is older than memory but not compacted, read from
// etcd page by page (D7, I7). It holds at most one page and Reader.Keep, for a range of any length.
// Not safe for concurrent use.
type Range struct {
	source  Reader
	ctx     context.Context
	held    mirror.Snapshot // for sharing entries
	maxKeys int64           // keys wanted, 0 for all
	count   int64           // keys in the range

	first *etcdsource.Pager // at the first page
	next  *etcdsource.Pager // continues after kept
	kept  []mirror.Run      // from the first on
	taken int64             // keys in kept
	// bytes in kept that are not shared with the cache; above Reader.Keep kept is dropped
	own int64
	err error // the first one met
}

// Open reads the first page of the keys with start <= key < end at rev; most is the number of keys
// to read, 0 for all. Entries that are in held are shared with it. Pages are read with ctx. Errors:
// 504 without a place, mirror.ErrCompacted, mirror.ErrRestored, and those of the client of etcd.
func (s Reader) Open(ctx context.Context, held mirror.Snapshot, start, end string, rev mirror.Revision, maxKeys int64) (*Range, error) {
	pager := etcdsource.NewPager(s.Ranges, start, end, rev)
	if n, bytes := held.Count(start, end); n > 0 {
		pager.HintValueBytes(bytes / int64(n)) // as large as the current values
	}
	p := &Range{source: s, ctx: ctx, held: held, maxKeys: maxKeys, next: pager}
	again := *pager
	p.first = &again
	page, err := p.fetch(p.next, maxKeys)
	if err != nil {
		return nil, err
	}
	p.count = page.Count
	runs, own := p.cut(page)
	p.keep(runs, len(page.KVs), own)
	return p, nil
}

// Context returns the context that pages are read with.
func (p *Range) Context() context.Context { return p.ctx }

// Count returns the number of keys in the range.
func (p *Range) Count() int { return int(p.count) }

// Err returns the error that ended Runs early, nil if there was none. Errors are those of Open.
func (p *Range) Err() error { return p.err }

// fetch reads a page when there is a place for it. The place is released before the page is written
// to a client.
func (p *Range) fetch(pager *etcdsource.Pager, most int64) (etcdsource.Page, error) {
	select {
	case p.source.Places <- struct{}{}:
		defer func() { <-p.source.Places }()
	case <-p.ctx.Done():
		return etcdsource.Page{}, apierrors.NewTimeoutError("too many lists are waiting for etcd", retrySeconds)
	}
	began := time.Now()
	page, err := pager.Next(p.ctx, most)
	etcdmetrics.RecordEtcdRequest("list", p.source.Group, err, began)
	request.TrackStorageLatency(p.ctx, time.Since(began))
	if err == nil && page.Header.ClusterID != p.source.Mirror.Cluster() {
		err = mirror.ErrRestored
	}
	return page, err
}

// runEntries is the number of entries of a run: that of a leaf, because readers hold the items of a
// run.
const runEntries = 64

// cut makes runs of a page; own is the number of bytes that are not shared with the cache.
func (p *Range) cut(page etcdsource.Page) (runs []mirror.Run, own int64) {
	for kvs := range slices.Chunk(page.KVs, runEntries) {
		run, bytes := p.held.DetachedRun(kvs)
		runs = append(runs, run)
		own += bytes
	}
	return runs, own
}

// keep appends runs to those kept, or drops all of them above Reader.Keep.
func (p *Range) keep(runs []mirror.Run, keys int, own int64) {
	if p.own += own; p.own > p.source.Keep {
		p.kept, p.next = nil, nil
		return
	}
	p.kept = append(p.kept, runs...)
	p.taken += int64(keys)
}

// Runs yields the range in key order. The second time it yields the kept runs, or reads them again.
// It ends early on an error; see Err.
func (p *Range) Runs() iter.Seq[mirror.Run] {
	return func(yield func(mirror.Run) bool) {
		for _, run := range p.kept {
			if !yield(run) {
				return
			}
		}
		pager, seen := p.next, p.taken
		if pager == nil {
			again := *p.first
			pager, seen = &again, 0
		}
		for !pager.Done() && (p.maxKeys == 0 || seen < p.maxKeys) && p.err == nil {
			page, err := p.fetch(pager, max(0, p.maxKeys-seen))
			if err != nil {
				p.err = err
				return
			}
			seen += int64(len(page.KVs))
			runs, own := p.cut(page)
			if pager == p.next { // otherwise no runs are kept
				p.keep(runs, len(page.KVs), own)
			}
			for _, run := range runs {
				if !yield(run) {
					return
				}
			}
		}
	}
}

// ErrNeeded is matched by the errors of reads that memory does not answer.
var ErrNeeded = errors.New("must be read from etcd")

// Needed is an ErrNeeded of a list, with the reason for the metrics.
type Needed struct{ Reason string }

func (e *Needed) Error() string { return ErrNeeded.Error() + ": " + e.Reason }

// Is makes errors.Is find ErrNeeded.
func (e *Needed) Is(target error) bool { return target == ErrNeeded }

// Reasons why a list has to be read from etcd.
var (
	GateOff    = &Needed{metrics.ReasonGate}
	NotLoaded  = &Needed{metrics.ReasonNotLoaded}
	NoProgress = &Needed{metrics.ReasonNoProgress}
)
