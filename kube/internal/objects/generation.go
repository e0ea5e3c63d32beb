package objects

import (
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Generation is the data that readers of a view have derived from values decrypted with the same
// keys: attributes, decoded and converted objects, objects of events, and the encoded objects of
// packages above. When the keys change, the view gets a new generation, and later readers find
// nothing of the old one.
//
// A reader takes the view's generation first and decrypts afterwards, so derived data is never of
// older keys than its generation, however long the decryption takes. A LIST uses one generation
// from beginning to end; a watch takes the current one for each batch. Methods may be called
// concurrently.
type Generation struct {
	view *View
	keys any // see Config.Keys

	memoKey *memo.Key // memo key of attributes and of objects of events
	// decodedKey and convertedKey are the memo keys of decoded objects and of custom resources
	// converted by a webhook.
	decodedKey, convertedKey *memo.Key

	events   EventCache
	decoding flight.Group[*lazyObject, runtime.Object]
	derived  sync.Map // of Derived, by name

	ended atomic.Bool
}

// Derived is derived data of a package above, which is closed with its generation.
type Derived interface{ Close() }

func (v *View) newGeneration() *Generation {
	g := &Generation{view: v, memoKey: &memo.Key{}, decodedKey: &memo.Key{}, convertedKey: &memo.Key{}}
	if v.cfg.Keys != nil {
		g.keys = v.cfg.Keys()
	}
	return g
}

// CurrentGeneration returns the generation of the keys in use. Cost is a few loads, unless the keys
// have changed since the last call.
func (v *View) CurrentGeneration() *Generation {
	g := v.cur.Load()
	if v.cfg.Keys == nil || g.keys == v.cfg.Keys() {
		return g
	}
	return v.rotateGeneration()
}

// rotateGeneration ends the generation of keys that are no longer in use and returns the next one.
func (v *View) rotateGeneration() *Generation {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.cur.Load()
	next := v.newGeneration()
	if v.closed || old.keys == next.keys { // replaced by another reader
		return old
	}
	v.cur.Store(next)
	old.end()
	if v.onRotate != nil {
		v.onRotate()
	}
	return next
}

// end closes the memo keys of the generation and releases its blocks. Readers that still use it
// finish with the data they have loaded, and cache nothing.
func (g *Generation) end() {
	g.ended.Store(true)
	g.memoKey.Close()
	g.decodedKey.Close()
	g.convertedKey.Close()
	g.events.End()
	g.derived.Range(func(_, d any) bool {
		d.(Derived).Close()
		return true
	})
	g.Blocks().ReleaseClosed()
}

// Ended reports whether the keys of the generation are no longer in use. Data derived with them
// must not be cached.
func (g *Generation) Ended() bool { return g.ended.Load() }

// InUse reports whether the keys of the generation are in use. Cost is that of
// View.CurrentGeneration.
func (g *Generation) InUse() bool { return g == g.view.CurrentGeneration() }

// Blocks returns the block cache of the view.
func (g *Generation) Blocks() *blockcache.Cache { return g.view.cfg.Blocks }

// Derived returns the generation's derived data of a name, which must be comparable. It is made on
// the first call and closed with the generation.
func (g *Generation) Derived(name any, make func() Derived) Derived {
	if d, ok := g.derived.Load(name); ok {
		return d.(Derived)
	}
	kept, _ := g.derived.LoadOrStore(name, make())
	d := kept.(Derived)
	if g.Ended() { // end may have run before
		d.Close()
	}
	return d
}

// DropIfEnded drops the memos of closed keys from an entry to which derived data was just added, if
// the generation has ended: the pass that drops them from all entries may already have visited it.
func (g *Generation) DropIfEnded(e *mirror.Entry) {
	if g.Ended() {
		e.Memos().DropClosed()
	}
}
