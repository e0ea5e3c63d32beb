// Package representation caches objects in encoded form: items of lists, from which single objects,
// watch events and compressed runs are assembled. It caches on the leaves of btree and the entries
// of mirror, and does not import kubestorage.
package representation

import (
	"sync/atomic"

	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// ItemEncoder appends an object to dst in its form as an item of a list, with its separator or
// delimiter. The encoder owns the object.
type ItemEncoder func(dst []byte, obj apiruntime.Object) ([]byte, error)

// Splicer appends an object's item to dst, made from the stored value without decoding it, or
// reports that it cannot. The representation verifies that the result is equal to the encoder's.
type Splicer func(dst, stored []byte, rev mirror.Revision) ([]byte, bool)

// Format is how a representation makes items. Splice and Transcode may be nil.
type Format struct {
	// Encode is the general way. The others give the same bytes for the values that they accept.
	Encode ItemEncoder
	// Splice is used once its result for the entry was verified.
	Splice Splicer
	// Transcode makes the item from the decrypted value, without decoding it. Its result is not
	// verified.
	Transcode Splicer
	// Cut, if set, makes the item from that of another representation of the same objects, where
	// that has it cached.
	Cut   CutItem
	Whole *Representation
}

// Representation is one way to encode the objects of a resource. For each entry it caches the item:
// the object in its form in a list, from which single objects and watch events are assembled too.
// An item is made once and found by every later reader, of any revision; it is a part of a block
// that the items of a leaf share, so that most of a list is a few spans of memory. All
// representations of an engine share one block cache. An item that does not fit is encoded at each
// use, or spliced from the stored value if that is known to give the same bytes. Methods may be
// called concurrently.
type Representation struct {
	leaves
	eventItems
}

// items are the items of single entries.
type items struct {
	gen     *objects.Generation
	format  Format
	blocks  *blockcache.Cache
	memoKey *memo.Key // of items, on entries and on events after them, and of the items of leaves
}

// leaves are the items of whole leaves, and their compressed forms.
type leaves struct {
	items
	// varies: a leaf was encoded again with another size, which is possible for custom resources
	// converted by a webhook. Sums of sizes are then not used.
	varies atomic.Bool

	// The computations in progress: items of leaves, compressed leaves.
	building  flight.Group[*leaf, struct{}]
	deflating flight.Group[deflatingKey, Frames]
}

// eventItems are the items of events, and their compressed frames.
type eventItems struct {
	items          *items
	deletedItemKey *memo.Key // memo key of items that events have deleted
	cached         objects.EventCache

	// The computations in progress: items, compressed frames.
	encoding flight.Group[*eventItem, []byte]
	framing  flight.Group[*atomic.Pointer[Frame], *Frame]
}

// newRepresentation returns a representation of a generation's objects. Close it after use.
func newRepresentation(g *objects.Generation, f Format) *Representation {
	p := &Representation{}
	p.leaves.items = items{gen: g, format: f, blocks: g.Blocks(), memoKey: &memo.Key{}}
	p.eventItems.items, p.deletedItemKey = &p.leaves.items, &memo.Key{}
	return p
}

// Of returns the generation's representation of a name, which must be comparable. It is made in the
// format f on the first call, and closed with the generation.
func Of(g *objects.Generation, name any, f Format) *Representation {
	return g.Derived(name, func() objects.Derived { return newRepresentation(g, f) }).(*Representation)
}

// Close drops the cached items, as their entries are replaced or deleted.
func (p *Representation) Close() {
	p.cached.End()
	p.memoKey.Close()
	p.deletedItemKey.Close()
}

// Fresh reports whether values are still decrypted with the keys of the representation's
// generation. Cost is a few loads.
func (p *Representation) Fresh() bool { return p.gen.InUse() }
