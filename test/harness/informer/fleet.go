package informer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// equalWithin bounds the time until the stores of informers equal etcd.
const equalWithin = 90 * time.Second

// Fleet is all informers of a test.
type Fleet []*Informer

// Start starts the informers and returns when all have synced. They run as long as the test.
func (f Fleet) Start(t *testing.T, ctx context.Context) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	for _, i := range f {
		running.Go(func() { i.RunWithContext(ctx) })
	}
	for _, i := range f {
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return i.HasSynced(), fmt.Errorf("the informer of %v has not synced: %v", i.Follow, f.Errors())
		}))
	}
}

// AwaitSettled returns when every informer's watch is so old that its end does not make client-go
// relist, as it does after a watch of less than a second without events.
func (f Fleet) AwaitSettled(t *testing.T, ctx context.Context) {
	t.Helper()
	const old = 1500 * time.Millisecond
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for _, i := range f {
			if opened := i.opened.Load(); opened == 0 || time.Since(time.Unix(0, opened)) < old {
				return false, fmt.Errorf("the informer of %v has no settled watch: %v", i.Follow, f.Errors())
			}
		}
		return true, nil
	}))
}

// Counts returns the counts of each informer.
func (f Fleet) Counts() (all []Counts) {
	for _, i := range f {
		all = append(all, i.Counts())
	}
	return all
}

// Errors returns how often requests and watches failed, by the error.
func (f Fleet) Errors() map[string]int {
	all := map[string]int{}
	for _, i := range f {
		i.mu.Lock()
		for text, n := range i.errs {
			all[text] += n
		}
		i.mu.Unlock()
		for _, err := range i.sessions.Errors() {
			all["in a watch: "+err.Error()]++
		}
	}
	return all
}

// AwaitEqual returns when every informer's store equals etcd. A write that a client has canceled
// may still reach etcd, so etcd is read each time.
func (f Fleet) AwaitEqual(t *testing.T, ctx context.Context, client *clientv3.Client) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, equalWithin, errors.New("informers differ from etcd"))
	defer cancel()
	selects := make([]watchcheck.Select, len(f))
	for n, i := range f {
		selects[n] = i.Selects(t)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		stored := map[string]map[string]recorded.Item{}
		var differ []error
		for n, i := range f {
			prefix := i.Prefix()
			if stored[prefix] == nil {
				items, _, err := recorded.Stored(ctx, client, prefix)
				if err != nil {
					return false, err
				}
				stored[prefix] = items
			}
			want := map[string]int64{}
			for key, item := range stored[prefix] {
				if key = key[len(prefix):]; selects[n](key, item.Object) {
					want[key] = item.Revision
				}
			}
			if err := i.differs(want); err != nil {
				differ = append(differ, err)
			}
		}
		if len(differ) > 0 {
			return false, fmt.Errorf("%d of %d informers; the first: %w", len(differ), len(f), differ[0])
		}
		return true, nil
	}))
}

// RequireHistory checks all events of the informers against the history. Their stores are already
// known to be complete.
func (f Fleet) RequireHistory(t *testing.T, ctx context.Context, h *recorded.History) {
	t.Helper()
	history, err := h.Now(ctx)
	harness.Check(t, err)
	last := map[string]int64{} // revision, by prefix
	all := make([][]watchcheck.Session, len(f))
	events, bookmarks, sessions, wrong := 0, 0, 0, 0
	for n, i := range f {
		prefix := i.Prefix()
		if _, ok := last[prefix]; !ok {
			part := history.Under(prefix)
			last[prefix] = part.From
			if n := len(part.Changes); n > 0 {
				last[prefix] = part.Changes[n-1].Revision
			}
		}
		all[n], err = i.sessions.Recorded(last[prefix])
		harness.Check(t, err)
		sessions += len(all[n])
		for _, session := range all[n] {
			for _, e := range session.Events {
				if e.Kind == watchcheck.Bookmark {
					bookmarks++
				} else {
					events++
				}
			}
		}
	}
	// Bookmarks of the last moment are newer than the history that the sessions had to reach.
	history, err = h.Now(ctx)
	harness.Check(t, err)
	parts, views := map[string]*watchcheck.History{}, map[Follow]*watchcheck.View{}
	for n, i := range f {
		same := i.Follow
		same.Metadata = false
		if views[same] == nil {
			if parts[i.Prefix()] == nil {
				parts[i.Prefix()] = history.Under(i.Prefix())
			}
			views[same] = parts[i.Prefix()].View(i.Selects(t))
		}
		if err := views[same].Check(all[n]); err != nil {
			if wrong++; wrong <= 5 {
				t.Errorf("the informer of %v: %v", i.Follow, err)
			}
		}
	}
	t.Logf("%d changes in etcd; %d informers received %d events and %d bookmarks in %d watches", len(history.Changes), len(f), events, bookmarks, sessions)
	if wrong > 0 {
		t.Errorf("%d of %d informers received wrong events", wrong, len(f))
	}
}
