package mirror

import (
	"errors"

	"github.com/stratakube/strata/mirror/driver"
)

// Revision numbers a state of an etcd cluster; see driver.Revision.
type Revision = driver.Revision

// Errors of a mirror and its sources, grouped by the caller's next step.
var (
	// ErrCompacted: the revision left the window or was compacted by etcd. Permanent for this
	// revision; the caller relists.
	ErrCompacted = driver.ErrCompacted
	// ErrFutureRevision: the revision is above the published revision. It may exist soon; see Wait.
	ErrFutureRevision = errors.New("revision not reached yet")
	// ErrNotReady: the resource is being loaded, for the first time or again. The caller retries.
	ErrNotReady = errors.New("mirror is not ready")
	// ErrClosed: the mirror was closed. Releasing a resource does not cause it.
	ErrClosed = errors.New("mirror closed")

	// ErrRestored: etcd is another cluster than the mirrored one, or an older state of it. The
	// mirror restarts from an empty state (the exception to I1).
	ErrRestored = driver.ErrRestored
	// ErrFeedSilent is the cancellation cause of a driver.Source's Watch that delivered nothing
	// while etcd's revision advanced: its member hangs, or is partitioned. A source may open the
	// next Watch on another member.
	ErrFeedSilent = errors.New("no response on the watch while etcd's revision advanced")
	// ErrSuperseded: the resource was relisted during a check.
	ErrSuperseded = errors.New("resource was relisted during the check")
)

// errDiverged: the feed contradicts the cached state, so an event was lost, repeated or overtaken.
// The affected resource, or the whole prefix, is relisted.
var errDiverged = errors.New("inconsistent data from etcd")
