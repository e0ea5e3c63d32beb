// Package list answers LIST requests of one resource from memory: it resolves a request to a
// revision and a range (KEP-2340, KEP-4988), narrows it by indexes and shards, and decodes its
// objects or leaves their bytes to the caller. It knows its surroundings by Env only.
package list

import (
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/mirror"
)

// Env is what the lists of a resource need. It does not change while lists use it, and is safe for
// concurrent use.
type Env struct {
	Mirror     *mirror.Mirror
	Memory     *mirror.Resource
	Fresh      *freshness.Waiter
	View       *objects.View
	Selections *index.Selections // indexes and shards
	Keys       pages.Keys
	Pages      pages.Pages
	Etcd       storage.Interface // upstream's store, for lists that memory cannot answer
	Past       etcdread.Reader   // of revisions that are older than memory
	Metrics    metrics.Lists
	Gates      Gates
}

// Gates select the lists that memory answers, and their form.
type Gates struct {
	// Latest: lists of the latest revision are read from memory (ConsistentListFromCache).
	Latest bool
	// AtRevision: lists of an old revision are (ListFromCacheSnapshot).
	AtRevision bool
	// Shards: the metadata of a list names its shard (ShardedListAndWatch).
	Shards bool
	// UnsafeDelete: lists report all corrupt objects instead of the first
	// (AllowUnsafeMalformedObjectDeletion).
	UnsafeDelete bool
}

// versioner reads and writes resource versions.
var versioner storage.APIObjectVersioner
