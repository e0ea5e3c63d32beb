package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// ErrUnsupported: the server cannot do what a mirror needs. Permanent for this server.
var ErrUnsupported = errors.New("etcd server cannot feed a mirror")

// probeTimeout bounds the wait for an answer to a progress request. Servers that
// support it answer within milliseconds. Tests shorten it.
var probeTimeout = 5 * time.Second

// Probe finds out whether the servers behind the client can feed a mirror: whether
// their versions are known not to send progress ahead of events, and whether they
// answer progress requests at all (kine and etcd's gRPC proxy do not). It returns
// nil, an error that wraps ErrUnsupported and says in one line what is missing, or
// another error if nothing could be found out. Cost: one Status per endpoint and
// one short watch.
func Probe(ctx context.Context, client *clientv3.Client, key string) error {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	for _, endpoint := range client.Endpoints() {
		status, err := client.Status(ctx, endpoint)
		if err != nil {
			continue // an endpoint that is down says nothing about the others
		}
		if err := checkVersion(status.Version); err != nil {
			return fmt.Errorf("endpoint %s: %w", endpoint, err)
		}
	}
	resp, err := client.Get(ctx, key, clientv3.WithCountOnly())
	if err != nil {
		return fmt.Errorf("probe etcd: %w", err)
	}
	// A watch from the present revision, not the next: since 3.6.2 etcd sends no
	// progress before the revision a watch was asked to start at.
	s := New(client, "probe", key)
	watchCtx := s.streamContext(ctx)
	responses := client.Watch(watchCtx, key, clientv3.WithRev(resp.Header.Revision), clientv3.WithCreatedNotify())
	ask := time.NewTicker(100 * time.Millisecond)
	defer ask.Stop()
	created := false
	// unanswered is what is known when the time is over.
	unanswered := func() error {
		if err := caller.Err(); err != nil {
			return fmt.Errorf("probe etcd: %w", err)
		}
		if !created {
			return fmt.Errorf("probe etcd: no watch within %s: %w", probeTimeout, ctx.Err())
		}
		return fmt.Errorf("%w: it does not answer progress requests (kine and etcd's gRPC proxy do not)", ErrUnsupported)
	}
	for {
		select {
		case r, ok := <-responses:
			if !ok && ctx.Err() != nil {
				return unanswered()
			}
			if !ok {
				return errors.New("probe etcd: the watch ended")
			}
			if r.IsProgressNotify() {
				return nil
			}
			if err := r.Err(); err != nil {
				if ctx.Err() != nil {
					return unanswered()
				}
				return fmt.Errorf("probe etcd: %w", err)
			}
			if !r.Created {
				continue
			}
			created = true
		case <-ask.C:
		case <-ctx.Done():
			return unanswered()
		}
		if !created {
			continue
		}
		if err := client.RequestProgress(watchCtx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("probe etcd: request progress: %w", err)
		}
	}
}

// checkVersion refuses versions that send progress ahead of events: etcd#15220,
// fixed in 3.4.25 and 3.5.8, and etcd#17507, fixed in 3.4.31 and 3.5.13.
func checkVersion(version string) error {
	v, err := semver.NewVersion(strings.TrimPrefix(version, "v"))
	if err != nil {
		return nil // unknown servers are judged by what they do
	}
	v.PreRelease = ""
	bad := v.LessThan(semver.Version{Major: 3, Minor: 4, Patch: 31}) ||
		v.Major == 3 && v.Minor == 5 && v.LessThan(semver.Version{Major: 3, Minor: 5, Patch: 13})
	if bad {
		return fmt.Errorf("%w: version %s may send progress ahead of events (etcd#15220, etcd#17507); 3.4.31, 3.5.13 or later is needed", ErrUnsupported, version)
	}
	return nil
}
