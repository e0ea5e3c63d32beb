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

	"github.com/stratakube/strata/mirror/driver"
)

// partsInUse bounds the parts of a stream that are in use at once: one that is processed, one in
// the client's channel, and one that is being decoded.
const partsInUse = 3

// streamsRecheck is how long a source reads pages after a member has answered that it has no
// RangeStream: members are upgraded one by one. It is the interval of kube-apiserver.
const streamsRecheck = 10 * time.Minute

// rangeStreamSupport records whether the servers implement RangeStream, which etcd does since 3.7.
// The zero value assumes that they do (E15 of docs/etcd-contract.md).
type rangeStreamSupport struct {
	refused atomic.Pointer[time.Time] // when a member last answered that it does not implement it
}

func (s *rangeStreamSupport) offered() bool {
	at := s.refused.Load()
	return at == nil || time.Since(*at) >= streamsRecheck
}

func (s *rangeStreamSupport) refuse() {
	now := time.Now()
	s.refused.Store(&now)
}

// errStreamCut: a stream has ended without the header of its last part.
var errStreamCut = errors.New("stream ended before the end of the range")

// errStreamSilent: a member has left a stream without an answer for pageTimeout.
var errStreamSilent = errors.New("no response on the stream within the timeout")

// readStream reads the range of a pager, which needs a revision, in one RangeStream, and calls
// chunk with each part. A part has about the maximum size of a request to etcd (1.5 MiB unless
// configured); at most partsInUse are in memory at once. err is permanent: the error of chunk, or
// keys that are out of order. failed is a failure of the stream, and leaves the pager after the
// last part, not Done: Next continues there, on another member if needed, and reports the errors of
// a list by pages.
func (p *Pager) readStream(ctx context.Context, client clientv3.KV, chunk func([]driver.KV) error) (header driver.Header, failed, err error) {
	ctx, cancel := context.WithCancel(ctx)
	parts, failed := client.GetStream(ctx, p.key, clientv3.WithRange(p.end), clientv3.WithRev(p.rev))
	if failed != nil {
		cancel()
		return header, failed, nil
	}
	defer func() {
		cancel()
		for range parts { // until its goroutine has ended
		}
	}()
	timer := time.NewTimer(pageTimeout)
	defer timer.Stop()
	ended := false
	var kvs []driver.KV // of each part in turn
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
			kvs = appendKVs(kvs[:0], part.Kvs)
			if err := chunk(kvs); err != nil {
				return header, nil, err
			}
			p.key = string(part.Kvs[n-1].Key) + "\x00"
		}
		if part.Header != nil { // of the last part
			header = driver.Header{ClusterID: clusterOf(part.Header), Revision: p.rev}
			ended, p.done = true, !part.More
		}
	}
}

// listStream reads a list in one stream as far as possible. If the pager is Done, the list is
// complete; otherwise the caller reads the rest in pages. For a list at the newest revision, the
// revision is read first, so that the pages after a failure are at the same one.
func (s *Source) listStream(ctx context.Context, pager *Pager, page func([]driver.KV) error) (header driver.Header, err error) {
	if pager.rev == 0 {
		now, err := attempts(ctx, revisionWait, revisionTries, s.ReadRevision)
		if err != nil {
			return header, nil // the pages report the error, or reach a member that answers
		}
		header, pager.rev, pager.cluster = now, now.Revision, now.ClusterID
	}
	got, failed, err := pager.readStream(ctx, rangesOf(s.client, partsInUse), page)
	switch {
	case err != nil:
		return header, err
	case status.Code(failed) == codes.Unimplemented:
		s.rangeStream.refuse()
	case failed == nil:
		return got, pager.checkCluster(got.ClusterID)
	}
	return header, nil
}
