package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	// dialTimeout bounds the wait for a separate connection.
	dialTimeout = 3 * time.Second
	// progressInterval is the interval of progress requests on a watch without events.
	progressInterval = 100 * time.Millisecond
)

// dial connects to one endpoint, separately from the client's own connections: its calls reach one
// member, and neither delay other traffic nor are delayed by it.
func (s *Source) dial(ctx context.Context, endpoint string) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	type dialed struct {
		conn *grpc.ClientConn
		err  error
	}
	done := make(chan dialed)
	go func() { // Dial may wait for a connection longer than its context
		conn, err := s.client.Dial(endpoint)
		select {
		case done <- dialed{conn, err}:
		case <-ctx.Done():
			if err == nil {
				_ = conn.Close()
			}
		}
	}()
	select {
	case d := <-done:
		return d.conn, d.err
	case <-ctx.Done():
		return nil, fmt.Errorf("connect to %s: %w", endpoint, ctx.Err())
	}
}

// permanent marks an error that a retry on another member cannot fix.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// triesPerMember bounds the attempts of onMembers.
const triesPerMember = 2

// onMembers calls f with a connection to one endpoint after the other, beginning at a random one,
// until it returns nil, the context's error, ErrCompacted, ErrRestored, or a permanent error. It
// returns f's last error when triesPerMember attempts per endpoint have failed in a row; an attempt
// that returns moved has made progress and resets the count.
func (s *Source) onMembers(ctx context.Context, f func(context.Context, *grpc.ClientConn) (moved bool, err error)) error {
	endpoints := s.client.Endpoints()
	if len(endpoints) == 0 {
		return errors.New("client has no endpoints: in-process clients are not supported")
	}
	backoff := 50 * time.Millisecond
	for i, tries := rand.IntN(len(endpoints)), 0; ; i++ {
		moved := false
		conn, err := s.dial(ctx, endpoints[i%len(endpoints)])
		if err == nil {
			moved, err = f(ctx, conn)
			_ = conn.Close()
		}
		var final permanent
		switch {
		case err == nil:
			return nil
		case errors.As(err, &final):
			return final.error
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(err, mirror.ErrCompacted), errors.Is(err, mirror.ErrRestored):
			return err
		}
		if tries++; moved {
			tries = 0
		}
		if tries >= triesPerMember*len(endpoints) {
			return err
		}
		select {
		case <-time.After(backoff):
			backoff = min(2*backoff, time.Second)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// watchStream is one watch on a separate gRPC stream. A stream with several watches receives
// progress only when all are synced, and a watch that is added to it could mistake earlier progress
// for its own.
type watchStream struct {
	stream  pb.Watch_WatchClient
	cluster uint64
	// time of the last response, as driver.Now counts; may be shared
	lastResponse      *atomic.Int64
	cancel            context.CancelFunc
	wg                sync.WaitGroup
	responded         atomic.Bool   // a response arrived since the last progress request
	progressRequested chan struct{} // requests progress now
}

// openWatchStream watches the keys from key up to end, beginning at the revision start. It requests
// progress while there are no responses, unless the source does not use progress. An empty end
// means the key alone. The caller has to close the stream.
func (s *Source) openWatchStream(ctx context.Context, conn *grpc.ClientConn, key, end string, start mirror.Revision, cluster uint64, heard *atomic.Int64) (*watchStream, error) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx))
	l := &watchStream{cluster: cluster, lastResponse: heard, cancel: cancel, progressRequested: make(chan struct{}, 1)}
	var err error
	l.stream, err = pb.NewWatchClient(conn).Watch(ctx, grpc.MaxCallRecvMsgSize(math.MaxInt32))
	if err == nil {
		create := &pb.WatchCreateRequest{Key: []byte(key), StartRevision: start, Fragment: true}
		if end != "" {
			create.RangeEnd = []byte(end)
		}
		err = l.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_CreateRequest{CreateRequest: create}})
	}
	if err != nil {
		cancel()
		return nil, rpctypes.Error(err)
	}
	if !s.eventsOnly {
		l.wg.Go(func() { l.requestProgressLoop(ctx) })
	}
	return l, nil
}

func (l *watchStream) close() {
	l.cancel()
	l.wg.Wait()
}

func (l *watchStream) requestProgressLoop(ctx context.Context) {
	ticker := time.NewTicker(progressInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if l.responded.Swap(false) {
				continue
			}
		case <-l.progressRequested:
		}
		if l.stream.Send(&pb.WatchRequest{RequestUnion: &pb.WatchRequest_ProgressRequest{ProgressRequest: &pb.WatchProgressRequest{}}}) != nil {
			return // receive fails too
		}
	}
}

// receive returns the next response with events or progress. With maxBytes, of keys and values, the
// rest of the response may be left out; 0 means no bound. Errors: ErrCompacted, ErrRestored.
func (l *watchStream) receive(maxBytes int) (*pb.WatchResponse, error) {
	for {
		r, err := l.part()
		if err != nil {
			return nil, err
		}
		if r.Created {
			continue
		}
		size := eventBytes(r.Events)
		for r.Fragment && (maxBytes == 0 || size < int64(maxBytes)) {
			more, err := l.part()
			if err != nil {
				return nil, err
			}
			size += eventBytes(more.Events)
			r.Events, r.Fragment = append(r.Events, more.Events...), more.Fragment
		}
		return r, nil
	}
}

// compactedError is ErrCompacted with the oldest available revision.
type compactedError struct{ oldestRevision mirror.Revision }

func (e *compactedError) Error() string {
	return fmt.Sprintf("%v: oldest available %d", mirror.ErrCompacted, e.oldestRevision)
}
func (e *compactedError) Unwrap() error { return mirror.ErrCompacted }

// part returns the next message of the stream.
func (l *watchStream) part() (*pb.WatchResponse, error) {
	r, err := l.stream.Recv()
	if err != nil {
		return nil, translate(rpctypes.Error(err))
	}
	l.lastResponse.Store(driver.Now())
	l.responded.Store(true)
	switch {
	case r.Header == nil || slices.ContainsFunc(r.Events, func(e *mvccpb.Event) bool { return e == nil || e.Kv == nil }):
		return nil, errors.New("etcd sent a watch response without a header, or an event without a key")
	case clusterOf(r.Header) != l.cluster:
		return nil, fmt.Errorf("%w: cluster ID %x, was %x", mirror.ErrRestored, r.Header.ClusterId, l.cluster)
	case r.CompactRevision != 0:
		return nil, &compactedError{oldestRevision: r.CompactRevision}
	case r.Canceled:
		return nil, fmt.Errorf("etcd canceled the watch: %s", r.CancelReason)
	}
	return r, nil
}

// requestProgress requests progress without delay.
func (l *watchStream) requestProgress() {
	select {
	case l.progressRequested <- struct{}{}:
	default:
	}
}
