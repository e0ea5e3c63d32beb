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

// Rule is a fault that a Proxy injects until the rule is removed, or was applied the given number
// of times. Its methods may be called concurrently.
type Rule struct {
	proxy *Proxy

	event EventMatch // for event rules; nil for request rules
	holds bool       // events, or requests

	request Match
	err     error // the answer
	change  func(*pb.RangeRequest, *pb.RangeResponse)

	removed chan struct{} // closed by Remove

	// Guarded by the proxy's mutex.
	left    int // remaining applications; below 0 for no limit
	hits    int
	changed chan struct{} // closed and replaced at each hit
}

// Hits returns the number of events or requests to which the rule was applied.
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

// Remove ends the rule and releases its requests and events: requests continue, held events are
// sent in order before Remove returns. It may be called more than once.
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

// take reports whether the rule applies once more, and counts the application.
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

// add activates a rule; times below 1 means no limit.
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

// setRulesLocked replaces the rules. The caller holds p.mu.
func (p *Proxy) setRulesLocked(rules []*Rule) { p.rules.Store(&rules) }

// EventMatch selects watch events. It must not retain or change them, and may be called several
// times for an event.
type EventMatch func(*mvccpb.Event) bool

// Key matches the events of one key.
func Key(key string) EventMatch {
	return func(e *mvccpb.Event) bool { return string(e.Kv.Key) == key }
}

// Prefix matches the events of keys with a prefix.
func Prefix(prefix string) EventMatch {
	return func(e *mvccpb.Event) bool { return bytes.HasPrefix(e.Kv.Key, []byte(prefix)) }
}

// Creates matches the events of created keys.
func Creates(e *mvccpb.Event) bool { return e.Type == mvccpb.PUT && e.Kv.Version == 1 }

// Updates matches the events of updated keys.
func Updates(e *mvccpb.Event) bool { return e.Type == mvccpb.PUT && e.Kv.Version > 1 }

// Deletes matches the events of deleted keys.
func Deletes(e *mvccpb.Event) bool { return e.Type == mvccpb.DELETE }

// Events matches the events that all matches match.
func Events(matches ...EventMatch) EventMatch {
	return func(e *mvccpb.Event) bool {
		return !slices.ContainsFunc(matches, func(m EventMatch) bool { return !m(e) })
	}
}

// DropEvents removes the next matching events from etcd's messages on watch streams; at most times,
// all if it is 0. An event for two watches counts twice. A response without remaining events is not
// sent.
func (p *Proxy) DropEvents(match EventMatch, times int) *Rule {
	return p.add(&Rule{event: match}, times)
}

// HoldEvents holds responses with matching events, and all later events of the same stream, while
// progress notifications pass: the client receives progress ahead of events. Remove releases the
// responses in order.
func (p *Proxy) HoldEvents(match EventMatch) *Rule {
	return p.add(&Rule{event: match, holds: true}, 0)
}

// Request is a request of a client, in a unary call or a KV/RangeStream.
type Request struct {
	Method string           // the full gRPC method
	Range  *pb.RangeRequest // of MethodRange and MethodStream
	Txn    *pb.TxnRequest   // of MethodTxn
}

// Match selects requests. It must not retain or change them.
type Match func(Request) bool

// CountsOf matches ranges for a count alone that begin at a key with the prefix. Revision reads
// have this form.
func CountsOf(prefix string) Match { return rangesOf(Counts, prefix) }

// KeysOf matches keys-only ranges that begin at a key with the prefix.
func KeysOf(prefix string) Match { return rangesOf(Keys, prefix) }

func rangesOf(kind Kind, prefix string) Match {
	return func(r Request) bool {
		return r.Range != nil && kindOfRange(r.Range) == kind && strings.HasPrefix(string(r.Range.Key), prefix)
	}
}

// HoldRequests holds the next matching requests, before they are forwarded to etcd, until the rule
// is removed or their callers cancel; at most times, all if it is 0.
func (p *Proxy) HoldRequests(match Match, times int) *Rule {
	return p.add(&Rule{request: match, holds: true}, times)
}

// FailRequests answers the next matching requests with err, a gRPC status or an error of rpctypes,
// without forwarding them to etcd.
func (p *Proxy) FailRequests(match Match, times int, err error) *Rule {
	return p.add(&Rule{request: match, err: err}, times)
}

// ChangeRanges calls change for the answers to the next matching KV/Range and KV/RangeStream
// requests, for each part of a stream; change must not modify the request. It is called by the
// goroutine of the request.
func (p *Proxy) ChangeRanges(match Match, times int, change func(*pb.RangeRequest, *pb.RangeResponse)) *Rule {
	return p.add(&Rule{request: match, change: change}, times)
}

// Backdate replaces the revision in the header of answers to the next matching KV/Range requests by
// the result of older: a revision read then returns an old revision.
func (p *Proxy) Backdate(match Match, times int, older func(revision int64) int64) *Rule {
	return p.ChangeRanges(match, times, func(_ *pb.RangeRequest, r *pb.RangeResponse) {
		if r.Header != nil {
			r.Header.Revision = older(r.Header.Revision)
		}
	})
}
