package etcdproxy

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"sync"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// proxiedStream is a client's watch stream.
type proxiedStream struct {
	proxy  *Proxy
	client grpc.ServerStream

	mu struct { // acquired before the proxy's; held during a send to the client
		sync.Mutex
		// watches that etcd has not confirmed yet, in the order of confirmation
		asked   []keyRange
		watches map[int64]keyRange // confirmed watches
		header  *pb.ResponseHeader // of the last message without events; nil before the first
		parts   []*pb.WatchResponse
		open    bool  // the client has received some fragments of a response, the others follow
		late    []raw // to send after the last fragment
		held    []raw // see HoldEvents
		closed  bool  // the call has ended
	}
}

// keyRange is the range of a watch: one key if end is nil.
type keyRange struct{ key, end []byte }

func (r keyRange) contains(key string) bool {
	switch {
	case len(r.end) == 0:
		return string(r.key) == key
	case len(r.end) == 1 && r.end[0] == 0: // all keys from key on
		return string(r.key) <= key
	}
	return string(r.key) <= key && key < string(r.end)
}

// note records a message of the client.
func (s *proxiedStream) note(message raw) {
	request := &pb.WatchRequest{}
	if proto.Unmarshal(message, request) != nil {
		return // etcd refuses it
	}
	if create := request.GetCreateRequest(); create != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.mu.asked = append(s.mu.asked, keyRange{create.Key, create.RangeEnd})
	}
}

// deliver sends a message of etcd to the client, as changed by the rules.
func (s *proxiedStream) deliver(message raw) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	hasEvents, isFragment := shape(message)
	if !hasEvents && !isFragment {
		r := &pb.WatchResponse{}
		if err := proto.Unmarshal(message, r); err != nil {
			return err
		}
		s.confirmedLocked(r)
		return s.sendLocked(message, false)
	}
	rules := slices.DeleteFunc(slices.Clone(*s.proxy.rules.Load()), func(r *Rule) bool { return r.event == nil })
	if s.mu.open || len(rules) == 0 && len(s.mu.held) == 0 && len(s.mu.parts) == 0 {
		return s.sendLocked(message, isFragment) // rules apply to whole responses
	}
	r := &pb.WatchResponse{}
	if err := proto.Unmarshal(message, r); err != nil {
		return err
	}
	s.mu.parts = append(s.mu.parts, r)
	if isFragment {
		return nil
	}
	parts, hold, err := remaining(s.mu.parts, rules)
	s.mu.parts = nil
	if err != nil {
		return err
	}
	if len(parts) > 0 && (hold || len(s.mu.held) > 0) {
		s.mu.held = append(s.mu.held, parts...)
		return nil
	}
	for i, part := range parts {
		if err := s.sendLocked(part, i < len(parts)-1); err != nil {
			return err
		}
	}
	return nil
}

// shape reports whether a WatchResponse has events and whether it is a fragment, without decoding
// its events. Both are false for an invalid message.
func shape(message raw) (hasEvents, isFragment bool) {
	const fragment, events = 7, 11
	for len(message) > 0 {
		tag, n := binary.Uvarint(message)
		if n <= 0 {
			return false, false
		}
		message = message[n:]
		value, n := binary.Uvarint(message)
		skip := n
		switch tag & 7 { // the wire type of the field
		case 0:
		case 1:
			skip = 8
		case 2:
			skip += int(min(value, math.MaxInt32))
		case 5:
			skip = 4
		default:
			return false, false
		}
		if n <= 0 || skip > len(message) {
			return false, false
		}
		switch tag >> 3 {
		case fragment:
			isFragment = value != 0
		case events:
			hasEvents = true
		}
		message = message[skip:]
	}
	return hasEvents, isFragment
}

// remaining returns the fragments of a response after the rules were applied, and whether to hold
// them.
func remaining(parts []*pb.WatchResponse, rules []*Rule) (messages []raw, hold bool, err error) {
	var left []*pb.WatchResponse
	for _, part := range parts {
		kept := part.Events[:0]
		for _, e := range part.Events {
			if slices.ContainsFunc(rules, func(r *Rule) bool { return !r.holds && r.event(e) && r.take() }) {
				continue
			}
			hold = slices.ContainsFunc(rules, func(r *Rule) bool { return r.holds && r.event(e) && r.take() }) || hold
			kept = append(kept, e)
		}
		if part.Events = kept; len(kept) > 0 {
			left = append(left, part)
		}
	}
	for i, part := range left {
		part.Fragment = i < len(left)-1
		message, err := proto.Marshal(part)
		if err != nil {
			return nil, false, err
		}
		messages = append(messages, message)
	}
	return messages, hold, nil
}

// confirmedLocked records a message without events.
func (s *proxiedStream) confirmedLocked(r *pb.WatchResponse) {
	s.mu.header = r.Header
	if r.Created && len(s.mu.asked) > 0 {
		s.mu.watches[r.WatchId] = s.mu.asked[0]
		s.mu.asked = s.mu.asked[1:]
	}
	if r.Canceled {
		delete(s.mu.watches, r.WatchId)
	}
}

func (s *proxiedStream) sendLocked(message raw, more bool) error {
	s.proxy.answered(Watches, len(message))
	if err := s.client.SendMsg(&message); err != nil {
		return err
	}
	if s.mu.open = more; more {
		return nil
	}
	late := s.mu.late
	s.mu.late = nil
	for _, message := range late {
		s.proxy.answered(Watches, len(message))
		if err := s.client.SendMsg(&message); err != nil {
			return err
		}
	}
	return nil
}

// flush sends the held responses if no rule holds events any longer.
func (s *proxiedStream) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.ContainsFunc(*s.proxy.rules.Load(), func(r *Rule) bool { return r.event != nil && r.holds }) {
		return
	}
	held := s.mu.held
	s.mu.held = nil
	if s.mu.closed {
		return
	}
	for _, message := range held {
		_, more := shape(message)
		if s.sendLocked(message, more) != nil {
			return // the client has disconnected
		}
	}
}

// Watches returns the numbers of clients' open watch streams and of watches on them that etcd has
// confirmed.
func (p *Proxy) Watches() (streams, watches int) {
	p.mu.Lock()
	all := slices.Clone(p.mu.streams)
	p.mu.Unlock()
	for _, s := range all {
		s.mu.Lock()
		watches += len(s.mu.watches)
		s.mu.Unlock()
	}
	return len(all), watches
}

// SendProgress sends a progress notification that etcd has not sent: to each stream with a
// confirmed watch of the key, with the revision. It returns the number of streams.
func (p *Proxy) SendProgress(key string, revision int64) (streams int, err error) {
	p.mu.Lock()
	all := slices.Clone(p.mu.streams)
	p.mu.Unlock()
	for _, s := range all {
		sent, err := s.progress(key, revision)
		if err != nil {
			return streams, fmt.Errorf("send progress: %w", err)
		}
		if sent {
			streams++
		}
	}
	return streams, nil
}

func (s *proxiedStream) progress(key string, revision int64) (sent bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	watches := false
	for _, r := range s.mu.watches {
		watches = watches || r.contains(key)
	}
	if !watches || s.mu.header == nil || s.mu.closed {
		return false, nil
	}
	header := proto.CloneOf(s.mu.header)
	header.Revision = revision
	var message raw
	// A notification for the whole stream, like etcd's answer to a progress request.
	message, err = proto.Marshal(&pb.WatchResponse{Header: header, WatchId: clientv3.InvalidWatchID})
	if err != nil {
		return false, err
	}
	if s.mu.open { // the client would treat it as a fragment
		s.mu.late = append(s.mu.late, message)
		return true, nil
	}
	return true, s.sendLocked(message, false)
}
