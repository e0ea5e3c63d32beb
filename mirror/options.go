package mirror

import (
	"log/slog"
	"time"
)

// Window bounds the history that a mirror keeps beside the present. The history of
// a resource ends where the first bound is reached; the present is always kept. A
// field that is zero means that of DefaultWindow.
type Window struct {
	// MaxAge is how long an event stays readable after the mirror has received it. What was restored
	// (Options.Replay) counts from when that was.
	MaxAge time.Duration
	// MaxBytes bounds what only history keeps alive, over all resources of the mirror
	// together: superseded and deleted values as stored, and the trees of past versions, which
	// are measured about once a second. The resource that holds the most is the first to lose its
	// oldest. Whatever the bound, the present is kept, and what a reader holds.
	MaxBytes int64
}

// Options configures a mirror.
type Options struct {
	// Prefix is the key range that is mirrored; it ends with a slash.
	Prefix string
	// Source delivers the range.
	Source Source
	// Window bounds history.
	Window Window
	// Replay bounds the history that is restored from etcd when the prefix is listed, so
	// that watches and reads of revisions from before the start are answered. A field
	// that is zero means that of DefaultReplay; a negative one restores nothing. What is
	// restored is part of the window.
	Replay ReplayBounds
	// UnclaimedBytes bounds the values kept for keys that no claimed resource
	// holds; beyond it only key and revision are kept, and the values are listed
	// when the resource is claimed. Default: DefaultUnclaimedBytes.
	UnclaimedBytes int64
	// CheckpointEvents is the number of events of a resource between two versions
	// that are kept for reads of the newest past. Older ones are further apart, as far as
	// they are old, up to 512 times this: more costs the first read of a revision time (less
	// than a microsecond for each event), fewer costs memory (a version of which every leaf
	// was written since takes 12 to 14 bytes for each key). Default 128.
	CheckpointEvents int
	// IdleProgress is how often etcd is asked for progress while no events come
	// and somebody wants it to move (WantProgress). etcd's own interval is 10 minutes
	// unless it is configured, and the clock has to follow writes outside the prefix,
	// or a compaction overtakes it. Default: DefaultIdleProgress; negative: never.
	IdleProgress time.Duration
	// FeedPatience is how long a feed may leave requests for progress unanswered, and
	// deliver nothing else, while etcd is ahead of it, before it is begun anew, on another
	// member if there is one. Default: defaultFeedPatience; negative: without a limit.
	FeedPatience time.Duration
	// EventsOnly: progress is neither asked for nor believed, because the server may
	// send it ahead of events (etcd#15220, etcd#17507). The clock then stands at the
	// last event of the prefix, wherever etcd is: a wait for a revision of Current may
	// not end.
	EventsOnly bool
	// EveryRevision: the source delivers a batch for every revision, so that the clock needs no
	// progress to follow it, and none is asked for. IdleProgress has no effect.
	EveryRevision bool
	// Logger receives what an operator should know. Default: slog.Default().
	Logger *slog.Logger
}

// DefaultWindow is an hour, longer than clients keep a watch or an informer that
// asked for no bookmarks stays away, and 256 MiB, which ends it sooner where much
// is written: at 1 KB a value, after about 200,000 writes.
var DefaultWindow = Window{MaxAge: time.Hour, MaxBytes: 256 << 20}

// DefaultReplay is what etcd delivers within 3 seconds without holding a writer up for
// more than half a second, with values of 1 KB and unless it has just been started itself
// (docs/benchmarks.md).
var DefaultReplay = ReplayBounds{Revisions: 200_000, Bytes: 256 << 20}

// DefaultIdleProgress is what Kubernetes recommends to set etcd's own interval to
// (KEP-1904).
const DefaultIdleProgress = 5 * time.Second

// defaultFeedPatience, with the time it takes to find out and to begin anew, has a member that
// hangs left within 5 seconds of the first write that it does not tell of.
const defaultFeedPatience = 1500 * time.Millisecond

// DefaultUnclaimedBytes is enough for the custom resources of most clusters.
const DefaultUnclaimedBytes = 64 << 20

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
