package replica

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// quietTime is the time for which only a replica runs on an etcd: longer than the first turns of upstream's loops that write (leases, identity,
// repair), which start within 10 s. The long form covers a minute.
func quietTime() time.Duration { return harness.Pick(15*time.Second, 75*time.Second) }

// TestReplica_Idle_WritesNothing: etcd's revision does not advance, and no lease is granted, while only a replica runs, which stops in between.
func TestReplica_Idle_WritesNothing(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, front.TrustFlags()...)
	_, err := primary.API().Create(ctx, configMaps, configMap("kept", nil))
	harness.Check(t, err)
	harness.Check(t, primary.Stop())
	client := etcd.Client()
	before := stateOf(ctx, t, client)
	replica := e.Replica(etcd, front, []*harness.Server{primary})
	api := replica.API()
	quiet, cancel := context.WithTimeout(ctx, quietTime())
	defer cancel()
	err = harness.Poll(quiet, func(context.Context) (bool, error) { // never true
		if _, err := api.List(ctx, "/api/v1/configmaps", ""); err != nil {
			return false, err
		}
		return false, nil
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("reads of the replica: %v", err)
	}
	if now := stateOf(ctx, t, client); now.wroteSince(before) {
		t.Errorf("etcd is at %+v, was at %+v before the replica started", now, before)
	}
	harness.Check(t, replica.Stop())
	if now := stateOf(ctx, t, client); now.wroteSince(before) {
		t.Errorf("etcd is at %+v after the replica stopped, was at %+v before", now, before)
	}
	if line := firstError(replica.Output()); line != "" {
		t.Errorf("the replica has logged an error: %s", line)
	}
}

// etcdState is the state of an etcd that a write changes.
type etcdState struct {
	revision int64
	leases   []clientv3.LeaseStatus
}

// wroteSince reports whether the revision or a lease is newer than before. A lease of a server that has stopped may expire meanwhile.
func (s etcdState) wroteSince(before etcdState) bool {
	return s.revision != before.revision || slices.ContainsFunc(s.leases, func(lease clientv3.LeaseStatus) bool { return !slices.Contains(before.leases, lease) })
}

func stateOf(ctx context.Context, t *testing.T, client *clientv3.Client) etcdState {
	t.Helper()
	resp, err := client.Get(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	harness.Check(t, err)
	leases, err := client.Leases(ctx)
	harness.Check(t, err)
	return etcdState{resp.Header.Revision, leases.Leases}
}

// firstError returns the first line of an error in a log, "" if there is none. kube-apiserver logs one at each start, about the manifest that
// no flag names.
func firstError(log string) string {
	for line := range strings.Lines(log) {
		if strings.HasPrefix(line, "E") && !strings.Contains(line, "manifest file is empty") {
			return line
		}
	}
	return ""
}

// TestReplica_UserWhoMayOnlyRead_ServesAll: a replica needs no more of etcd than to read the prefix of the cluster and the key of compactions.
func TestReplica_UserWhoMayOnlyRead_ServesAll(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	ca, front := e.Authority(), e.FrontProxy()
	etcd := e.EtcdTLS(ca)
	client := etcd.Client() // its certificate is that of the user etcd-client
	for _, err := range []error{
		second(client.RoleAdd(ctx, "root")),
		second(client.UserAdd(ctx, "root", "unused")),
		second(client.UserGrantRole(ctx, "root", "root")),
		second(client.UserAdd(ctx, "etcd-client", "unused")),
		second(client.UserGrantRole(ctx, "etcd-client", "root")),
		second(client.RoleAdd(ctx, "reader")),
		second(client.RoleGrantPermission(ctx, "reader", "/registry/", clientv3.GetPrefixRangeEnd("/registry/"), clientv3.PermissionType(clientv3.PermRead))),
		second(client.RoleGrantPermission(ctx, "reader", "compact_rev_key", "", clientv3.PermissionType(clientv3.PermRead))),
		second(client.UserAdd(ctx, "replica", "unused")),
		second(client.UserGrantRole(ctx, "replica", "reader")),
		second(client.AuthEnable(ctx)),
	} {
		harness.Check(t, err)
	}
	primary := e.APIServer(etcd, front.TrustFlags()...)
	mine := ca.Issue("replica")
	replica := e.Replica(etcd, front, []*harness.Server{primary}, "--etcd-certfile="+mine.CertFile, "--etcd-keyfile="+mine.KeyFile)
	api := replica.API()
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

// second returns the error of a call.
func second[T any](_ T, err error) error { return err }
