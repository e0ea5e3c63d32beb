package mirror

import (
	"log/slog"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// Window bounds the history that a mirror retains in addition to the latest version. The history of
// a resource ends where the first bound is reached; the latest version is always retained. A zero
// field takes its value from DefaultWindow.
type Window struct {
	// MaxAge is how long an event stays readable after the mirror has received it. The age of
	// restored events (Options.Replay) counts from the restore.
	MaxAge time.Duration
	// MaxBytes bounds the memory that only history keeps alive, over all resources of the mirror
	// together: superseded and deleted values as stored, and the trees of past versions, which are
	// measured about once a second. The resource with the most history loses its oldest part first.
	// The latest version, and snapshots held by readers, are not subject to the bound.
	MaxBytes int64
}

// Options configures a mirror.
type Options struct {
	// Prefix is the mirrored key range; it ends with a slash.
	Prefix string
	// Source delivers the range.
	Source driver.Source
	// Window bounds history.
	Window Window
	// Replay bounds the history that is restored from etcd when the prefix is listed, so that
	// watches and reads of revisions before the start can be served. A zero field takes its value
	// from DefaultReplay; negative Revisions or Bytes disable the restore, and a negative Pause
	// means no bound. Restored history is part of the window.
	Replay driver.ReplayBounds
	// UnclaimedBytes bounds the stored values of keys outside all claimed resources. Beyond it only
	// key and revision are stored, and the values are listed when the resource is claimed. Default:
	// DefaultUnclaimedBytes.
	UnclaimedBytes int64
	// CheckpointEvents is the number of events of a resource between two checkpoints for reads of
	// the most recent revisions. Older checkpoints are further apart in proportion to their age, up
	// to 512 times this number. A larger number makes the first read of a revision slower (less
	// than a microsecond for each event). A smaller number uses more memory (a version whose leaves
	// were all rewritten since takes 12 to 14 bytes for each key). Default 128.
	CheckpointEvents int
	// IdleProgress is the interval of progress requests to etcd while no events arrive and a caller
	// needs the published revision to advance (WantProgress). etcd's own interval is 10 minutes
	// unless configured, and the published revision has to follow writes outside the prefix so that
	// a compaction does not overtake it. Default: DefaultIdleProgress; a negative value disables
	// the requests.
	IdleProgress time.Duration
	// FeedPatience is how long a feed may leave progress requests unanswered, and deliver nothing
	// else, while etcd is ahead of it. Then the feed is restarted, on another member if there is
	// one. Default: 1.5 s; a negative value disables the limit.
	FeedPatience time.Duration
	// EventsOnly: progress is neither requested nor applied, because the server may send it ahead
	// of events (etcd#15220, etcd#17507). The published revision is then at the last event of the
	// prefix, even if etcd's revision is higher: a wait for a revision returned by ReadRevision may
	// not end.
	EventsOnly bool
	// EveryRevision: the source delivers a batch for every revision. The published revision follows
	// the batches alone, so no progress is requested and IdleProgress has no effect.
	EveryRevision bool
	// Logger receives messages for the operator. Default: slog.Default().
	Logger *slog.Logger
}

// Defaults of Options.
const (
	// DefaultIdleProgress is the value that Kubernetes recommends for etcd's own interval
	// (KEP-1904).
	DefaultIdleProgress = 5 * time.Second
	// DefaultUnclaimedBytes is enough for the custom resources of most clusters.
	DefaultUnclaimedBytes = 64 << 20
)

// Default bounds of history.
var (
	// DefaultWindow is an hour and 256 MiB. An hour is longer than clients keep a watch, or than an
	// informer without bookmarks is disconnected. 256 MiB is the smaller bound under a heavy write
	// load: at 1 KB a value it is reached after about 200,000 writes.
	DefaultWindow = Window{MaxAge: time.Hour, MaxBytes: 256 << 20}
	// DefaultReplay is the amount that etcd delivers without blocking a writer for more than a
	// tenth of a second: 10,000 revisions at least, and about 20,000 of 1 KB on two busy processors
	// (docs/architecture.md, D5).
	DefaultReplay = driver.ReplayBounds{Revisions: 200_000, Bytes: 256 << 20, Pause: 100 * time.Millisecond}
)

// defaultFeedPatience, with the time for detection and restart, makes the mirror leave a hanging
// member within 5 seconds of the first write that the member does not deliver.
const defaultFeedPatience = 1500 * time.Millisecond

func (o *Options) setDefaults() {
	if o.Window.MaxAge == 0 {
		o.Window.MaxAge = DefaultWindow.MaxAge
	}
	if o.Window.MaxBytes == 0 {
		o.Window.MaxBytes = DefaultWindow.MaxBytes
	}
	if o.Replay.Revisions == 0 {
		o.Replay.Revisions = DefaultReplay.Revisions
	}
	if o.Replay.Bytes == 0 {
		o.Replay.Bytes = DefaultReplay.Bytes
	}
	if o.Replay.Pause == 0 {
		o.Replay.Pause = DefaultReplay.Pause
	}
	if o.UnclaimedBytes == 0 {
		o.UnclaimedBytes = DefaultUnclaimedBytes
	}
	if o.CheckpointEvents == 0 {
		o.CheckpointEvents = 128
	}
	if o.IdleProgress == 0 {
		o.IdleProgress = DefaultIdleProgress
	}
	if o.FeedPatience == 0 {
		o.FeedPatience = defaultFeedPatience
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
}
