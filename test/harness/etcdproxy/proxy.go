// Package etcdproxy proxies gRPC between etcd clients and an etcd, counts the traffic, and injects
// faults: lost events, progress notifications ahead of events, revision reads with old revisions,
// requests that hang or fail.
package etcdproxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// The gRPC methods that a Proxy handles specially, also for use as keys of Requests.
const (
	MethodRange  = "/etcdserverpb.KV/Range"
	MethodStream = "/etcdserverpb.KV/RangeStream" // a range with a streamed answer
	MethodTxn    = "/etcdserverpb.KV/Txn"
	MethodWatch  = "/etcdserverpb.Watch/Watch"
	MethodStatus = "/etcdserverpb.Maintenance/Status"
)

// MaxRanges is the maximum number of Range requests that a Proxy records. It bounds memory: about
// 20 MB.
const MaxRanges = 1 << 16

// Proxy forwards gRPC between clients and an etcd: metadata, messages, headers, trailers and status
// unchanged, each stream as a separate stream. It decodes Range requests and answers to Status;
// other messages only while there are rules for them. It serves plain TCP, whether or not the etcd
// uses TLS. When the etcd is stopped, requests fail as Unavailable, but connections to the proxy
// stay open.
//
// Its methods may be called concurrently.
type Proxy struct {
	address string
	conn    *grpc.ClientConn // to etcd
	server  *grpc.Server
	group   sync.WaitGroup // the server, and a goroutine per call for the client's messages

	watches gate                    // for messages to watches
	values  gate                    // for requests for values
	rules   atomic.Pointer[[]*Rule] // never nil, immutable; see setRulesLocked
	delay   atomic.Pointer[func(method string) time.Duration]

	mu struct { // leaf
		sync.Mutex
		version  string // to report; "" for etcd's own
		ranges   []*pb.RangeRequest
		requests map[string]int64
		traffic  map[Kind]Traffic
		streams  []*proxiedStream
	}
}

// Start starts a proxy on loopback for the etcd at an address (host and port), with TLS unless
// config is nil. The caller has to close the proxy.
func Start(etcd string, config *tls.Config) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{address: listener.Addr().String()}
	p.rules.Store(&[]*Rule{})
	p.Reset()
	transport := insecure.NewCredentials()
	if config != nil {
		transport = credentials.NewTLS(config)
	}
	p.conn, err = grpc.NewClient("passthrough:///"+etcd,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)),
		// Reconnect to a restarted etcd at once: the default backoff is up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}}))
	if err != nil {
		listener.Close()
		return nil, err
	}
	p.server = grpc.NewServer(
		grpc.ForceServerCodec(rawCodec{}), grpc.MaxRecvMsgSize(math.MaxInt32), grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.UnknownServiceHandler(p.pass), grpc.WaitForHandlers(true),
		// API servers send keepalives every 30 s; by default a gRPC server closes connections with
		// more than one in 5 minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
	p.group.Go(func() {
		if err := p.server.Serve(listener); err != nil {
			fmt.Fprintln(os.Stderr, "etcd proxy:", err) // clients see a refused connection
		}
	})
	return p, nil
}

// URL is the proxy's client URL.
func (p *Proxy) URL() string { return "http://" + p.address }

// Close ends all calls and returns when all goroutines of the proxy have ended.
func (p *Proxy) Close() {
	p.server.Stop()
	p.conn.Close()
	p.group.Wait()
}

// Stall blocks etcd's messages on existing and new watch streams until it is called with false. All
// other traffic passes, including clients' messages on watch streams. The proxy does not buffer
// meanwhile: it does not read the streams, and gRPC's flow control stops etcd.
//
// Messages that the proxy had read before may still be delivered; responses to operations that
// began after Stall returned are not.
func (p *Proxy) Stall(on bool) { p.watches.set(on) }

// Hold blocks KV/Range requests for values, not for counts alone, until it is called with false.
// They are counted on arrival.
func (p *Proxy) Hold(on bool) { p.values.set(on) }

// Delay delays each message of etcd by the duration that f returns for the full gRPC method; a nil
// f ends it. Messages of one call stay in order, while messages of different calls may be
// reordered.
func (p *Proxy) Delay(f func(method string) time.Duration) {
	if f == nil {
		p.delay.Store(nil)
		return
	}
	p.delay.Store(&f)
}

// delayed returns when the delay of a message of the method has passed.
func (p *Proxy) delayed(ctx context.Context, method string) error {
	delay := p.delay.Load()
	if delay == nil {
		return nil
	}
	select {
	case <-time.After((*delay)(method)):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// SetVersion sets the server version that Maintenance/Status reports; "" for etcd's own.
func (p *Proxy) SetVersion(version string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.version = version
}

// call is one call of a client.
type call struct {
	method string
	client grpc.ServerStream
	etcd   grpc.ClientStream
	cancel context.CancelCauseFunc
	watch  *proxiedStream // of MethodWatch

	asked atomic.Pointer[question] // of a unary call, before it is forwarded to etcd
}

// question is a client's request.
type question struct {
	Request
	changes []*Rule // of the answer
}

// refusal is the cancellation cause of a call that is not forwarded to etcd.
type refusal struct{ error }

// pass handles one call.
func (p *Proxy) pass(_ any, client grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(client)
	ctx, cancel := context.WithCancelCause(client.Context())
	defer cancel(nil)
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md) // gRPC omits the transport's own headers
	}
	etcd, err := p.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	if err != nil {
		return err
	}
	c := &call{method: method, client: client, etcd: etcd, cancel: cancel}
	if method == MethodWatch {
		c.watch = p.openStream(client)
		defer p.closeStream(c.watch)
	}
	p.group.Go(func() { // ends no later than the call
		if err := p.requests(ctx, c); err != nil {
			cancel(err)
		}
	})
	err = p.responses(ctx, c)
	var refused refusal
	if errors.As(context.Cause(ctx), &refused) {
		return refused.error
	}
	client.SetTrailer(etcd.Trailer())
	return err
}

// requests forwards a client's messages to etcd until the last one; it returns an error if the
// client has disconnected or a rule refused the call.
func (p *Proxy) requests(ctx context.Context, c *call) error {
	for {
		var message raw
		if err := c.client.RecvMsg(&message); errors.Is(err, io.EOF) {
			return c.etcd.CloseSend()
		} else if err != nil {
			return err
		}
		if err := p.request(ctx, c, message); err != nil {
			return err
		}
		if err := c.etcd.SendMsg(&message); err != nil {
			return nil // etcd has ended the call, and responses returns its status
		}
	}
}

// request counts a message of a client, and returns when the message may be forwarded, or an error.
func (p *Proxy) request(ctx context.Context, c *call, message raw) error {
	if c.watch != nil {
		p.came(Request{Method: c.method}, len(message))
		c.watch.note(message)
		return nil
	}
	rules := *p.rules.Load()
	a := &question{Request: decode(c.method, message, len(rules) > 0)}
	p.came(a.Request, len(message))
	c.asked.Store(a)
	if a.Range != nil && !a.Range.CountOnly {
		if err := p.values.pass(ctx); err != nil {
			return err
		}
	}
	for _, r := range rules {
		if r.request == nil || !r.request(a.Request) || !r.take() {
			continue
		}
		switch {
		case r.holds:
			select {
			case <-r.removed:
			case <-ctx.Done():
				return ctx.Err()
			}
		case r.change != nil:
			a.changes = append(a.changes, r)
		default:
			return refusal{r.err}
		}
	}
	return nil
}

// decode returns a request with its range decoded, and its transaction if all is set. It ignores
// invalid messages, which etcd refuses.
func decode(method string, message raw, all bool) Request {
	r := Request{Method: method}
	switch {
	case method == MethodRange, method == MethodStream:
		if request := (&pb.RangeRequest{}); proto.Unmarshal(message, request) == nil {
			r.Range = request
		}
	case method == MethodTxn && all:
		if request := (&pb.TxnRequest{}); proto.Unmarshal(message, request) == nil {
			r.Txn = request
		}
	}
	return r
}

// responses forwards etcd's messages until etcd ends the call, and returns its status.
func (p *Proxy) responses(ctx context.Context, c *call) error {
	if header, err := c.etcd.Header(); err == nil && header != nil {
		if err := c.client.SendHeader(header); err != nil {
			return err
		}
	}
	for {
		var message raw
		// Before the read, to apply back pressure to etcd; after it, because the stall may have
		// begun meanwhile.
		if err := p.stalled(ctx, c.method); err != nil {
			return err
		}
		if err := c.etcd.RecvMsg(&message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := p.stalled(ctx, c.method); err != nil {
			return err
		}
		if err := p.delayed(ctx, c.method); err != nil {
			return err
		}
		if err := p.response(c, message); err != nil {
			return err
		}
	}
}

// response sends a message of etcd to the client.
func (p *Proxy) response(c *call, message raw) error {
	if c.watch != nil {
		return c.watch.deliver(message)
	}
	var request question
	if a := c.asked.Load(); a != nil {
		request = *a
	}
	switch {
	case c.method == MethodStatus:
		message = p.status(message)
	case len(request.changes) > 0 && request.Range != nil:
		changed, err := request.changed(message)
		if err != nil {
			return err
		}
		message = changed
	}
	p.answered(kindOf(c.method, request.Range), len(message))
	return c.client.SendMsg(&message)
}

// changed returns the answer to a range after the rules' changes. For a stream it is called for
// each part.
func (q *question) changed(message raw) (raw, error) {
	response := &pb.RangeResponse{}
	var whole proto.Message = response
	if q.Method == MethodStream {
		whole = &pb.RangeStreamResponse{RangeResponse: response}
	}
	if err := proto.Unmarshal(message, whole); err != nil {
		return nil, err
	}
	if part, ok := whole.(*pb.RangeStreamResponse); ok {
		if part.RangeResponse == nil {
			return message, nil
		}
		response = part.RangeResponse
	}
	for _, r := range q.changes {
		r.change(q.Range, response)
	}
	return proto.Marshal(whole)
}

func (p *Proxy) openStream(client grpc.ServerStream) *proxiedStream {
	s := &proxiedStream{proxy: p, client: client}
	s.mu.watches = map[int64]keyRange{}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.streams = append(p.mu.streams, s)
	return s
}

func (p *Proxy) closeStream(s *proxiedStream) {
	p.mu.Lock()
	p.mu.streams = slices.DeleteFunc(p.mu.streams, func(other *proxiedStream) bool { return other == s })
	p.mu.Unlock()
	s.mu.Lock() // sending after the end of the call is not allowed
	defer s.mu.Unlock()
	s.mu.closed = true
}

// stalled returns when messages of the method may be delivered.
func (p *Proxy) stalled(ctx context.Context, method string) error {
	if method != MethodWatch {
		return nil
	}
	return p.watches.pass(ctx)
}

// status returns an answer to Status with the configured version.
func (p *Proxy) status(message raw) raw {
	p.mu.Lock()
	version := p.mu.version
	p.mu.Unlock()
	response := &pb.StatusResponse{}
	if version == "" || proto.Unmarshal(message, response) != nil {
		return message
	}
	response.Version = version
	changed, err := proto.Marshal(response)
	if err != nil {
		return message
	}
	return changed
}

// gate blocks callers of pass while it is shut. The zero value is open.
type gate struct {
	mu   sync.Mutex    // leaf
	shut chan struct{} // closed when the gate opens; nil while it is open
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch isShut := g.shut != nil; {
	case shut && !isShut:
		g.shut = make(chan struct{})
	case !shut && isShut:
		close(g.shut)
		g.shut = nil
	}
}

// pass returns when the gate is open, or with ctx's error.
func (g *gate) pass(ctx context.Context) error {
	for {
		g.mu.Lock()
		shut := g.shut
		g.mu.Unlock()
		if shut == nil {
			return nil
		}
		select {
		case <-shut:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// raw is a message as it is on the wire.
type raw []byte

// rawCodec encodes and decodes messages of type *raw unchanged. Its name is that of the codec of
// both ends.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) {
	message, ok := v.(*raw)
	if !ok {
		return nil, fmt.Errorf("proxy: a message of type %T", v)
	}
	return *message, nil
}

func (rawCodec) Unmarshal(data []byte, v any) error {
	message, ok := v.(*raw)
	if !ok {
		return fmt.Errorf("proxy: a message of type %T", v)
	}
	*message = data
	return nil
}
