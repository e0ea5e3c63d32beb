package objects

import (
	"context"
	"sync"

	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/mirror"
)

// Finder finds the values of one label or field in stored values. nil if the view has none: objects are then decoded.
type Finder struct {
	view *View
	find Find
}

// Finder returns the finder of a label, or of a field.
func (g *Generation) Finder(label bool, name string) *Finder {
	if g.view.cfg.Finder == nil {
		return nil
	}
	find := g.view.cfg.Finder(label, name)
	if find == nil {
		return nil
	}
	return &Finder{g.view, find}
}

// Finding is a pass of a Finder over some entries, with buffers that entries share. Not safe for concurrent use.
type Finding struct {
	ctx    context.Context
	cancel context.CancelFunc
	key    storedKey
	value  []byte // decompressed
}

// storedKey implements value.Context.
type storedKey struct{ key string }

func (k *storedKey) AuthenticatedData() []byte { return []byte(k.key) }

var findings = sync.Pool{New: func() any { return new(Finding) }}

// NewFinding begins a pass of at most DecodeTimeout, which the caller ends.
func NewFinding(ctx context.Context) *Finding {
	p := findings.Get().(*Finding)
	p.ctx, p.cancel = context.WithTimeout(ctx, DecodeTimeout)
	return p
}

// End ends the pass. Values that it has found must not be used any more.
func (p *Finding) End() {
	p.cancel()
	p.ctx, p.cancel, p.key.key = nil, nil, ""
	if cap(p.value) <= abridgmentBytes {
		findings.Put(p)
	}
}

// Find returns the value of the entry, which is valid until the next call. Not ok as Find, and if the value cannot be decrypted within the time of the pass:
// the caller decodes the object, which reports the error. Cost is some 100 ns for an object of 1 KB stored as protobuf, and 1 ns per byte of JSON.
func (f *Finder) Find(p *Finding, e *mirror.Entry) (found []byte, present, ok bool) {
	p.key.key = e.Key()
	data, _, err := f.view.cfg.Transformer.TransformFromStorage(p.ctx, e.PeekIn(&p.value), &p.key)
	if err != nil {
		return nil, false, false
	}
	return f.find(data)
}

var _ value.Context = (*storedKey)(nil)
