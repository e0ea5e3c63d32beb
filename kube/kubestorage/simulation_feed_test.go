package kubestorage_test

import (
	"cmp"
	"context"
	"io"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/etcdfeed"
)

// openFeed opens a stream to a feed, whose responses the simulation delivers.
func (c *simClient) openFeed(ctx context.Context, feed *etcdfeed.Server) pb.Watch_WatchClient {
	st := &simStream{ctx: ctx, responses: make(chan *pb.WatchResponse, 64), ended: make(chan error, 1)}
	served := simServed{stream: st, client: c, requests: make(chan *pb.WatchRequest, 64)}
	served.ctx, st.broken = context.WithCancel(ctx)
	c.mu.Lock()
	c.streams = append(c.streams, st)
	c.mu.Unlock()
	go func() {
		err := cmp.Or(feed.Watch(served), io.EOF)
		st.broken()
		c.mu.Lock()
		st.end = err
		c.mu.Unlock()
		c.signal()
	}()
	return simFollowing{st, served}
}

// simFollowing is a stream to a feed for its client.
type simFollowing struct {
	*simStream
	feed simServed
}

// Send implements pb.Watch_WatchClient.
func (s simFollowing) Send(in *pb.WatchRequest) error {
	if s.feed.ctx.Err() != nil {
		return io.EOF // as gRPC does once the stream has ended
	}
	select {
	case s.feed.requests <- in:
		return nil
	case <-s.feed.ctx.Done():
		return io.EOF
	}
}

// simServed is a stream to a feed for the feed.
type simServed struct {
	grpc.ServerStream
	ctx      context.Context
	stream   *simStream
	client   *simClient
	requests chan *pb.WatchRequest
}

// Context implements grpc.ServerStream.
func (s simServed) Context() context.Context { return s.ctx }

// Recv implements pb.Watch_WatchServer.
func (s simServed) Recv() (*pb.WatchRequest, error) {
	select {
	case in := <-s.requests:
		return in, nil
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

// Send implements pb.Watch_WatchServer. The connection has room for all responses.
func (s simServed) Send(resp *pb.WatchResponse) error {
	s.client.mu.Lock()
	s.stream.held = append(s.stream.held, resp)
	s.client.mu.Unlock()
	s.client.signal()
	return nil
}

// pass delivers at most n responses of feeds, or the ends of streams that have no others. It
// reports whether there were any.
func (c *simClient) pass(n int) (passed bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, st := range c.streams {
		for range min(n, len(st.held)) {
			st.responses <- st.held[0]
			st.held, passed, n = st.held[1:], true, n-1
		}
		if len(st.held) == 0 && st.end != nil && !passed {
			st.ended <- st.end
			st.end, passed = nil, true
		}
	}
	return passed
}
