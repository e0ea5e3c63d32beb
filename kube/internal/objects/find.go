package objects

import (
	"context"
	"sync"
	"sync/atomic"

	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
)

// Finder finds the values of one label or field in stored values.
type Finder struct {
	view     *View
	find     transcode.Find
	searches *searches
}

// searches counts searches for labels, or for fields, in the stored values of a view.
type searches struct{ found, missed atomic.Int64 }

// maxMissed is the number of values that were not found after which no further one is searched for,
// if most were not: the resource is stored in another form, or most objects lack its fields. Each
// search decompresses and decrypts a value that is decoded afterwards.
const maxMissed = 1000

// fail reports whether searches cost more than they save.
func (s *searches) fail() bool {
	missed := s.missed.Load()
	return missed >= maxMissed && missed > s.found.Load()
}

// Finder returns the finder of a label, or of a field; nil if the view has none, or if most
// searches have failed: objects are then decoded.
func (g *Generation) Finder(label bool, name string) *Finder {
	searches := &g.view.fieldSearches
	if label {
		searches = &g.view.labelSearches
	}
	if g.view.cfg.Find == nil || searches.fail() {
		return nil
	}
	find := g.view.cfg.Find(label, name)
	if find == nil {
		return nil
	}
	return &Finder{g.view, find, searches}
}

// Finding is a pass of a Finder over some entries, with buffers that entries share. Not safe for
// concurrent use.
type Finding struct {
	finder        *Finder
	fails         bool // see searches
	found, missed int64

	ctx    context.Context
	cancel context.CancelFunc
	key    storedKey
	value  []byte // decompressed
}

// storedKey implements value.Context.
type storedKey struct{ key string }

func (k *storedKey) AuthenticatedData() []byte { return []byte(k.key) }

var findings = sync.Pool{New: func() any { return new(Finding) }}

// Begin begins a pass of at most DecodeTimeout, which the caller ends.
func (f *Finder) Begin(ctx context.Context) *Finding {
	p := findings.Get().(*Finding)
	p.finder, p.fails = f, f.searches.fail()
	p.ctx, p.cancel = context.WithTimeout(ctx, DecodeTimeout)
	return p
}

// End ends the pass. Values that it has found must not be used any more.
func (p *Finding) End() {
	p.cancel()
	if p.found > 0 {
		p.finder.searches.found.Add(p.found)
	}
	if p.missed > 0 {
		p.finder.searches.missed.Add(p.missed)
	}
	*p = Finding{value: p.value}
	if cap(p.value) <= abridgmentBytes {
		findings.Put(p)
	}
}

// Find returns the value of the entry, which is valid until the next call. Not ok as Find, if most
// searches have failed before the pass, and if the value cannot be decrypted within the time of the
// pass: the caller decodes the object, which reports the error. Cost, besides that of decompression
// and decryption, is some 100 ns for an object of 1 KB stored as protobuf, and 1 ns per byte of
// JSON; each call reads the object.
func (p *Finding) Find(e *mirror.Entry) (found []byte, present, ok bool) {
	if p.fails {
		return nil, false, false
	}
	p.key.key = e.Key()
	data, _, err := p.finder.view.cfg.Transformer.TransformFromStorage(p.ctx, e.PeekIn(&p.value), &p.key)
	if err != nil {
		return nil, false, false
	}
	if found, present, ok = p.finder.find(data); ok {
		p.found++
	} else {
		p.missed++
	}
	return found, present, ok
}

var _ value.Context = (*storedKey)(nil)
