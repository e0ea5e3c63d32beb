// Package etcdsource reads etcd for a mirror: lists at one revision, streamed by etcd 3.7 and
// otherwise in pages, one watch on the whole prefix, progress, and the linearizable revision.
package etcdsource

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Source implements driver.Source on an etcd client, which it does not own. It may be used
// concurrently. Its one Watch has its own gRPC stream, so that progress requests neither reach nor
// wait for other watches of the client.
type Source struct {
	client         *clientv3.Client
	streamMetadata metadata.MD
	probe          string
	eventsOnly     bool // progress is neither requested nor used
	allKeys        bool // watches are on all keys
	replay         replayConfig
	feeds          *feeds
	rangeStream    *rangeStreamSupport // nil: lists are read in pages
}

var _ driver.Source = (*Source)(nil)

// New returns a source on the client. The name separates the streams of several sources on one
// client; etcd shares a stream among watches with equal metadata (KEP-2340). Revisions are read
// with a Get of probe, a key that need not exist. Lists, checks and the read of history use the
// client's connection, not its KV and Watcher: a client that had them replaced (clientv3/namespace)
// cannot be used.
func New(client *clientv3.Client, name, probe string) *Source {
	return &Source{client: client, streamMetadata: metadata.Pairs("strata-stream", name), probe: probe, replay: defaultReplay, feeds: &feeds{}, rangeStream: &rangeStreamSupport{}}
}

// InPages returns a source like s whose lists are read in pages, even if the server offers streams.
func (s *Source) InPages() *Source {
	other := *s
	other.rangeStream, other.feeds = nil, &feeds{}
	return &other
}

// WithoutProgress returns a source like s for a server whose progress is unreliable
// (ErrProgressBug): its watches receive events only. It does not request progress notifications,
// because the client uses them too, and would resume a watch after an event that progress has
// overtaken.
func (s *Source) WithoutProgress() *Source {
	other := *s
	other.eventsOnly, other.feeds = true, &feeds{}
	return &other
}

// OfAllKeys returns a source like s for a server without progress or with unreliable progress
// (ByEvents). Its watches are on all keys, and a batch without a key under the prefix is progress:
// every revision of etcd, and of kine, has an event. The server has to grant such a watch, and also
// sends the writes outside of the prefix.
func (s *Source) OfAllKeys() *Source {
	other := *s.WithoutProgress()
	other.allKeys = true
	return &other
}

// allKeys, as both start and end of a range, selects all keys.
const allKeys = "\x00"

// hasNoProgress reports whether a watch of the source has no reliable report of its progress.
func (s *Source) hasNoProgress() bool { return s.eventsOnly && !s.allKeys }

// outside reports whether a received event is of a key without the prefix.
func (s *Source) outside(prefix string, key []byte) bool {
	return s.allKeys && !bytes.HasPrefix(key, []byte(prefix))
}

// watched returns the range of a watch for the prefix.
func (s *Source) watched(prefix string) (key, end string) {
	if s.allKeys {
		return allKeys, allKeys
	}
	return prefix, clientv3.GetPrefixRangeEnd(prefix)
}

// WithSegments returns a source like s whose Replay reads the given number of revisions with each
// watch, and runs the given number of watches concurrently. The defaults of New are measured; tests
// use small numbers.
func (s *Source) WithSegments(revisions int64, watches int) *Source {
	other := *s
	other.replay.segmentRevisions, other.replay.watches, other.feeds = revisions, watches, &feeds{}
	return &other
}

// streamContext marks the calls of the feed's gRPC stream (E8 of docs/etcd-contract.md). A member
// that has lost its leader ends the stream instead of leaving it silent.
func (s *Source) streamContext(ctx context.Context) context.Context {
	return clientv3.WithRequireLeader(metadata.NewOutgoingContext(ctx, s.streamMetadata))
}

// List implements driver.Source. It reads one stream if the server offers RangeStream, and
// continues with pages if the stream fails. The next part is fetched while page processes the
// previous one.
func (s *Source) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	pager := NewPager(s.client, prefix, clientv3.GetPrefixRangeEnd(prefix), at)
	if s.rangeStream == nil || !s.rangeStream.offered() {
		return listPages(ctx, prefix, pager, driver.Header{}, page)
	}
	header, err := s.listStream(ctx, pager, page)
	if err != nil {
		return driver.Header{}, err
	}
	if pager.Done() {
		return header, ctx.Err()
	}
	return listPages(ctx, prefix, pager, header, page)
}

// listPages reads the rest of a list. The header's cluster is 0 if no member has answered yet.
func listPages(ctx context.Context, prefix string, pager *Pager, header driver.Header, page func([]driver.KV) error) (driver.Header, error) {
	ctx, cancel := context.WithCancel(ctx)
	type fetched struct {
		page Page
		err  error
	}
	pages := make(chan fetched)
	defer func() {
		cancel()
		for range pages { // until the goroutine has ended
		}
	}()
	go func() {
		defer close(pages)
		for !pager.Done() {
			p, err := pager.Next(ctx, 0)
			select {
			case pages <- fetched{p, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	for p := range pages {
		if p.err != nil {
			return driver.Header{}, fmt.Errorf("list %s: %w", prefix, p.err)
		}
		if header.ClusterID == 0 {
			header = p.page.Header
		}
		if err := page(p.page.KVs); err != nil {
			return driver.Header{}, err
		}
	}
	return header, ctx.Err()
}

// Keys implements driver.Source, with ranges without values (E11 of docs/etcd-contract.md).
func (s *Source) Keys(ctx context.Context, prefix string, at mirror.Revision, maxKeys func(string) int, page func([]driver.KV) error) (header driver.Header, err error) {
	for pager := newKeysPager(s.client, prefix, clientv3.GetPrefixRangeEnd(prefix), at); !pager.Done(); {
		p, err := pager.Next(ctx, int64(maxKeys(pager.key)))
		if err == nil {
			err = page(p.KVs)
		}
		if err != nil {
			return driver.Header{}, fmt.Errorf("list keys of %s: %w", prefix, err)
		}
		header = p.Header
	}
	return header, nil
}

// verify returns ErrRestored if etcd is not the cluster of the header, or is an older state of it:
// a member that was restored from a backup may have the same cluster ID.
func (s *Source) verify(ctx context.Context, after driver.Header) error {
	now, err := attempts(ctx, revisionWait, revisionTries, s.ReadRevision)
	if err != nil {
		return fmt.Errorf("verify revision %d: %w", after.Revision, err)
	}
	if now.ClusterID != after.ClusterID || now.Revision < after.Revision {
		return fmt.Errorf("%w: cluster ID %x at revision %d, was %x at revision %d", mirror.ErrRestored, now.ClusterID, now.Revision, after.ClusterID, after.Revision)
	}
	return nil
}

// ReadRevision implements driver.Source. Its read is linearizable (E1 of docs/etcd-contract.md).
func (s *Source) ReadRevision(ctx context.Context) (driver.Header, error) {
	resp, err := s.client.Get(ctx, s.probe, clientv3.WithCountOnly())
	if err != nil {
		return driver.Header{}, translate(err)
	}
	return driver.Header{ClusterID: clusterOf(resp.Header), Revision: resp.Header.Revision}, nil
}

// translate maps the etcd errors that the mirror handles to the mirror's errors.
func translate(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return fmt.Errorf("%w: %w", mirror.ErrCompacted, err)
	case errors.Is(err, rpctypes.ErrFutureRev):
		// A revision that etcd has reported before and does not have now.
		return fmt.Errorf("%w: %w", mirror.ErrRestored, err)
	}
	return err
}
