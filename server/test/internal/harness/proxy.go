package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
)

// The methods that a Proxy knows by name, and thus keys of Requests.
const (
	MethodRange  = "/etcdserverpb.KV/Range"
	MethodTxn    = "/etcdserverpb.KV/Txn"
	MethodWatch  = "/etcdserverpb.Watch/Watch"
	MethodStatus = "/etcdserverpb.Maintenance/Status"
)

// MaxRanges is the most Range requests that a Proxy remembers. It bounds memory: about 20 MB.
const MaxRanges = 1 << 16

// Proxy passes gRPC on between clients and an etcd: metadata, messages, headers, trailers and status as they are, each
// stream as a stream of its own. It looks at Range requests and at answers to Status and at nothing else. It serves plain
// TCP, whatever the etcd does. When the etcd is stopped, requests fail as Unavailable, but connections to the proxy stay.
//
// Its methods may be called concurrently.
type Proxy struct {
	etcd   *Etcd
	conn   *grpc.ClientConn // to etcd
	server *grpc.Server
	group  sync.WaitGroup // the server, and of each call what carries the client's messages

	watches gate // for what watches deliver
	values  gate // for requests for values

	mu struct { // leaf
		sync.Mutex
		version  string // to report; "" for etcd's own
		ranges   []*pb.RangeRequest
		requests map[string]int64
	}
}

// Proxy starts a proxy before etcd, as long as the environment's processes: it sees every request and can hold back what
// watches deliver.
func (e *Env) Proxy(etcd *Etcd) *Proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	e.check(err)
	p := &Proxy{etcd: &Etcd{URL: "http://" + listener.Addr().String(), env: e}}
	p.mu.requests = map[string]int64{}

	transport := insecure.NewCredentials()
	if etcd.tls.CertFile != "" {
		config, err := etcd.tls.ClientConfig()
		e.check(err)
		transport = credentials.NewTLS(config)
	}
	_, address, _ := strings.Cut(etcd.URL, "://")
	p.conn, err = grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(rawCodec{}), grpc.MaxCallRecvMsgSize(math.MaxInt32), grpc.MaxCallSendMsgSize(math.MaxInt32)),
		// An etcd that starts again is found within a moment: by default that takes up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.5, MaxDelay: time.Second}}))
	e.check(err)
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
	e.AtEnd(func() {
		p.server.Stop()
		p.conn.Close()
		p.group.Wait()
	})
	return p
}

// Etcd returns the etcd as seen through the proxy: its URL is the proxy's. It is for flags and clients; what stops and
// starts the etcd is the one that Env.Proxy was given.
func (p *Proxy) Etcd() *Etcd { return p.etcd }

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

// SetVersion sets the server version that Maintenance/Status reports; "" for etcd's own.
func (p *Proxy) SetVersion(version string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.version = version
}

// Ranges returns the requests to KV/Range since the start or the last Reset, in the order in which they came. Whenever
// MaxRanges are held the older half of them is forgotten. Ranges inside transactions are not among them. The requests are
// the caller's.
func (p *Proxy) Ranges() []*pb.RangeRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranges := make([]*pb.RangeRequest, 0, len(p.mu.ranges))
	for _, r := range p.mu.ranges {
		c := *r
		c.Key, c.RangeEnd = slices.Clone(r.Key), slices.Clone(r.RangeEnd)
		ranges = append(ranges, &c)
	}
	return ranges
}

// Requests returns how many requests of each full gRPC method came since the start or the last Reset; for streams, how
// many messages of clients.
func (p *Proxy) Requests() map[string]int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.mu.requests)
}

// Reset forgets what Ranges and Requests return.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ranges, p.mu.requests = nil, map[string]int64{}
}

// pass handles one call.
func (p *Proxy) pass(_ any, client grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(client)
	ctx, cancel := context.WithCancel(client.Context())
	defer cancel()
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = metadata.NewOutgoingContext(ctx, md) // gRPC leaves out what belongs to the transport
	}
	etcd, err := p.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	if err != nil {
		return err
	}
	p.group.Go(func() { // ends with the call at the latest
		if err := p.requests(ctx, method, client, etcd); err != nil {
			cancel()
		}
	})
	err = p.responses(ctx, method, client, etcd)
	client.SetTrailer(etcd.Trailer())
	return err
}

// requests carries messages to etcd until there are no more; it returns an error if the client is gone.
func (p *Proxy) requests(ctx context.Context, method string, client grpc.ServerStream, etcd grpc.ClientStream) error {
	for {
		var message raw
		if err := client.RecvMsg(&message); errors.Is(err, io.EOF) {
			return etcd.CloseSend()
		} else if err != nil {
			return err
		}
		if r := p.count(method, message); r != nil && !r.CountOnly {
			if err := p.values.pass(ctx); err != nil {
				return err
			}
		}
		if err := etcd.SendMsg(&message); err != nil {
			return nil // etcd has ended the call, and responses learns how
		}
	}
}

// responses carries what etcd sends until it ends the call, and returns how.
func (p *Proxy) responses(ctx context.Context, method string, client grpc.ServerStream, etcd grpc.ClientStream) error {
	if header, err := etcd.Header(); err == nil && header != nil {
		if err := client.SendHeader(header); err != nil {
			return err
		}
	}
	for {
		var message raw
		// Before the read, so that etcd is held back as well; after it, because the stall may have begun meanwhile.
		if err := p.stalled(ctx, method); err != nil {
			return err
		}
		if err := etcd.RecvMsg(&message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := p.stalled(ctx, method); err != nil {
			return err
		}
		if method == MethodStatus {
			message = p.status(message)
		}
		if err := client.SendMsg(&message); err != nil {
			return err
		}
	}
}

// stalled returns when the method may deliver.
func (p *Proxy) stalled(ctx context.Context, method string) error {
	if method != MethodWatch {
		return nil
	}
	return p.watches.pass(ctx)
}

// count remembers a request; it returns those to KV/Range, which are not to be changed.
func (p *Proxy) count(method string, message raw) *pb.RangeRequest {
	request := &pb.RangeRequest{}
	isRange := method == MethodRange && request.Unmarshal(message) == nil // etcd refuses what cannot be decoded
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.requests[method]++
	if !isRange {
		return nil
	}
	if len(p.mu.ranges) == MaxRanges {
		p.mu.ranges = slices.Delete(p.mu.ranges, 0, MaxRanges/2)
	}
	p.mu.ranges = append(p.mu.ranges, request)
	return request
}

// status returns an answer to Status with the version to report.
func (p *Proxy) status(message raw) raw {
	p.mu.Lock()
	version := p.mu.version
	p.mu.Unlock()
	response := &pb.StatusResponse{}
	if version == "" || response.Unmarshal(message) != nil {
		return message
	}
	response.Version = version
	changed, err := response.Marshal()
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
