// Package etcdsource reads etcd for a mirror: pages at one revision, one watch on
// the whole prefix, progress, and the linearizable revision.
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
)

// Source implements mirror.Source on an etcd client, which it does not own. It may
// be used concurrently; its one Watch has a gRPC stream of its own, so that
// progress requests reach no other watch of the client and wait for none.
type Source struct {
	client     *clientv3.Client
	stream     metadata.MD
	probe      string
	eventsOnly bool // progress is neither asked for nor believed
	allKeys    bool // watches are of all keys
	plan       replayPlan
	feeds      *feeds
	streams    *streams // nil: lists are read in pages
}

var _ mirror.Source = (*Source)(nil)

// New returns a source on the client. The name tells streams of several sources on
// one client apart; etcd shares a stream among watches with equal metadata
// (KEP-2340). Revisions are read with a Get of probe, a key that need not exist.
func New(client *clientv3.Client, name, probe string) *Source {
	return &Source{client: client, stream: metadata.Pairs("strata-stream", name), probe: probe, plan: defaultPlan, feeds: &feeds{}, streams: &streams{}}
}

// InPages returns a source like s whose lists are read in pages, even if the server offers streams.
func (s *Source) InPages() *Source {
	other := *s
	other.streams, other.feeds = nil, &feeds{}
	return &other
}

// WithoutProgress returns a source like s for a server whose progress cannot be trusted
// (ErrProgressBug): its watches are told of events only. The client believes in progress
// too, and would resume a watch behind an event that it has overtaken.
func (s *Source) WithoutProgress() *Source {
	other := *s
	other.eventsOnly, other.feeds = true, &feeds{}
	return &other
}

// OfAllKeys returns a source like s for a server of which progress is not to be had or not
// to be trusted (ByEvents). Its watches are of all keys, and a batch of which no key has the prefix is
// progress: every revision of etcd, and of kine, has an event. The server has to grant such a
// watch, and sends what is written outside of the prefix too.
func (s *Source) OfAllKeys() *Source {
	other := *s.WithoutProgress()
	other.allKeys = true
	return &other
}

// allKeys and allKeys, as start and end of a range, are all keys.
const allKeys = "\x00"

// unproven reports whether nothing shows how far a watch of the source has come.
func (s *Source) unproven() bool { return s.eventsOnly && !s.allKeys }

// outside reports whether an event that came is of a key without the prefix.
func (s *Source) outside(prefix string, key []byte) bool {
	return s.allKeys && !bytes.HasPrefix(key, []byte(prefix))
}

// watched returns the range to be watched in order to learn what happens to the prefix.
func (s *Source) watched(prefix string) (key, end string) {
	if s.allKeys {
		return allKeys, allKeys
	}
	return prefix, clientv3.GetPrefixRangeEnd(prefix)
}

// WithSegments returns a source like s whose Replay has each watch read so many revisions, and
// so many watches at once: what New chooses is measured, what tests choose is small.
func (s *Source) WithSegments(revisions int64, watches int) *Source {
	other := *s
	other.plan.segment, other.plan.watches, other.feeds = revisions, watches, &feeds{}
	return &other
}

// streamContext marks the calls that belong to the feed's gRPC stream. The member
// ends the stream when it has lost its leader, instead of going silent.
func (s *Source) streamContext(ctx context.Context) context.Context {
	return clientv3.WithRequireLeader(metadata.NewOutgoingContext(ctx, s.stream))
}

// List implements mirror.Source. It reads one stream where the server offers that, and
// pages from where the stream fails. The next part is fetched while the caller works on the one
// before.
func (s *Source) List(ctx context.Context, prefix string, at mirror.Revision, page func([]mirror.KV) error) (mirror.Header, error) {
	pager := NewPager(s.client, prefix, clientv3.GetPrefixRangeEnd(prefix), at)
	if s.streams == nil || !s.streams.offered() {
		return listPages(ctx, prefix, pager, mirror.Header{}, page)
	}
	header, err := s.listStream(ctx, pager, page)
	if err != nil {
		return mirror.Header{}, err
	}
	if pager.Done() {
		return header, ctx.Err()
	}
	return listPages(ctx, prefix, pager, header, page)
}

// listPages reads the rest of a list. The header's cluster is 0 if none has answered yet.
func listPages(ctx context.Context, prefix string, pager *Pager, header mirror.Header, page func([]mirror.KV) error) (mirror.Header, error) {
	ctx, cancel := context.WithCancel(ctx)
	type fetched struct {
		page Page
		err  error
	}
	pages := make(chan fetched)
	defer func() {
		cancel()
		for range pages { // until the goroutine is gone
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
			return mirror.Header{}, fmt.Errorf("list %s: %w", prefix, p.err)
		}
		if header.ClusterID == 0 {
			header = p.page.Header
		}
		if err := page(p.page.KVs); err != nil {
			return mirror.Header{}, err
		}
	}
	return header, ctx.Err()
}

// Keys implements mirror.Source.
func (s *Source) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]mirror.KV) error) (header mirror.Header, err error) {
	for pager := newKeysPager(s.client, prefix, clientv3.GetPrefixRangeEnd(prefix), at); !pager.Done(); {
		p, err := pager.Next(ctx, int64(most(pager.key)))
		if err == nil {
			err = page(p.KVs)
		}
		if err != nil {
			return mirror.Header{}, fmt.Errorf("keys of %s: %w", prefix, err)
		}
		header = p.Header
	}
	return header, nil
}

// Get implements mirror.Source.
func (s *Source) Get(ctx context.Context, key string, at mirror.Revision) (mirror.KV, bool, error) {
	page, err := NewPager(s.client, key, key+"\x00", at).Next(ctx, 1)
	if err != nil || len(page.KVs) == 0 {
		return mirror.KV{}, false, err
	}
	return page.KVs[0], true, nil
}

// verify returns ErrRestored if etcd is not the cluster of the header, or an older
// state of it: a member that was restored from a backup may have kept its cluster ID.
func (s *Source) verify(ctx context.Context, after mirror.Header) error {
	now, err := attempts(ctx, revisionWait, revisionTries, s.Current)
	if err != nil {
		return fmt.Errorf("verify revision %d: %w", after.Revision, err)
	}
	if now.ClusterID != after.ClusterID || now.Revision < after.Revision {
		return fmt.Errorf("%w: cluster %x at %d, was %x at %d", mirror.ErrRestored, now.ClusterID, now.Revision, after.ClusterID, after.Revision)
	}
	return nil
}

// Current implements mirror.Source.
func (s *Source) Current(ctx context.Context) (mirror.Header, error) {
	resp, err := s.client.Get(ctx, s.probe, clientv3.WithCountOnly())
	if err != nil {
		return mirror.Header{}, translate(err)
	}
	return mirror.Header{ClusterID: clusterOf(resp.Header), Revision: resp.Header.Revision}, nil
}

// translate maps etcd's errors to the mirror's where the mirror acts on them.
func translate(err error) error {
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return fmt.Errorf("%w: %w", mirror.ErrCompacted, err)
	case errors.Is(err, rpctypes.ErrFutureRev):
		// A revision that etcd has told before and does not have now.
		return fmt.Errorf("%w: %w", mirror.ErrRestored, err)
	}
	return err
}
