package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// createTimeout bounds the wait for a member to create a watch if another member is available.
	// It is much longer than the creation takes, and much shorter than readers can wait. A guess.
	createTimeout = time.Second
	// otherMemberTimeout is the same bound while other members are tried concurrently.
	otherMemberTimeout = 5 * time.Second
	// hedge is the delay after which the next member is tried while the previous one has not
	// answered.
	hedge = 200 * time.Millisecond
)

// feeds is the state that a source keeps about its feeds.
type feeds struct {
	current atomic.Pointer[feed] // the running feed, nil if there is none
	// silent: the last feed was silent, so the next one avoids its member.
	silent atomic.Bool
	// member is the member of the last feed, 0 if unknown.
	member atomic.Uint64
}

// feed is one watch on the whole prefix, or on all keys, that a member has created.
type feed struct {
	watcher   clientv3.Watcher
	conn      *grpc.ClientConn // the connection of the feed; nil inside the server's process
	responses clientv3.WatchChan
	member    uint64
	close     func()
}

// Watch implements driver.Source. It requests no previous values: the mirror has them (k/k#130939).
// etcd splits a revision over several responses only by fragmentation, and the client joins
// fragments; so each response is a batch of complete revisions (E2 to E5 of docs/etcd-contract.md).
//
// The watch uses the client's connections and the member of the client's balancer. If that member
// does not create the watch within createTimeout, or the previous Watch was canceled with
// mirror.ErrFeedSilent, it uses its own connection to the first member that creates the watch,
// other than the silent one if possible.
func (s *Source) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	caller := ctx
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := s.verify(ctx, after); err != nil {
		return err
	}
	f, err := s.openFeed(ctx, &wg, prefix, after.Revision+1)
	if err != nil {
		return fmt.Errorf("watch %s after %d: %w", prefix, after.Revision, err)
	}
	s.feeds.current.Store(f)
	s.feeds.member.Store(f.member)
	s.feeds.silent.Store(false)
	defer func() {
		s.feeds.current.Store(nil)
		s.feeds.silent.Store(errors.Is(context.Cause(caller), mirror.ErrFeedSilent))
		f.close()
	}()
	// The client resumes a watch by itself, on any etcd that it reaches after it has lost all
	// connections; that etcd may be restored from a backup.
	wg.Go(func() {
		if waitDisconnected(ctx, f.conn) {
			cancel(errors.New("connection to etcd lost"))
		}
	})

	for resp := range f.responses {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch %s after %d: %w", prefix, after.Revision, translate(err))
		}
		if id := clusterOf(resp.Header); id != after.ClusterID {
			return fmt.Errorf("%w: cluster ID %x, was %x", mirror.ErrRestored, id, after.ClusterID)
		}
		s.feeds.member.Store(resp.Header.GetMemberId()) // the client may have moved
		b := driver.Batch{Through: after.Revision}
		switch {
		case len(resp.Events) > 0:
			b.Changes = make([]driver.Change, 0, len(resp.Events))
			for _, e := range resp.Events {
				b.Through = max(b.Through, e.Kv.ModRevision)
				if !s.outside(prefix, e.Kv.Key) {
					b.Changes = append(b.Changes, driver.Change{KV: fromKV(e.Kv), Deleted: e.Type == mvccpb.DELETE})
				}
			}
		case !resp.IsProgressNotify(), s.allKeys:
			continue
		case resp.Header.Revision < after.Revision:
			// A member that lags behind the previous one, or another state.
			if err := s.verify(ctx, after); err != nil {
				return err
			}
			continue
		default:
			b.Through = resp.Header.Revision
		}
		after.Revision = b.Through
		if err := deliver(b); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.New("etcd closed the watch")
}

// openFeed creates the watch, beginning at the revision start.
func (s *Source) openFeed(ctx context.Context, wg *sync.WaitGroup, prefix string, start mirror.Revision) (*feed, error) {
	endpoints := s.client.Endpoints()
	if s.feeds.silent.Load() && len(endpoints) > 0 {
		return s.openOnOtherMember(ctx, wg, endpoints, s.feeds.member.Load(), prefix, start)
	}
	f, err := s.createWatch(ctx, createTimeout, s.client, s.client.ActiveConnection(), prefix, start)
	if err != nil && ctx.Err() == nil && outOfTime(err) && len(endpoints) > 0 {
		return s.openOnOtherMember(ctx, wg, endpoints, 0, prefix, start)
	}
	return f, err
}

// createWatch creates the watch and returns when a member has confirmed it. Error, if that takes
// longer than the timeout.
func (s *Source) createWatch(ctx context.Context, timeout time.Duration, watcher clientv3.Watcher, conn *grpc.ClientConn, prefix string, start mirror.Revision) (*feed, error) {
	ctx, cancel := context.WithCancel(ctx)
	key, end := s.watched(prefix)
	opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithRev(start), clientv3.WithFragment(), clientv3.WithCreatedNotify()}
	if !s.eventsOnly {
		opts = append(opts, clientv3.WithProgressNotify())
	}
	// The client returns the channel only when the watch was created.
	begun := make(chan clientv3.WatchChan, 1)
	go func() { begun <- watcher.Watch(s.streamContext(ctx), key, opts...) }()
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	var responses clientv3.WatchChan
	for {
		select {
		case responses = <-begun:
			begun = nil
		case resp, ok := <-responses:
			if ok && resp.Created && !resp.Canceled {
				return &feed{watcher: watcher, conn: conn, responses: responses, member: resp.Header.MemberId, close: cancel}, nil
			}
			err := ctx.Err()
			cancel()
			if refused := resp.Err(); refused != nil {
				return nil, translate(refused)
			}
			if err != nil {
				return nil, err
			}
			return nil, errors.New("etcd closed the watch")
		case <-timer.C:
			cancel()
			return nil, fmt.Errorf("watch not created within %s: %w", timeout, context.DeadlineExceeded)
		case <-ctx.Done():
			cancel()
			return nil, context.Cause(ctx)
		}
	}
}

// openOnOtherMember creates the watch over a separate connection to one of the endpoints, on a
// member other than avoid if one of them creates it. A new connection also avoids a half-open one.
// The goroutines of the other attempts end soon after it returns; wg waits for them.
func (s *Source) openOnOtherMember(ctx context.Context, wg *sync.WaitGroup, endpoints []string, avoid uint64, prefix string, start mirror.Revision) (*feed, error) {
	type answer struct {
		feed *feed
		err  error
	}
	answers := make(chan answer)
	search, found := context.WithCancel(ctx)
	defer found()
	try := func(endpoint string) {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(ctx)
			stop := context.AfterFunc(search, cancel)
			f, err := s.createWatchAt(ctx, endpoint, prefix, start)
			if err != nil {
				cancel()
			} else {
				end := f.close
				f.close = func() { cancel(); end() }
			}
			stop()
			select {
			case answers <- answer{f, err}:
			case <-search.Done():
				if err == nil {
					f.close()
				}
			}
		})
	}
	var spare *feed
	var last error
	first, begun, answered := rand.IntN(len(endpoints)), 0, 0
	next := time.NewTimer(0)
	defer next.Stop()
	for answered < len(endpoints) {
		select {
		case <-next.C:
			if begun < len(endpoints) {
				try(endpoints[(first+begun)%len(endpoints)])
				begun++
				next.Reset(hedge)
			}
		case a := <-answers:
			answered++
			next.Reset(0)
			switch {
			case a.err != nil:
				last = a.err
			case a.feed.member != avoid:
				if spare != nil {
					spare.close()
				}
				return a.feed, nil
			case spare == nil:
				spare = a.feed
			default:
				a.feed.close()
			}
		case <-ctx.Done():
			if spare != nil {
				spare.close()
			}
			return nil, context.Cause(ctx)
		}
	}
	if spare == nil {
		return nil, fmt.Errorf("no member created the watch: %w", last)
	}
	return spare, nil
}

// createWatchAt is createWatch over a separate connection, which is closed with the feed.
func (s *Source) createWatchAt(ctx context.Context, endpoint, prefix string, start mirror.Revision) (*feed, error) {
	conn, err := s.dial(ctx, endpoint)
	if err != nil {
		return nil, err
	}
	watcher := clientv3.NewWatchFromWatchClient(pb.NewWatchClient(conn), s.client)
	f, err := s.createWatch(ctx, otherMemberTimeout, watcher, conn, prefix, start)
	if err != nil {
		_ = watcher.Close()
		_ = conn.Close()
		return nil, err
	}
	end := f.close
	f.close = func() {
		end()
		_ = watcher.Close()
		_ = conn.Close()
	}
	return f, nil
}

// waitDisconnected returns true when the connection (all of them, if it represents several) is
// lost, false when ctx ends. A call on it has succeeded before, so a connection that is not ready
// at the first look is lost, too. A client inside the server's process has no connection, and is
// restored with the server.
func waitDisconnected(ctx context.Context, conn *grpc.ClientConn) bool {
	if conn == nil {
		<-ctx.Done()
		return false
	}
	return conn.WaitForStateChange(ctx, connectivity.Ready)
}

// RequestProgress implements driver.Source. It does nothing after WithoutProgress or OfAllKeys.
func (s *Source) RequestProgress(ctx context.Context) error {
	f := s.feeds.current.Load()
	if s.eventsOnly || f == nil {
		return nil
	}
	return f.watcher.RequestProgress(s.streamContext(ctx))
}
