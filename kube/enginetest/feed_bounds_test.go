package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// compactRevision returns the compacted revision of the watch of a prefix, 0 if the watch is served.
func compactRevision(t *testing.T, client *clientv3.Client, prefix string, from mirror.Revision) mirror.Revision {
	t.Helper()
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	resp, ok := <-client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(from))
	if err := resp.Err(); !ok || err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
		t.Fatalf("watch from %d ended (%v), want events, or that it is compacted", from, err)
	}
	return resp.CompactRevision
}

// TestFeedServer_WatchBelowLog_IsCompactedAboveItsStart: a watch that begins at the floor of the log, or below, is canceled with a compacted revision
// above its start, so that its client relists; all watches from above the floor are served. The log is full, or has room because it has just dropped
// a large event.
func TestFeedServer_WatchBelowLog_IsCompactedAboveItsStart(t *testing.T) {
	etcd, prefix := open(t)
	for name, large := range map[string]bool{"full": false, "room": true} {
		t.Run(name, func(t *testing.T) {
			start := put(t, etcd, prefix+"key", "value")
			f := serveFeed(t, etcd, prefix, etcdfeed.Options{LogBytes: 10_000})
			for i := range 100 {
				put(t, etcd, fmt.Sprintf("%smore/%d", prefix, i%10), "value")
			}
			if large {
				put(t, etcd, prefix+"key", strings.Repeat("x", 6000))
				for i := range 18 {
					put(t, etcd, fmt.Sprintf("%smore/%d", prefix, i%10), "value")
				}
			}
			newest := catchUp(t, f.mirror)
			client := connect(t, f.socket)
			served := int64(0)
			for from := newest; from >= start; from-- {
				oldest := compactRevision(t, client, prefix, from)
				switch {
				case oldest == 0 && from < newest-served:
					t.Fatalf("a watch from %d is served, and one from above is not", from)
				case oldest == 0:
					served++
				case oldest <= from:
					t.Fatalf("a watch from %d is compacted to %d, want a revision above its start", from, oldest)
				}
			}
			if served < 10 || served > 40 {
				t.Errorf("watches from %d revisions are served, want about 30, or 18 after the large event", served)
			}
		})
	}
}

// TestFeedServer_WatchFromFirstRevision_IsServed: a log that begins at the first revision of etcd, which has no event, has all events from there.
func TestFeedServer_WatchFromFirstRevision_IsServed(t *testing.T) {
	e := newEtcd(t)
	e.run(t)
	etcd := connect(t, e.socket())
	const prefix = "/registry/"
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{})
	newest := put(t, etcd, prefix+"key", "value")
	live := connect(t, f.socket).Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(1))
	sameEvents(t, live, etcd, prefix, 1, newest)
}

// busySource is a source whose store is written to after each part of a restore.
type busySource struct {
	driver.Source
	write func()
}

func (s busySource) Oldest(ctx context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	defer s.write()
	return s.Source.Oldest(ctx, prefix, now, bounds)
}

func (s busySource) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	defer s.write()
	return s.Source.Replay(ctx, prefix, after, through, deliver)
}

// TestFeedServer_WritesDuringRestoreBelow_HistoryIsRestored: a mirror of a feed whose log is full restores history, although each write moves the
// floor of the log.
func TestFeedServer_WritesDuringRestoreBelow_HistoryIsRestored(t *testing.T) {
	etcd, prefix := open(t)
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{LogBytes: 10_000})
	written := 0
	write := func(n int) {
		for range n {
			put(t, etcd, fmt.Sprintf("%smore/%d", prefix, written%10), fmt.Sprint(written))
			written++
		}
		catchUp(t, f.mirror)
	}
	write(200)
	client := connect(t, f.socket)
	before := compactRevision(t, client, prefix, 1)
	m := newMirror(t, client, prefix, func(o *mirror.Options) { o.Source = busySource{o.Source, func() { write(2) }} })
	r := claim(t, m, prefix+"more/")
	now := catchUp(t, m)
	ctx := contextFor(t)
	for m.LoadProgress().Restoring {
		if err := r.WaitHistory(ctx, now-1); err != nil {
			t.Fatal(err)
		}
		if err := ctx.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if n := m.Stats().Replays; n == 0 {
		t.Fatal("no history was restored")
	}
	_, floor, err := r.Oldest()
	if err != nil || floor > before+10 {
		t.Errorf("floor of the history %d (%v), want about %d", floor, err, before)
	}
	if after := compactRevision(t, client, prefix, 1); after <= before {
		t.Errorf("compacted to %d, was %d before the restore: the test has no effect", after, before)
	}
}
