package replica

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// quietTime is the time for which only a replica runs on an etcd: longer than the first turns of
// upstream's loops that write (leases, identity, repair), which start within 10 s. The long form
// covers a minute.
func quietTime() time.Duration { return harness.Pick(15*time.Second, 75*time.Second) }

// TestReplica_Idle_WritesNothing: etcd's revision does not advance, and no lease is granted, while
// only a replica runs, which stops in between. No server that writes has ever run on this etcd: the
// leases of one would expire meanwhile, and delete their keys.
func TestReplica_Idle_WritesNothing(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	e := harness.New(t)
	etcd := e.Etcd()
	client := etcd.Client()
	s.copyTo(ctx, t, client)
	before := stateOf(ctx, t, client)
	replica := e.ReplicaOf(etcd, e.FrontProxy(), []string{nowhere(e)}, s.keys)
	harness.Check(t, replica.Await(ctx, "/readyz"))
	api := replica.API()
	read := func(ctx context.Context) (bool, error) {
		_, err := api.List(ctx, "/api/v1/configmaps", "")
		return err == nil, err
	}
	quiet, cancel := context.WithTimeout(ctx, quietTime())
	defer cancel()
	_ = harness.Poll(quiet, func(ctx context.Context) (bool, error) { // until the time is over
		_, err := read(ctx)
		return false, err
	})
	harness.Check(t, harness.Poll(ctx, read))
	if now := stateOf(ctx, t, client); now != before {
		t.Errorf("etcd is at %+v, was at %+v before the replica started", now, before)
	}
	harness.Check(t, replica.Stop())
	if now := stateOf(ctx, t, client); now != before {
		t.Errorf("etcd is at %+v after the replica stopped, was at %+v before", now, before)
	}
	if line := firstError(replica.Output()); line != "" {
		t.Errorf("the replica has logged an error: %s", line)
	}
}

// nowhere returns the URL of a primary that does not run.
func nowhere(e *harness.Env) string { return "https" + strings.TrimPrefix(e.FreeURL(), "http") }

// etcdState is the state of an etcd that a write changes.
type etcdState struct {
	revision int64
	leases   int
}

func stateOf(ctx context.Context, t *testing.T, client *clientv3.Client) etcdState {
	t.Helper()
	resp, err := client.Get(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	harness.Check(t, err)
	leases, err := client.Leases(ctx)
	harness.Check(t, err)
	return etcdState{resp.Header.Revision, len(leases.Leases)}
}

// firstError returns the first line of an error in a log, "" if there is none. kube-apiserver logs
// one at each start, about the manifest that no flag names.
func firstError(log string) string {
	for line := range strings.Lines(log) {
		if strings.HasPrefix(line, "E") && !strings.Contains(line, "manifest file is empty") {
			return line
		}
	}
	return ""
}

// TestReplica_UserWhoMayOnlyRead_ServesAll: a replica needs no more of etcd than to read the prefix
// of the cluster and the key of compactions.
func TestReplica_UserWhoMayOnlyRead_ServesAll(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	_, err := s.readOnly.Client().Put(ctx, "/registry/written", "value")
	if !errors.Is(err, rpctypes.ErrPermissionDenied) {
		t.Fatalf("a write of the user of replicas: %v, want %v", err, rpctypes.ErrPermissionDenied)
	}
	configMaps := s.maps(ctx, t)
	api := s.replica.API()
	for i := range 3 {
		name := fmt.Sprintf("seen-%d", i)
		_, err := api.Create(ctx, configMaps, configMap(name, nil))
		harness.Check(t, err)
		_, err = api.Get(ctx, path.Join(configMaps, name), "")
		harness.Check(t, err)
	}
	served, err := api.Sum(ctx, "strata_mirror_ready")
	harness.Check(t, err)
	if served != 1 {
		t.Errorf("strata_mirror_ready is %v, want 1", served)
	}
	following, err := api.Sum(ctx, "strata_compaction_following")
	harness.Check(t, err)
	if following != 1 {
		t.Errorf("strata_compaction_following is %v, want 1", following)
	}
}
