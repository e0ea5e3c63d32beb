package skew

import (
	"context"
	"fmt"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
)

// TestTakeOver_AlternatingServers_InformersEqualEtcd serves one etcd with a peer, then with Strata,
// then with the peer again, and so on, one server at a time, under continuous informers and under
// writes to etcd while no server runs. After each change the informers' stores equal etcd. When
// Strata takes over, it refuses no resuming watch, and informers do not relist, unless their
// revisions are compacted.
func TestTakeOver_AlternatingServers_InformersEqualEtcd(t *testing.T) {
	t.Parallel()
	forEach(t, stockCombinations, func(t *testing.T, ctx context.Context, c combination) {
		peerProgram := program(t, c.peer)
		env := harness.New(t)
		etcd := env.StockEtcd(t, c.etcd)
		client := etcd.Client()
		d := definition{"takeover.example.com"}

		// A stopping server first reports that it is not ready, as in front of a load balancer.
		// client-go relists when the connection of a watch request breaks.
		const delay = "--shutdown-delay-duration=1s"
		peer := startPeer(env, peerProgram, etcd, delay)
		harness.Check(t, peer.Await(ctx, "/readyz"))
		d.create(t, ctx, peer.API())
		d.await(t, ctx, peer.API(), "v1", 200)
		fillEtcd(t, ctx, client, "/registry/configmaps/filled/", 300)
		for i := range 20 {
			create(t, ctx, peer.API(), d.things("v2"), d.thing("v2", fmt.Sprintf("thing-%02d", i)))
			create(t, ctx, peer.API(), defaultSecrets, object{"metadata": object{"name": fmt.Sprintf("secret-%02d", i)}})
		}

		strata := startStrata(env, etcd, delay)
		harness.Check(t, strata.Await(ctx, "/readyz"))
		harness.Check(t, strata.Stop())
		balancer := env.Balancer(peer, strata)
		fleet := newInformers(t, balancer.Config, d)
		fleet.Start(t, ctx)
		fleet.AwaitEqual(t, ctx, client)

		// The first three changes keep history; etcd is compacted in the last two.
		running, stopped := peer, strata
		for i, compact := range []bool{false, false, false, true, true} {
			harness.Check(t, running.Stop())
			before := fleet.Counts()
			changeEtcd(t, ctx, client, d, i)
			if compact {
				_, err := client.Compact(ctx, etcdRevision(t, ctx, client))
				harness.Check(t, err)
			}
			stopped.Restart()
			running, stopped = stopped, running
			name := map[*harness.Server]string{strata: "strata", peer: "peer " + c.peer}[running]
			create(t, ctx, running.API(), defaultMaps, configMap(fmt.Sprintf("change-%d", i)))
			create(t, ctx, running.API(), d.things("v1"), d.thing("v1", fmt.Sprintf("change-%d", i)))
			_, err := running.API().Patch(ctx, defaultSecrets+"/secret-10", fmt.Sprintf(`{"metadata":{"labels":{"change":"%d"}}}`, i))
			harness.Check(t, err)
			fleet.AwaitEqual(t, ctx, client)
			for k, n := range fleet.Counts() {
				n, follow := n.Since(before[k]), fleet[k].Follow
				t.Logf("change %d, to %s, compacted %v: %v: %+v", i, name, compact, follow, n)
				if running == strata && !compact && (n.Gone != 0 || n.Lists > n.Broken) {
					t.Errorf("change %d: Strata has its history, and the informer of %v has listed: %+v", i, follow, n)
				}
				if compact && n.Lists == 0 {
					t.Errorf("change %d, to %s: the informer of %v has not listed, but its revision was compacted", i, name, follow)
				}
			}
		}
	})
}

// changeEtcd modifies, deletes and creates objects like an API server unknown to the others.
func changeEtcd(t *testing.T, ctx context.Context, client *clientv3.Client, d definition, round int) {
	t.Helper()
	modify := func(key string) {
		t.Helper()
		resp, err := client.Get(ctx, key)
		harness.Check(t, err)
		if len(resp.Kvs) != 1 {
			t.Fatalf("%d keys %s", len(resp.Kvs), key)
		}
		_, err = client.Put(ctx, key, string(resp.Kvs[0].Value))
		harness.Check(t, err)
	}
	remove := func(key string) {
		t.Helper()
		resp, err := client.Delete(ctx, key)
		harness.Check(t, err)
		if resp.Deleted != 1 {
			t.Fatalf("%d keys %s", resp.Deleted, key)
		}
	}
	for i := range 20 {
		modify(fmt.Sprintf("/registry/configmaps/filled/map-%05d", 100+10*round+i))
	}
	for i := range 10 {
		remove(fmt.Sprintf("/registry/configmaps/filled/map-%05d", 10*round+i))
		name := fmt.Sprintf("new-%d-%d", round, i)
		_, err := client.Put(ctx, "/registry/configmaps/filled/"+name, rawConfigMap("filled", name, "new"))
		harness.Check(t, err)
	}
	modify(d.prefix() + "thing-10")
	remove(d.prefix() + fmt.Sprintf("thing-%02d", round))
	modify("/registry/secrets/default/secret-11")
	remove("/registry/secrets/default/" + fmt.Sprintf("secret-%02d", round))
}

// newInformers returns informers of built-in and custom resources, in protobuf and JSON, of whole
// objects and of metadata.
func newInformers(t *testing.T, config *rest.Config, d definition) (fleet informer.Fleet) {
	t.Helper()
	clients := informer.NewClients(t, config)
	for _, f := range []informer.Follow{
		{GroupVersionResource: informer.Core("configmaps")},
		{GroupVersionResource: informer.Core("configmaps"), Metadata: true},
		{GroupVersionResource: informer.Core("secrets")},
		{GroupVersionResource: schema.GroupVersionResource{Group: d.group, Version: "v1", Resource: "things"}},
		{GroupVersionResource: schema.GroupVersionResource{Group: d.group, Version: "v2", Resource: "things"}},
	} {
		fleet = append(fleet, informer.New(clients, f))
	}
	return fleet
}
