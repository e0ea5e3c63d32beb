package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/coreos/go-semver/semver"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

var (
	// ErrProgressBug: the server may send progress ahead of events, so progress is unreliable.
	// Permanent for this server; see mirror.Options.EventsOnly.
	ErrProgressBug = errors.New("progress notifications of etcd are unreliable")
	// ErrVersionUnknown: a server did not report its version, or reported an invalid one.
	ErrVersionUnknown = errors.New("unknown etcd version")
)

// versionTimeout bounds the wait for an answer to a request for a version. Servers answer
// within milliseconds. Tests shorten it.
var versionTimeout = 5 * time.Second

// CheckVersions requests the version of every endpoint of the client concurrently. It returns nil
// if all versions send progress in order (E7); an error that wraps ErrProgressBug and names
// endpoint and version if one does not; otherwise one that wraps ErrVersionUnknown (KEP-2340, the
// safeguard). Cost: one Status per endpoint.
func CheckVersions(ctx context.Context, client *clientv3.Client) error {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	type answer struct {
		endpoint, version string
		err               error
	}
	endpoints := client.Endpoints()
	answers := make(chan answer, len(endpoints))
	for _, endpoint := range endpoints {
		go func() { // a client may wait for a connection longer than its context
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
		unknown[endpoint] = errors.New("no response")
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

// ProgressMode is the way in which a mirror learns the progress of its feed, which it needs to
// answer consistent reads from memory (docs/architecture.md, D6).
type ProgressMode int

const (
	// ByProgress: the server answers progress requests. Any Source.
	ByProgress ProgressMode = iota
	// ByEvents: the watch is on all keys, so that every revision arrives as an event.
	// Source.OfAllKeys.
	ByEvents
	// NoProgress: neither. The published revision is at the last event of the prefix, even if the
	// server's revision is higher. Source.WithoutProgress and mirror.Options.EventsOnly.
	NoProgress
)

// String returns the value for metrics and the log.
func (f ProgressMode) String() string {
	switch f {
	case ByProgress:
		return "progress"
	case ByEvents:
		return "events"
	default:
		return "unproven"
	}
}

// FeedMember is the name of the only member of a feed server, which is the memory of a replica that
// others follow in place of etcd (package etcdfeed).
const FeedMember = "strata-feed"

// isFeedServer reports whether the members are those of a feed server.
func isFeedServer(members []*pb.Member) bool {
	return len(members) == 1 && members[0].Name == FeedMember
}

// unidentified replaces the cluster ID of a server that sends none (E12). etcd and its gRPC proxy
// always send one; kine does not.
const unidentified = math.MaxUint64

// clusterOf returns the cluster ID of a response.
func clusterOf(h *pb.ResponseHeader) uint64 {
	if id := h.GetClusterId(); id != 0 {
		return id
	}
	return unidentified
}

// Bounds of Probe. Servers answer within milliseconds. Tests change them.
var (
	// probeProgress bounds the wait for progress, from the creation of a watch on: the startup
	// delay with a server without progress. An etcd that is overloaded at the start must not count
	// as such a server for the life of the process.
	probeProgress = 3 * time.Second
	// probeAnswer bounds every other answer: only a server that hangs, or is not running yet, takes
	// long.
	probeAnswer = 5 * time.Second
)

// Probe determines by test requests how a mirror can learn the revision of the servers behind the
// client (E7, E9 and E12 of docs/etcd-contract.md); key is below the prefix and need not exist. A
// server that identifies its cluster, as etcd does, and answers a progress request is ByProgress.
// Any other server is ByEvents if it grants a watch on all keys. etcd's gRPC proxy does not answer
// progress requests. kine's answers are ignored, because they have been wrong (k3s-io/kine#568) and
// the version that kine reports is not its own. A slow server may be classified as one of those,
// which is as correct but delivers the events of other prefixes too. Error: the probe failed; the
// caller may continue as if the server were etcd.
//
// Cost: one read and one or two short watches, a few round trips, and 3 s if a server that
// identifies its cluster does not answer the progress request.
func Probe(ctx context.Context, client *clientv3.Client, key string) (ProgressMode, error) {
	first, cancel := context.WithTimeout(ctx, probeAnswer)
	defer cancel()
	resp, err := client.Get(first, key, clientv3.WithCountOnly())
	if err != nil {
		return ByProgress, fmt.Errorf("probe etcd: %w", err)
	}
	created, answered := false, false
	if clusterOf(resp.Header) != unidentified {
		created, answered, err = probeWatch(ctx, client, probeProgress, "probe", true, key, clientv3.WithRev(resp.Header.Revision))
		if answered || err != nil {
			return ByProgress, err
		}
		if !created {
			return ByProgress, fmt.Errorf("probe etcd: watch not created within %s", probeProgress)
		}
		if probesFeedServer(ctx, client) {
			return ByProgress, fmt.Errorf("probe etcd: the replica that feeds this one has not answered a progress request within %s, because it is loading or behind etcd", probeProgress)
		}
	}
	created, _, err = probeWatch(ctx, client, probeAnswer, "probe all keys", false, allKeys, clientv3.WithFromKey(), clientv3.WithRev(resp.Header.Revision+1))
	switch {
	case ctx.Err() != nil:
		return ByProgress, fmt.Errorf("probe etcd: %w", ctx.Err())
	case err != nil:
		return NoProgress, nil
	case !created:
		return ByProgress, fmt.Errorf("probe etcd: watch on all keys not created within %s", probeAnswer)
	}
	return ByEvents, nil
}

// probesFeedServer reports whether the server says that it is a feed server.
func probesFeedServer(ctx context.Context, client *clientv3.Client) bool {
	ctx, cancel := context.WithTimeout(ctx, probeAnswer)
	defer cancel()
	resp, err := client.MemberList(ctx)
	return err == nil && isFeedServer(resp.Members)
}

// probeWatch creates a watch on a stream with the name. It returns when the server has created it
// or, with progress, has answered a progress request, or when the time limit is reached. Error: the
// server refuses the watch, or ctx has ended.
func probeWatch(ctx context.Context, client *clientv3.Client, limit time.Duration, name string, progress bool, key string, opts ...clientv3.OpOption) (created, answered bool, err error) {
	caller := ctx
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	// To request progress, watch from the current revision, not from the next: since 3.6.2 etcd
	// sends no progress below the start revision of a watch. The watch requests no progress
	// notifications: those of an etcd behind a proxy would look like answers of the proxy.
	watchCtx := New(client, name, key).streamContext(ctx)
	opts = append(opts, clientv3.WithCreatedNotify())
	// The client returns the channel only when the watch was created.
	begun := make(chan clientv3.WatchChan, 1)
	go func() { begun <- client.Watch(watchCtx, key, opts...) }()
	var responses clientv3.WatchChan
	var ask <-chan time.Time
	for interval := 5 * time.Millisecond; ; {
		select {
		case responses = <-begun:
			begun = nil
			continue
		case r, ok := <-responses:
			switch {
			case r.Err() != nil && ctx.Err() == nil:
				return created, false, fmt.Errorf("probe etcd: %w", r.Err())
			case !ok && ctx.Err() == nil:
				return created, false, errors.New("probe etcd: watch closed by the server")
			case !ok:
				return created, false, caller.Err()
			case r.IsProgressNotify():
				return true, true, nil
			}
			created = created || r.Created
			if created && !progress {
				return true, false, nil
			}
		case <-ask:
			interval = min(2*interval, 100*time.Millisecond)
		case <-ctx.Done():
			return created, false, caller.Err()
		}
		if !created {
			continue
		}
		ask = time.After(interval)
		if err := client.RequestProgress(watchCtx); err != nil && ctx.Err() == nil {
			return true, false, fmt.Errorf("probe etcd: request progress: %w", err)
		}
	}
}

// checkVersion finds versions that send progress ahead of events: etcd#15220,
// fixed in 3.4.25 and 3.5.8, and etcd#17507, fixed in 3.4.31 and 3.5.13.
func checkVersion(version string) error {
	v, err := semver.NewVersion(strings.TrimPrefix(version, "v"))
	if err != nil {
		return fmt.Errorf("invalid version %q", version)
	}
	v.PreRelease = ""
	bad := v.LessThan(semver.Version{Major: 3, Minor: 4, Patch: 31}) ||
		v.Major == 3 && v.Minor == 5 && v.LessThan(semver.Version{Major: 3, Minor: 5, Patch: 13})
	if bad {
		return fmt.Errorf("%w: version %s may send progress ahead of events (etcd#15220, etcd#17507); 3.4.31, 3.5.13 or later is required", ErrProgressBug, version)
	}
	return nil
}
