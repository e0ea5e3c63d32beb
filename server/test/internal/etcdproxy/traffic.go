package etcdproxy

import (
	"maps"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// Kind is what a request is about, as far as its cost is concerned.
type Kind string

// The kinds of requests. A range inside a transaction belongs to the transaction.
const (
	Counts       Kind = "counts" // ranges that ask for a count alone
	Keys         Kind = "keys"   // ranges that ask for keys without values
	Values       Kind = "values" // ranges that ask for values
	Transactions Kind = "transactions"
	Watches      Kind = "watches"
	Leases       Kind = "leases"
	Others       Kind = "others"
)

// Traffic is what passed of a kind: messages of clients, messages of etcd, and their bytes without gRPC's framing.
type Traffic struct {
	Requests, RequestBytes int64
	Answers, AnswerBytes   int64
}

func kindOfRange(r *pb.RangeRequest) Kind {
	switch {
	case r.CountOnly:
		return Counts
	case r.KeysOnly:
		return Keys
	}
	return Values
}

func kindOf(method string, r *pb.RangeRequest) Kind {
	switch {
	case r != nil:
		return kindOfRange(r)
	case method == MethodTxn:
		return Transactions
	case method == MethodWatch:
		return Watches
	case strings.HasPrefix(method, "/etcdserverpb.Lease/"):
		return Leases
	}
	return Others
}

// Traffic returns what passed of each kind since the start or the last Reset. What a rule has answered or dropped counts
// as it reached the client.
func (p *Proxy) Traffic() map[Kind]Traffic {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.mu.traffic)
}

// Ranges returns the requests to KV/Range and KV/RangeStream since the start or the last Reset, in the order in which they came. Whenever
// MaxRanges are held the older half of them is forgotten. Ranges inside transactions are not among them. The requests are
// the caller's.
func (p *Proxy) Ranges() []*pb.RangeRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranges := make([]*pb.RangeRequest, 0, len(p.mu.ranges))
	for _, r := range p.mu.ranges {
		ranges = append(ranges, proto.CloneOf(r))
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

// Reset forgets what Ranges, Requests and Traffic return.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ranges, p.mu.requests, p.mu.traffic = nil, map[string]int64{}, map[Kind]Traffic{}
}

// came counts a message of a client.
func (p *Proxy) came(r Request, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.requests[r.Method]++
	kind := kindOf(r.Method, r.Range)
	t := p.mu.traffic[kind]
	t.Requests++
	t.RequestBytes += int64(size)
	p.mu.traffic[kind] = t
	if r.Range == nil {
		return
	}
	if len(p.mu.ranges) == MaxRanges {
		p.mu.ranges = slices.Delete(p.mu.ranges, 0, MaxRanges/2)
	}
	p.mu.ranges = append(p.mu.ranges, r.Range)
}

// answered counts a message of etcd.
func (p *Proxy) answered(kind Kind, size int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t := p.mu.traffic[kind]
	t.Answers++
	t.AnswerBytes += int64(size)
	p.mu.traffic[kind] = t
}
