package kubestorage

import (
	"context"
	"iter"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
)

// pastKeep is how many bytes of objects that memory does not hold a list from etcd keeps
// until it is written; with more, what was read is read again to be written. An object
// that has not changed since is memory's own and costs a pointer. A variable for tests.
var pastKeep int64 = 16 << 20

// past is a range of keys at a revision that is older than memory but not compacted, read
// from etcd page by page (D7, I7): it holds one page and pastKeep at most, however long
// the range is. Not safe for concurrent use.
type past struct {
	store *Store
	ctx   context.Context
	held  mirror.Snapshot // to share entries with
	most  int64           // keys wanted, 0 for all
	count int64           // keys in the range

	first *etcdsource.Pager // begins anew
	next  *etcdsource.Pager // goes on after kept
	kept  []mirror.Run      // from the first on
	taken int64             // keys in kept
	own   int64             // bytes in kept that memory does not hold; above pastKeep nothing is kept
	err   error             // the first one met
}

// openPast reads the first page.
func openPast(ctx context.Context, s *Store, start, end string, rev mirror.Revision, most int64) (*past, error) {
	held, err := s.resource.Latest()
	if err != nil {
		return nil, s.notReady()
	}
	pager := etcdsource.NewPager(s.cluster.ranges, start, end, rev)
	if n, bytes := held.Count(start, end); n > 0 {
		pager.Expect(bytes / int64(n)) // as large as they are now
	}
	p := &past{store: s, ctx: ctx, held: held, most: most, next: pager}
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

// fetch reads a page, when its turn among the pages that are read at once has come. No turn is held
// while a client reads.
func (p *past) fetch(pager *etcdsource.Pager, most int64) (etcdsource.Page, error) {
	select {
	case p.store.cluster.lists <- struct{}{}:
		defer func() { <-p.store.cluster.lists }()
	case <-p.ctx.Done():
		return etcdsource.Page{}, apierrors.NewTimeoutError("too many lists wait for etcd", tooHighRetrySeconds)
	}
	began := time.Now()
	page, err := pager.Next(p.ctx, most)
	etcdmetrics.RecordEtcdRequest("list", p.store.group, err, began)
	request.TrackStorageLatency(p.ctx, time.Since(began))
	if err == nil && page.Header.ClusterID != p.store.mirror.Cluster() {
		err = mirror.ErrRestored
	}
	return page, err
}

// runEntries is how many entries a run has: as many as a leaf, because readers hold what
// they make of one.
const runEntries = 64

// cut makes runs of a page; own is what memory does not hold of it.
func (p *past) cut(page etcdsource.Page) (runs []mirror.Run, own int64) {
	for kvs := range slices.Chunk(page.KVs, runEntries) {
		run, bytes := p.held.Foreign(kvs)
		runs = append(runs, run)
		own += bytes
	}
	return runs, own
}

// keep keeps runs that come after those kept, or gives up keeping any.
func (p *past) keep(runs []mirror.Run, keys int, own int64) {
	if p.own += own; p.own > pastKeep {
		p.kept, p.next = nil, nil
		return
	}
	p.kept = append(p.kept, runs...)
	p.taken += int64(keys)
}

// runs yields the range in key order. A second time it yields what was kept, or reads it
// again. It ends early when p.err is set.
func (p *past) runs() iter.Seq[mirror.Run] {
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
