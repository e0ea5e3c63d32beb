// Package etcdproxy passes gRPC on between etcd clients and an etcd, counts what passes, and plays faults: events that are
// lost, progress that is told ahead of events, revision reads that tell of a past, requests that hang or fail.
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

// The methods that a Proxy knows by name, and thus keys of Requests.
const (
	MethodRange  = "/etcdserverpb.KV/Range"
	MethodStream = "/etcdserverpb.KV/RangeStream" // a range that is answered in parts
	MethodTxn    = "/etcdserverpb.KV/Txn"
	MethodWatch  = "/etcdserverpb.Watch/Watch"
	MethodStatus = "/etcdserverpb.Maintenance/Status"
)

// MaxRanges is the most Range requests that a Proxy remembers. It bounds memory: about 20 MB.
const MaxRanges = 1 << 16

// Proxy passes gRPC on between clients and an etcd: metadata, messages, headers, trailers and status as they are, each
// stream as a stream of its own. It looks at Range requests and at answers to Status; at other messages only while there
// are rules for them. It serves plain TCP, whatever the etcd does. When the etcd is stopped, requests fail as
// Unavailable, but connections to the proxy stay.
//
// Its methods may be called concurrently.
type Proxy struct {
	address string
	conn    *grpc.ClientConn // to etcd
	server  *grpc.Server
	group   sync.WaitGroup // the server, and of each call what carries the client's messages

	watches gate                    // for what watches deliver
	values  gate                    // for requests for values
	rules   atomic.Pointer[[]*Rule] // never nil, never written again; see setRulesLocked
	delay   atomic.Pointer[func(method string) time.Duration]

	mu struct { // leaf
		sync.Mutex
		version  string // to report; "" for etcd's own
		ranges   []*pb.RangeRequest
		requests map[string]int64
		traffic  map[Kind]Traffic
		streams  []*watchStream
	}
}

// Start starts a proxy on loopback before the etcd that serves clients at an address (host and port), with TLS unless
// config is nil. It has to be closed.
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
		// An etcd that starts again is found within a moment: by default that takes up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}}))
	if err != nil {
		listener.Close()
		return nil, err
	}
	p.server = grpc.NewServer(
		grpc.ForceServerCodec(rawCodec{}), grpc.MaxRecvMsgSize(math.MaxInt32), grpc.MaxSendMsgSize(math.MaxInt32),
		grpc.UnknownServiceHandler(p.pass), grpc.WaitForHandlers(true),
		// API servers send keepalives every 30 s; a gRPC server ends connections for more than one in 5 minutes.
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))
	p.group.Go(func() {
		if err := p.server.Serve(listener); err != nil {
			fmt.Fprintln(os.Stderr, "etcd proxy:", err) // clients see that nobody serves
		}
	})
	return p, nil
}

// URL is where the proxy serves clients.
func (p *Proxy) URL() string { return "http://" + p.address }

// Close ends all calls and returns when nothing of the proxy runs any longer.
func (p *Proxy) Close() {
	p.server.Stop()
	p.conn.Close()
	p.group.Wait()
}

// Stall holds back what etcd sends on watch streams, those that exist and new ones, until it is called with false.
// Everything else passes, and so does what clients send on watch streams. Nothing is gathered meanwhile: the streams are
// not read, and gRPC's flow control tells etcd.
//
// What the proxy had read before may still arrive; what etcd sends because of anything that began after Stall returned
// does not.
func (p *Proxy) Stall(on bool) { p.watches.set(on) }

// Hold holds back requests to KV/Range for values, not for counts alone, until it is called with false. They are counted
// when they come.
func (p *Proxy) Hold(on bool) { p.values.set(on) }

// Delay holds each message of etcd for as long as f says, which is called with the full gRPC method; nil ends it. Messages of
// one call stay in order, while what belongs to different calls overtakes each other.
func (p *Proxy) Delay(f func(method string) time.Duration) {
	if f == nil {
		p.delay.Store(nil)
		return
	}
	p.delay.Store(&f)
}

// delayed returns when a message of the method has been held for as long as it is to be.
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
	watch  *watchStream // of MethodWatch

	asked atomic.Pointer[question] // of a unary call, before etcd gets it
}

// question is what a client has asked.
type question struct {
	Request
	changes []*Rule // of the answer
}

// refusal is the cause with which a call is cancelled that etcd is not to see.
type refusal struct{ error }

// pass handles one call.
func (p *Proxy) pass(_ any, client grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(client)
	ctx, cancel := context.WithCancelCause(client.Context())
	defer cancel(nil)
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md) // gRPC leaves out what belongs to the transport
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
	p.group.Go(func() { // ends with the call at the latest
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

// requests carries messages to etcd until there are no more; it returns an error if the client is gone or refused.
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
			return nil // etcd has ended the call, and responses learns how
		}
	}
}

// request counts a message of a client, and returns when and if it may pass.
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

// decode returns a request of which it decodes ranges, and transactions if there are rules. What cannot be decoded etcd
// refuses.
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

// responses carries what etcd sends until it ends the call, and returns how.
func (p *Proxy) responses(ctx context.Context, c *call) error {
	if header, err := c.etcd.Header(); err == nil && header != nil {
		if err := c.client.SendHeader(header); err != nil {
			return err
		}
	}
	for {
		var message raw
		// Before the read, so that etcd is held back as well; after it, because the stall may have begun meanwhile.
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

// changed returns what the rules make of an answer to a range. Of a stream that is each part.
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

func (p *Proxy) openStream(client grpc.ServerStream) *watchStream {
	s := &watchStream{proxy: p, client: client}
	s.mu.watches = map[int64]keyRange{}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.streams = append(p.mu.streams, s)
	return s
}

func (p *Proxy) closeStream(s *watchStream) {
	p.mu.Lock()
	p.mu.streams = slices.DeleteFunc(p.mu.streams, func(other *watchStream) bool { return other == s })
	p.mu.Unlock()
	s.mu.Lock() // nobody may send once the call has ended
	defer s.mu.Unlock()
	s.mu.closed = true
}

// stalled returns when the method may deliver.
func (p *Proxy) stalled(ctx context.Context, method string) error {
	if method != MethodWatch {
		return nil
	}
	return p.watches.pass(ctx)
}

// status returns an answer to Status with the version to report.
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

// gate holds back whoever wants to pass while it is shut. The zero value is open.
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

// rawCodec passes messages of type *raw on. Its name is that of the codec that the two ends use.
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
