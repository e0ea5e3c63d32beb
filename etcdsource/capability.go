package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	// ErrUnsupported: the server cannot do what a mirror needs. Permanent for this server.
	ErrUnsupported = errors.New("etcd server cannot feed a mirror")
	// ErrProgressBug: the server may send progress ahead of events, so that nothing can be
	// concluded from it. Permanent for this server; see mirror.Options.EventsOnly.
	ErrProgressBug = errors.New("progress of this etcd cannot be trusted")
	// ErrVersionUnknown: a server could not be asked for its version, or its answer is none.
	ErrVersionUnknown = errors.New("version of etcd unknown")
)

// probeTimeout bounds the wait for an answer to a request for a version or for progress.
// Servers that support them answer within milliseconds. Tests shorten it.
var probeTimeout = 5 * time.Second

// CheckVersions asks every endpoint of the client for its version, all at once. It returns
// nil if all are known to send progress in order; an error that wraps ErrProgressBug and names
// endpoint and version if one of them is known not to; else one that wraps
// ErrVersionUnknown (KEP-2340, the safeguard). Cost: one Status per endpoint.
func CheckVersions(ctx context.Context, client *clientv3.Client) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	type answer struct {
		endpoint, version string
		err               error
	}
	endpoints := client.Endpoints()
	answers := make(chan answer, len(endpoints))
	for _, endpoint := range endpoints {
		go func() { // a client may wait for a connection longer than it was told to
			status, err := client.Status(ctx, endpoint)
			if err != nil {
				answers <- answer{endpoint: endpoint, err: err}
				return
			}
			answers <- answer{endpoint: endpoint, version: status.Version}
		}()
	}
	unknown := map[string]error{}
	for _, endpoint := range endpoints {
		unknown[endpoint] = errors.New("no answer")
	}
	for range endpoints {
		var a answer
		select {
		case a = <-answers:
		case <-ctx.Done():
			return firstUnknown(unknown)
		}
		if unknown[a.endpoint] = a.err; a.err != nil {
			continue
		}
		err := checkVersion(a.version)
		if errors.Is(err, ErrProgressBug) {
			return fmt.Errorf("endpoint %s: %w", a.endpoint, err)
		}
		unknown[a.endpoint] = err
	}
	return firstUnknown(unknown)
}

func firstUnknown(errs map[string]error) error {
	for _, endpoint := range slices.Sorted(maps.Keys(errs)) {
		if err := errs[endpoint]; err != nil {
			return fmt.Errorf("%w: endpoint %s: %w", ErrVersionUnknown, endpoint, err)
		}
	}
	return nil
}

// Probe finds out whether the servers behind the client can feed a mirror: whether they
// answer progress requests at all, which kine and etcd's gRPC proxy do not. It returns
// nil, an error that wraps ErrUnsupported and says in one line what is missing, or
// another error if nothing could be found out. Cost: one short watch.
func Probe(ctx context.Context, client *clientv3.Client, key string) error {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
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

// checkVersion finds versions that send progress ahead of events: etcd#15220,
// fixed in 3.4.25 and 3.5.8, and etcd#17507, fixed in 3.4.31 and 3.5.13.
func checkVersion(version string) error {
	v, err := semver.NewVersion(strings.TrimPrefix(version, "v"))
	if err != nil {
		return fmt.Errorf("it says %q", version)
	}
	v.PreRelease = ""
	bad := v.LessThan(semver.Version{Major: 3, Minor: 4, Patch: 31}) ||
		v.Major == 3 && v.Minor == 5 && v.LessThan(semver.Version{Major: 3, Minor: 5, Patch: 13})
	if bad {
		return fmt.Errorf("%w: version %s may send progress ahead of events (etcd#15220, etcd#17507); 3.4.31, 3.5.13 or later is needed", ErrProgressBug, version)
	}
	return nil
}
