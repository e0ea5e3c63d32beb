package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
)

// streamsRecheck is how long a source reads pages after a member has answered that it has no
// RangeStream: members are upgraded one by one. It is the interval of kube-apiserver.
const streamsRecheck = 10 * time.Minute

// streams remembers whether the servers implement RangeStream, which etcd does since 3.7. The zero
// value takes it for granted until an answer says otherwise.
type streams struct {
	refused atomic.Pointer[time.Time] // when a member last answered that it does not
}

func (s *streams) offered() bool {
	at := s.refused.Load()
	return at == nil || time.Since(*at) >= streamsRecheck
}

func (s *streams) refuse() {
	now := time.Now()
	s.refused.Store(&now)
}

// errStreamCut is a stream that has ended without the header that ends a whole one.
var errStreamCut = errors.New("stream ended before the end of the range")

// errStreamSilent is a member that has left a stream without an answer for pageTimeout.
var errStreamSilent = errors.New("stream brought nothing for too long")

// stream reads the range of a pager, which needs a revision, in one RangeStream, and calls chunk
// with each part that arrives. A part has about as many bytes as a request to etcd may have (1.5 MiB
// unless configured); at most three are in memory at once. The error of chunk ends the stream and is
// returned as it is. Any other failure leaves the pager where the stream has come to, not Done,
// and is returned as failed: Next continues there, on another member if need be, and reports
// what a list by pages would.
func (p *Pager) stream(ctx context.Context, chunk func([]mirror.KV) error) (header mirror.Header, failed, err error) {
	ctx, cancel := context.WithCancel(ctx)
	parts, failed := p.client.GetStream(ctx, p.key, clientv3.WithRange(p.end), clientv3.WithRev(p.rev))
	if failed != nil {
		cancel()
		return header, failed, nil
	}
	defer func() {
		cancel()
		for range parts { // until its goroutine is gone
		}
	}()
	timer := time.NewTimer(pageTimeout)
	defer timer.Stop()
	ended := false
	for {
		timer.Reset(pageTimeout)
		var part clientv3.RangeStreamResponse
		select {
		case <-timer.C:
			return header, errStreamSilent, nil
		case p, more := <-parts:
			if !more {
				if !ended {
					return header, errStreamCut, nil
				}
				return header, nil, nil
			}
			part = p
		}
		if err := part.Err(); err != nil {
			return header, err, nil
		}
		if part.RangeResponse == nil {
			return header, errStreamCut, nil
		}
		if err := p.checkOrder(part.Kvs); err != nil {
			return header, nil, fmt.Errorf("list: %w", err)
		}
		if n := len(part.Kvs); n > 0 {
			kvs := make([]mirror.KV, n)
			for i, kv := range part.Kvs {
				kvs[i] = fromKV(kv)
			}
			if err := chunk(kvs); err != nil {
				return header, nil, err
			}
			p.key = string(part.Kvs[n-1].Key) + "\x00"
		}
		if part.Header != nil { // of the last part
			header = mirror.Header{ClusterID: clusterOf(part.Header), Revision: p.rev}
			ended, p.done = true, !part.More
		}
	}
}

// listStream is List in one stream, as far as the stream comes: where the pager is Done, the list is
// complete, else its pages are to be read on. The revision of a list of the newest is read first, so that
// what comes after a failure is of the same one.
func (s *Source) listStream(ctx context.Context, pager *Pager, page func([]mirror.KV) error) (header mirror.Header, err error) {
	if pager.rev == 0 {
		now, err := attempts(ctx, revisionWait, revisionTries, s.Current)
		if err != nil {
			return header, nil // the pages report it, or find a member that answers
		}
		header, pager.rev = now, now.Revision
	}
	got, failed, err := pager.stream(ctx, page)
	switch {
	case err != nil:
		return header, err
	case status.Code(failed) == codes.Unimplemented:
		s.streams.refuse()
	case failed == nil && header.ClusterID != 0 && got.ClusterID != header.ClusterID:
		return header, fmt.Errorf("%w: cluster %x, was %x", mirror.ErrRestored, got.ClusterID, header.ClusterID)
	case failed == nil:
		header = got
	}
	return header, nil
}
