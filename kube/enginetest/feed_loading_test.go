package enginetest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// heldSource is a source whose replay, or whose events, wait until the channel is closed. A nil channel holds nothing.
type heldSource struct {
	driver.Source
	replay, events <-chan struct{}
}

func wait(ctx context.Context, held <-chan struct{}) error {
	if held == nil {
		return nil
	}
	select {
	case <-held:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s heldSource) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if err := wait(ctx, s.replay); err != nil {
		return err
	}
	return s.Source.Replay(ctx, prefix, after, through, deliver)
}

func (s heldSource) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	return s.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if err := wait(ctx, s.events); err != nil {
			return err
		}
		return deliver(b)
	})
}

// TestFeedServer_RestoresHistory_MirrorBelowAwaitsIt: while a feed restores its history, a watch from before that is compacted at once, and a mirror
// below restores the history when it has arrived.
func TestFeedServer_RestoresHistory_MirrorBelowAwaitsIt(t *testing.T) {
	_, etcd := newRunning(t)
	const prefix = "/registry/"
	var revs []mirror.Revision
	for i := range 100 {
		revs = append(revs, put(t, etcd, fmt.Sprintf("%smore/%d", prefix, i%10), "value"))
	}
	compacted := revs[40]
	if _, err := etcd.Compact(contextFor(t), compacted); err != nil {
		t.Fatal(err)
	}
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{}, func(s driver.Source) driver.Source { return heldSource{Source: s, replay: held} })
	client := connect(t, f.socket)
	if got := compactRevision(t, client, prefix, 1); got != compacted {
		t.Errorf("a watch from 1 is compacted to %d, want %d", got, compacted)
	}
	m := newMirror(t, client, prefix, func(o *mirror.Options) { o.Source = busySource{o.Source, release} })
	r := claim(t, m, prefix+"more/")
	if err := r.WaitHistory(contextFor(t), compacted); err != nil {
		t.Fatal(err)
	}
	if oldest, _, err := r.Oldest(); err != nil || oldest != compacted {
		t.Errorf("oldest revision %d (%v), want %d", oldest, err, compacted)
	}
	sameEvents(t, client.Watch(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(compacted+1)), etcd, prefix, compacted+1, revs[99])
}

// TestProbe_FeedBehindEtcd_IsByProgress: a feed whose memory is behind etcd answers no progress request, and is known to do so later.
func TestProbe_FeedBehindEtcd_IsByProgress(t *testing.T) {
	etcd, prefix := open(t)
	put(t, etcd, prefix+"key", "value")
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	f := serveFeed(t, etcd, prefix, etcdfeed.Options{}, func(s driver.Source) driver.Source { return heldSource{Source: s, events: held} })
	put(t, etcd, prefix+"key", "not in memory")
	client := connect(t, f.socket)
	if mode, err := etcdsource.Probe(contextFor(t), client, prefix+"probe"); mode != etcdsource.ByProgress || err == nil {
		t.Errorf("%s, %v; want progress, and an error", mode, err)
	}
	release()
	catchUp(t, f.mirror)
	if mode, err := etcdsource.Probe(contextFor(t), client, prefix+"probe"); mode != etcdsource.ByProgress || err != nil {
		t.Errorf("%s, %v; want progress", mode, err)
	}
}
