package etcdproxy

import (
	"maps"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/protobuf/proto"
)

// Kind is the kind of a request with respect to its cost.
type Kind string

// The kinds of requests. A range inside a transaction counts as part of the transaction.
const (
	Counts       Kind = "counts" // ranges for a count alone
	Keys         Kind = "keys"   // ranges for keys without values
	Values       Kind = "values" // ranges for values
	Transactions Kind = "transactions"
	Watches      Kind = "watches"
	Leases       Kind = "leases"
	Others       Kind = "others"
)

// Traffic is the traffic of one kind: the numbers of clients' and etcd's messages, and their bytes
// without gRPC's framing.
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

// Traffic returns the traffic of each kind since the start or the last Reset. Answers of rules, and
// messages that rules have changed or dropped, count in the form that reached the client.
func (p *Proxy) Traffic() map[Kind]Traffic {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.mu.traffic)
}

// Ranges returns the requests to KV/Range and KV/RangeStream since the start or the last Reset, in
// the order of arrival. At MaxRanges requests the older half is discarded. Ranges inside
// transactions are not included. The caller owns the requests.
func (p *Proxy) Ranges() []*pb.RangeRequest {
	p.mu.Lock()
	defer p.mu.Unlock()
	ranges := make([]*pb.RangeRequest, 0, len(p.mu.ranges))
	for _, r := range p.mu.ranges {
		ranges = append(ranges, proto.CloneOf(r))
	}
	return ranges
}

// Requests returns the number of requests per full gRPC method since the start or the last Reset;
// for streams, the number of clients' messages.
func (p *Proxy) Requests() map[string]int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.mu.requests)
}

// Reset clears the results of Ranges, Requests and Traffic.
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
