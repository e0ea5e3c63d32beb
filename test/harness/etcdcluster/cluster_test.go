package etcdcluster

import (
	"context"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// put writes through one member.
func put(ctx context.Context, m *Member, value string) error {
	client := m.Client()
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	_, err := client.Put(ctx, "k", value)
	return err
}

func TestCluster_MemberFaults_ClusterRecovers(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	c := Start(t, harness.New(t), 3)
	eventually := func(what string, f func(context.Context) error) {
		t.Helper()
		if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) { err := f(ctx); return err == nil, err }); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	}
	leader, err := c.Leader(ctx)
	harness.Check(t, err)
	eventually("the leader accepts a write", func(ctx context.Context) error { return put(ctx, leader, "first") })
	other := c.Members[0]
	if other == leader {
		other = c.Members[1]
	}

	// A partitioned leader can serve neither writes nor reads, and another leader is elected.
	c.Cut(leader, true)
	eventually("the others elect a leader", func(ctx context.Context) error { return put(ctx, other, "second") })
	if err := put(ctx, leader, "lost"); err == nil {
		t.Error("a member without peers accepts a write")
	}
	c.Cut(leader, false)
	eventually("the member is back", func(ctx context.Context) error { return put(ctx, leader, "third") })

	// One of three members may be paused, killed or stopped, and continues with its data.
	for _, fault := range []struct {
		name    string
		off, on func()
	}{
		{"pause", other.Pause, other.Continue},
		{"kill", other.Kill, other.Start},
		{"stop", other.Stop, other.Start},
	} {
		fault.off()
		if err := put(ctx, other, fault.name); err == nil {
			t.Errorf("%s: the member answers", fault.name)
		}
		eventually(fault.name+": the other members accept writes", func(ctx context.Context) error { return put(ctx, leader, fault.name) })
		fault.on()
		eventually(fault.name+": the member is back", func(ctx context.Context) error {
			client := other.Client()
			defer client.Close()
			got, err := client.Get(ctx, "k", clientv3.WithSerializable())
			if err == nil && string(got.Kvs[0].Value) != fault.name {
				err = fmt.Errorf("it holds %q", got.Kvs[0].Value)
			}
			return err
		})
	}
}
