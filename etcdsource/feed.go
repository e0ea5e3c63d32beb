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
)

const (
	// createTimeout is when a member that has not begun a watch is not waited for any longer,
	// if another can be asked. Far more than it takes, far less than what readers put up
	// with. A guess.
	createTimeout = time.Second
	// otherMemberTimeout is the same where others are asked meanwhile.
	otherMemberTimeout = 5 * time.Second
	// hedge is when the next member is asked to begin a watch though the last one was not
	// heard of yet.
	hedge = 200 * time.Millisecond
)

// feeds is what a source knows of its feeds.
type feeds struct {
	current atomic.Pointer[feed] // the running one, nil if none is
	// silent: the last one fell silent, so the next does not begin where it was.
	silent atomic.Bool
	// member is where the last one was, 0 if that is not known.
	member atomic.Uint64
}

// feed is one watch of the whole prefix, or of all keys, that etcd has begun.
type feed struct {
	watcher   clientv3.Watcher
	conn      *grpc.ClientConn // that it runs over; nil inside the server's process
	responses clientv3.WatchChan
	member    uint64
	close     func()
}

// Watch implements mirror.Source. It asks for no previous values: the mirror holds
// them (k/k#130939). etcd never splits a revision over two responses but by
// fragmenting one, and the client joins fragments; so each response is a batch of
// complete revisions.
//
// It runs over the client's connections, on the member whose turn it is. If that does not
// begin it within createTimeout, or the Watch before was ended with the cause
// mirror.ErrFeedSilent, it runs over a connection of its own, to the first member that begins it
// and is not the silent one, if there is another.
func (s *Source) Watch(ctx context.Context, prefix string, after mirror.Header, deliver func(mirror.Batch) error) error {
	caller := ctx
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if err := s.verify(ctx, after); err != nil {
		return err
	}
	f, err := s.open(ctx, &wg, prefix, after.Revision+1)
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
	// The client resumes a watch by itself, on whatever etcd it finds when it has
	// lost all connections; that may be one restored from a backup.
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
			return fmt.Errorf("%w: cluster %x, was %x", mirror.ErrRestored, id, after.ClusterID)
		}
		b := mirror.Batch{Through: after.Revision}
		switch {
		case len(resp.Events) > 0:
			b.Changes = make([]mirror.Change, 0, len(resp.Events))
			for _, e := range resp.Events {
				b.Through = max(b.Through, e.Kv.ModRevision)
				if !s.outside(prefix, e.Kv.Key) {
					b.Changes = append(b.Changes, mirror.Change{KV: fromKV(e.Kv), Deleted: e.Type == mvccpb.DELETE})
				}
			}
		case !resp.IsProgressNotify(), s.allKeys:
			continue
		case resp.Header.Revision < after.Revision:
			// A member that lags behind the one that served us before, or another state.
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

// open begins the watch from the revision start on.
func (s *Source) open(ctx context.Context, wg *sync.WaitGroup, prefix string, start mirror.Revision) (*feed, error) {
	endpoints := s.client.Endpoints()
	if s.feeds.silent.Load() && len(endpoints) > 0 {
		return s.openOnOtherMember(ctx, wg, endpoints, s.feeds.member.Load(), prefix, start)
	}
	f, err := s.begin(ctx, createTimeout, s.client, s.client.ActiveConnection(), prefix, start)
	if err != nil && ctx.Err() == nil && outOfTime(err) && len(endpoints) > 0 {
		return s.openOnOtherMember(ctx, wg, endpoints, 0, prefix, start)
	}
	return f, err
}

// begin opens the watch and returns when a member has begun it, which it has to within the
// timeout.
func (s *Source) begin(ctx context.Context, timeout time.Duration, watcher clientv3.Watcher, conn *grpc.ClientConn, prefix string, start mirror.Revision) (*feed, error) {
	ctx, cancel := context.WithCancel(ctx)
	key, end := s.watched(prefix)
	opts := []clientv3.OpOption{clientv3.WithRange(end), clientv3.WithRev(start), clientv3.WithFragment(), clientv3.WithCreatedNotify()}
	if !s.eventsOnly {
		opts = append(opts, clientv3.WithProgressNotify())
	}
	// The client returns the channel only when the watch has begun.
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
			cancel()
			if err := resp.Err(); err != nil {
				return nil, translate(err)
			}
			if err := ctx.Err(); err != nil {
				return nil, err
			}
			return nil, errors.New("etcd closed the watch")
		case <-timer.C:
			cancel()
			return nil, fmt.Errorf("no member has begun it within %s: %w", timeout, context.DeadlineExceeded)
		case <-ctx.Done():
			cancel()
			return nil, context.Cause(ctx)
		}
	}
}

// openOnOtherMember begins the watch over a connection of its own to one of the endpoints, on a
// member other than avoid if there is one that begins it. A new connection also gets past one
// that is half open. What it starts beside ends soon after it returns; wg tells when.
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
			f, err := s.beginAt(ctx, endpoint, prefix, start)
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
		return nil, fmt.Errorf("no member begins it: %w", last)
	}
	return spare, nil
}

// beginAt is begin over a connection of its own, which ends with the feed.
func (s *Source) beginAt(ctx context.Context, endpoint, prefix string, start mirror.Revision) (*feed, error) {
	conn, err := s.dial(ctx, endpoint)
	if err != nil {
		return nil, err
	}
	watcher := clientv3.NewWatchFromWatchClient(pb.NewWatchClient(conn), s.client)
	f, err := s.begin(ctx, otherMemberTimeout, watcher, conn, prefix, start)
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

// waitDisconnected returns true when the connection, or all if it stands for several, is
// lost, false when ctx ends. A client inside the server's process has none, and is restored with it.
func waitDisconnected(ctx context.Context, conn *grpc.ClientConn) bool {
	if conn == nil {
		<-ctx.Done()
		return false
	}
	for {
		state := conn.GetState()
		if !conn.WaitForStateChange(ctx, state) {
			return false
		}
		if state == connectivity.Ready {
			return true
		}
	}
}

// RequestProgress implements mirror.Source. It does nothing after WithoutProgress or OfAllKeys.
func (s *Source) RequestProgress(ctx context.Context) error {
	f := s.feeds.current.Load()
	if s.eventsOnly || f == nil {
		return nil
	}
	return f.watcher.RequestProgress(s.streamContext(ctx))
}
