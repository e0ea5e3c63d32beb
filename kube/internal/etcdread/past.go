package etcdread

import (
	"context"
	"iter"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
)

// Source is the etcd that lists of the past are read from.
type Source struct {
	Places Places      // one for each page
	Ranges clientv3.KV // no response is larger than a page may be
	Mirror *mirror.Mirror
	Group  schema.GroupResource // of metrics
	// Keep is how many bytes of objects that memory does not hold a list keeps until it is
	// written; with more, its pages are read again to be written. An object that has not changed
	// since is memory's own and costs a pointer.
	Keep int64
}

// Past is a range of keys at a revision that is older than memory but not compacted, read
// from etcd page by page (D7, I7): it holds one page and Source.Keep at most, however long
// the range is. Not safe for concurrent use.
type Past struct {
	source Source
	ctx    context.Context
	held   mirror.Snapshot // to share entries with
	most   int64           // keys wanted, 0 for all
	count  int64           // keys in the range

	first *etcdsource.Pager // at the first page
	next  *etcdsource.Pager // goes on after kept
	kept  []mirror.Run      // from the first on
	taken int64             // keys in kept
	own   int64             // bytes in kept that memory does not hold; above Source.Keep nothing is kept
	err   error             // the first one met
}

// Open reads the first page of the keys with start <= key < end at rev; most is how many of them are wanted, 0 for all.
// Entries that held has are shared with it. Pages are read with ctx. Errors: 504 without a place, mirror.ErrCompacted,
// mirror.ErrRestored, and those of the client of etcd.
func (s Source) Open(ctx context.Context, held mirror.Snapshot, start, end string, rev mirror.Revision, most int64) (*Past, error) {
	pager := etcdsource.NewPager(s.Ranges, start, end, rev)
	if n, bytes := held.Count(start, end); n > 0 {
		pager.Expect(bytes / int64(n)) // as large as they are now
	}
	p := &Past{source: s, ctx: ctx, held: held, most: most, next: pager}
	again := *pager
	p.first = &again
	page, err := p.fetch(p.next, most)
	if err != nil {
		return nil, err
	}
	p.count = page.Count
	runs, own := p.cut(page)
	p.keep(runs, len(page.KVs), own)
	return p, nil
}

// Context returns the context that pages are read with.
func (p *Past) Context() context.Context { return p.ctx }

// Count returns the number of keys in the range.
func (p *Past) Count() int { return int(p.count) }

// Err returns why Runs has ended early; nil if it has not. Errors are those of Open.
func (p *Past) Err() error { return p.err }

// Kept returns the number of runs that are kept, and the bytes read so far that memory does not hold.
func (p *Past) Kept() (runs int, own int64) { return len(p.kept), p.own }

// fetch reads a page, when its turn among the pages that are read at once has come. No turn is held
// while a client reads.
func (p *Past) fetch(pager *etcdsource.Pager, most int64) (etcdsource.Page, error) {
	select {
	case p.source.Places <- struct{}{}:
		defer func() { <-p.source.Places }()
	case <-p.ctx.Done():
		return etcdsource.Page{}, apierrors.NewTimeoutError("too many lists wait for etcd", retrySeconds)
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

// runEntries is how many entries a run has: as many as a leaf, because readers hold what
// they make of one.
const runEntries = 64

// cut makes runs of a page; own is what memory does not hold of it.
func (p *Past) cut(page etcdsource.Page) (runs []mirror.Run, own int64) {
	for kvs := range slices.Chunk(page.KVs, runEntries) {
		run, bytes := p.held.Foreign(kvs)
		runs = append(runs, run)
		own += bytes
	}
	return runs, own
}

// keep keeps runs that come after those kept, or gives up keeping any.
func (p *Past) keep(runs []mirror.Run, keys int, own int64) {
	if p.own += own; p.own > p.source.Keep {
		p.kept, p.next = nil, nil
		return
	}
	p.kept = append(p.kept, runs...)
	p.taken += int64(keys)
}

// Runs yields the range in key order. A second time it yields what was kept, or reads it
// again. It ends early when an error is met; see Err.
func (p *Past) Runs() iter.Seq[mirror.Run] {
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
		for !pager.Done() && (p.most == 0 || seen < p.most) && p.err == nil {
			page, err := p.fetch(pager, max(0, p.most-seen))
			if err != nil {
				p.err = err
				return
			}
			seen += int64(len(page.KVs))
			runs, own := p.cut(page)
			if pager == p.next { // else nothing is kept
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
