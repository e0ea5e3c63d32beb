package mirror

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stratakube/strata/mirror/internal/freshness"
)

// rootResources is the number of resources of these benchmarks: a large cluster with many custom
// resources, one of which is changed by most batches.
const rootResources = 3000

// flatRoot models a publication of the published revision and all resources by one pointer.
type flatRoot struct {
	rev      Revision
	versions []*version
}

// blockRoot is flatRoot in two levels of about equal length, so that a batch copies two short
// slices.
type blockRoot struct {
	rev    Revision
	blocks [][]*version
}

const rootBlock = 55

// newBlocks returns the versions in blocks.
func newBlocks(versions []*version) [][]*version {
	return slices.Collect(slices.Chunk(versions, rootBlock))
}

// newRootModel returns resources with one lineage each, and their published revision and its
// publisher.
func newRootModel() ([]*Resource, []*version, freshness.Publisher) {
	published, publisher := freshness.NewPublished(nil, nil)
	s := &shared{published: published}
	publisher.Publish(1, false)
	resources, versions := make([]*Resource, rootResources), make([]*version, rootResources)
	for i := range resources {
		versions[i] = &version{rev: 1}
		resources[i] = &Resource{m: s, prefix: fmt.Sprintf("/registry/r%04d/", i)}
		resources[i].lineage.Store(newLineage(versions[i], nil, nil, false))
	}
	return resources, versions, publisher
}

// BenchmarkPublish measures the publication of a batch with one event: by the pointer of its
// resource and the published revision, as tableUpdate.commit and writer.commit publish, and by one
// root.
func BenchmarkPublish(b *testing.B) {
	resources, versions, publisher := newRootModel()
	b.Run("resource", func(b *testing.B) {
		b.ReportAllocs()
		rev := resources[0].m.published.Revision()
		for i := 0; b.Loop(); i++ {
			rev++
			lin := resources[i%rootResources].lineage.Load()
			v := &version{rev: rev}
			v.prev.Store(lin.head.Load())
			lin.head.Store(v)
			publisher.Publish(rev, false)
			v.prev.Store(nil)
		}
	})
	b.Run("flat", func(b *testing.B) {
		var root atomic.Pointer[flatRoot]
		root.Store(&flatRoot{rev: 1, versions: versions})
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			old := root.Load()
			next := &flatRoot{rev: old.rev + 1, versions: slices.Clone(old.versions)}
			next.versions[i%rootResources] = &version{rev: next.rev}
			root.Store(next)
			publisher.Publish(resources[0].m.published.Revision()+1, false) // keeps the waits
		}
	})
	b.Run("blocks", func(b *testing.B) {
		var root atomic.Pointer[blockRoot]
		root.Store(&blockRoot{rev: 1, blocks: newBlocks(versions)})
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			old, at := root.Load(), i%rootResources
			next := &blockRoot{rev: old.rev + 1, blocks: slices.Clone(old.blocks)}
			block := slices.Clone(old.blocks[at/rootBlock])
			block[at%rootBlock] = &version{rev: next.rev}
			next.blocks[at/rootBlock] = block
			root.Store(next)
			publisher.Publish(resources[0].m.published.Revision()+1, false)
		}
	})
}

// BenchmarkRootLatest measures reads of the latest version of one resource after another: by
// Resource.Latest, and from one root, whose versions are assumed to name their lineage.
func BenchmarkRootLatest(b *testing.B) {
	resources, versions, _ := newRootModel()
	lin := resources[0].lineage.Load() // in place of a field of the version
	var snap Snapshot
	b.Run("resource", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			var err error
			if snap, err = resources[i%rootResources].Latest(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("flat", func(b *testing.B) {
		var root atomic.Pointer[flatRoot]
		root.Store(&flatRoot{rev: 1, versions: versions})
		for i := 0; b.Loop(); i++ {
			at, r := i%rootResources, root.Load()
			v := r.versions[at]
			snap = Snapshot{Rev: r.rev, tree: v.tree, seq: v.seq, lin: lin, res: resources[at]}
		}
	})
	b.Run("blocks", func(b *testing.B) {
		var root atomic.Pointer[blockRoot]
		root.Store(&blockRoot{rev: 1, blocks: newBlocks(versions)})
		for i := 0; b.Loop(); i++ {
			at, r := i%rootResources, root.Load()
			v := r.blocks[at/rootBlock][at%rootBlock]
			snap = Snapshot{Rev: r.rev, tree: v.tree, seq: v.seq, lin: lin, res: resources[at]}
		}
	})
	if snap.Rev == 0 {
		b.Fatal("no entry was read")
	}
}
