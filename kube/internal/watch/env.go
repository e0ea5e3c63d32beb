// Package watch delivers the watches of one resource from memory. A watch is a position in the log
// of the resource, after initial events that are a list (KEP-2340, KEP-956, KEP-1904). It has no
// goroutine and no queue (D4), and knows its surroundings by Env only.
package watch

import (
	"context"
	"log/slog"
	"time"

	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/watchset"
)

// Env is what the watches of a resource need. It does not change while watches use it, and is safe
// for concurrent use.
type Env struct {
	Lists       *list.Env            // the resource; initial events are a list
	Running     *watchset.Watches    // of the cluster
	Goroutines  *watchset.Group      // of the storage
	Context     context.Context      // ends with the storage
	Conversions *objects.Conversions // nil if no conversion blocks
	Metrics     metrics.Watches
	Logger      *slog.Logger
	// RetryFor bounds the time for which an event that cannot be decrypted or converted is retried,
	// for example because a KMS is down.
	RetryFor time.Duration
	Gates    Gates
}

// Gates select what clients may request of a watch.
type Gates struct {
	Bookmarks bool // WatchBookmark
	WatchList bool // WatchList
}
