package etcdproxy

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
)

// Rule is a fault that a Proxy plays until it is removed, or has been played as often as it was to be. Its methods may be
// called concurrently.
type Rule struct {
	proxy *Proxy

	event EventMatch // of rules for events; nil for those for requests
	holds bool       // events, or requests

	request Match
	err     error // to answer with
	change  func(*pb.RangeRequest, *pb.RangeResponse)

	removed chan struct{} // closed by Remove

	// Guarded by the proxy's mutex.
	left    int // how often still; below 0 for always
	hits    int
	changed chan struct{} // closed and replaced with each hit
}

// Hits returns how many events or requests the rule was applied to.
func (r *Rule) Hits() int {
	r.proxy.mu.Lock()
	defer r.proxy.mu.Unlock()
	return r.hits
}

// Await returns when the rule was applied n times, or with ctx's error.
func (r *Rule) Await(ctx context.Context, n int) error {
	for {
		r.proxy.mu.Lock()
		hits, changed := r.hits, r.changed
		r.proxy.mu.Unlock()
		if hits >= n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("a rule of the proxy was applied %d times of %d: %w", hits, n, context.Cause(ctx))
		}
	}
}

// Remove ends the rule, and lets go what it holds: requests go on, held events are sent in order before it returns. It
// may be called more than once.
func (r *Rule) Remove() {
	p := r.proxy
	p.mu.Lock()
	select {
	case <-r.removed:
	default:
		close(r.removed)
	}
	p.setRulesLocked(slices.DeleteFunc(slices.Clone(*p.rules.Load()), func(other *Rule) bool { return other == r }))
	streams := slices.Clone(p.mu.streams)
	p.mu.Unlock()
	for _, s := range streams {
		s.flush()
	}
}

// take reports whether the rule is to be applied once more, which it then was.
func (r *Rule) take() bool {
	p := r.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.left == 0 {
		return false
	}
	select {
	case <-r.removed:
		return false
	default:
	}
	if r.left > 0 {
		r.left--
	}
	r.hits++
	close(r.changed)
	r.changed = make(chan struct{})
	return true
}

// add makes a rule apply; times below 1 is always.
func (p *Proxy) add(r *Rule, times int) *Rule {
	if times < 1 {
		times = -1
	}
	r.proxy, r.left, r.removed, r.changed = p, times, make(chan struct{}), make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.setRulesLocked(append(slices.Clip(*p.rules.Load()), r))
	return r
}

// setRulesLocked needs p.mu.
func (p *Proxy) setRulesLocked(rules []*Rule) { p.rules.Store(&rules) }

// EventMatch chooses events of watches. It must not keep or change them, and may be called for an event more than once.
type EventMatch func(*mvccpb.Event) bool

// Key matches the events of one key.
func Key(key string) EventMatch {
	return func(e *mvccpb.Event) bool { return string(e.Kv.Key) == key }
}

// Prefix matches the events of keys with a prefix.
func Prefix(prefix string) EventMatch {
	return func(e *mvccpb.Event) bool { return bytes.HasPrefix(e.Kv.Key, []byte(prefix)) }
}

// Creates matches the events of keys that did not exist before.
func Creates(e *mvccpb.Event) bool { return e.Type == mvccpb.PUT && e.Kv.Version == 1 }

// Updates matches the events of keys that existed before, and still do.
func Updates(e *mvccpb.Event) bool { return e.Type == mvccpb.PUT && e.Kv.Version > 1 }

// Deletes matches the events of keys that are no more.
func Deletes(e *mvccpb.Event) bool { return e.Type == mvccpb.DELETE }

// Events matches what all of the matches do.
func Events(matches ...EventMatch) EventMatch {
	return func(e *mvccpb.Event) bool {
		return !slices.ContainsFunc(matches, func(m EventMatch) bool { return !m(e) })
	}
}

// DropEvents takes the next events that match out of what etcd sends on watch streams; as many as times says, all if it is
// 0. An event that two watches are told of is two. A response of which nothing is left is not sent.
func (p *Proxy) DropEvents(match EventMatch, times int) *Rule {
	return p.add(&Rule{event: match}, times)
}

// HoldEvents holds back responses with events that match, and all later events of the same stream with them, while
// progress notifications pass: the client is told of progress ahead of events. Remove lets them go, in order.
func (p *Proxy) HoldEvents(match EventMatch) *Rule {
	return p.add(&Rule{event: match, holds: true}, 0)
}

// Request is a request of a client, of a unary call or of KV/RangeStream.
type Request struct {
	Method string           // the full gRPC method
	Range  *pb.RangeRequest // of MethodRange and MethodStream
	Txn    *pb.TxnRequest   // of MethodTxn
}

// Match chooses requests. It must not keep or change them.
type Match func(Request) bool

// Method matches the requests of a gRPC method.
func Method(method string) Match { return func(r Request) bool { return r.Method == method } }

// CountsOf matches ranges that ask for a count alone and begin at a key with the prefix. Revisions are read that way.
func CountsOf(prefix string) Match { return rangesOf(Counts, prefix) }

// KeysOf matches ranges that ask for keys only and begin at a key with the prefix.
func KeysOf(prefix string) Match { return rangesOf(Keys, prefix) }

// ValuesOf matches ranges that ask for values and begin at a key with the prefix.
func ValuesOf(prefix string) Match { return rangesOf(Values, prefix) }

func rangesOf(kind Kind, prefix string) Match {
	return func(r Request) bool {
		return r.Range != nil && kindOfRange(r.Range) == kind && strings.HasPrefix(string(r.Range.Key), prefix)
	}
}

// HoldRequests holds the next requests that match, before etcd sees them, until the rule is removed or their callers give
// up; as many as times says, all if it is 0.
func (p *Proxy) HoldRequests(match Match, times int) *Rule {
	return p.add(&Rule{request: match, holds: true}, times)
}

// FailRequests answers the next requests that match with err, a gRPC status or an error of rpctypes, and etcd does not see
// them.
func (p *Proxy) FailRequests(match Match, times int, err error) *Rule {
	return p.add(&Rule{request: match, err: err}, times)
}

// ChangeRanges lets change work on the answers to the next KV/Range and KV/RangeStream requests that match, of a stream on each
// part; it must not change the request.
// It is called by the goroutine of the request.
func (p *Proxy) ChangeRanges(match Match, times int, change func(*pb.RangeRequest, *pb.RangeResponse)) *Rule {
	return p.add(&Rule{request: match, change: change}, times)
}

// Backdate replaces the revision in the header of answers to the next KV/Range requests that match by what older makes of
// it: a revision read then tells of a past.
func (p *Proxy) Backdate(match Match, times int, older func(revision int64) int64) *Rule {
	return p.ChangeRanges(match, times, func(_ *pb.RangeRequest, r *pb.RangeResponse) {
		if r.Header != nil {
			r.Header.Revision = older(r.Header.Revision)
		}
	})
}
