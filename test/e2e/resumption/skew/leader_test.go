package skew

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/stratakube/strata/test/harness"
)

// requireOneLeader makes two candidates elect a leader, one through each server. A leader that
// resigns is succeeded by the other one; there are never two.
func requireOneLeader(t *testing.T, ctx context.Context, p *pair) {
	const changes = 5
	var mu sync.Mutex
	leading := map[string]bool{}
	elected := make(chan string, 16)
	candidates := map[string]*candidate{}
	for name, s := range map[string]*harness.Server{"strata": p.strata, "peer": p.peer} {
		client, err := kubernetes.NewForConfig(s.Config)
		harness.Check(t, err)
		candidates[name] = &candidate{name: name, client: client, started: func() {
			mu.Lock()
			leading[name] = true
			if len(leading) != 1 {
				t.Errorf("the leaders are %v", leading)
			}
			mu.Unlock()
			elected <- name
		}, stopped: func() {
			mu.Lock()
			delete(leading, name)
			mu.Unlock()
		}}
	}
	next := func(want string) string {
		t.Helper()
		select {
		case name := <-elected:
			if want != "" && name != want {
				t.Fatalf("%s leads, want %s", name, want)
			}
			return name
		case <-ctx.Done():
			t.Fatal("no leader: ", context.Cause(ctx))
		}
		return ""
	}
	others := map[string]string{"strata": "peer", "peer": "strata"}
	for _, c := range candidates {
		harness.Check(t, c.start(ctx))
	}
	leader := next("")
	for range changes {
		candidates[leader].stop()
		resigned := leader
		leader = next(others[resigned])
		harness.Check(t, candidates[resigned].start(ctx)) // it is a candidate again
	}
	for _, s := range []*harness.Server{p.strata, p.peer} {
		client, err := kubernetes.NewForConfig(s.Config)
		harness.Check(t, err)
		lease, err := client.CoordinationV1().Leases("default").Get(ctx, leaseName, metav1.GetOptions{})
		harness.Check(t, err)
		if *lease.Spec.HolderIdentity != leader {
			t.Errorf("%s holds the lease, want %s", *lease.Spec.HolderIdentity, leader)
		}
	}
	candidates[others[leader]].stop()
	candidates[leader].stop()
}

const leaseName = "leader"

// candidate takes part in an election through one server.
type candidate struct {
	name   string
	client kubernetes.Interface
	// called when it leads; called when it no longer leads, before it resigns
	started, stopped func()

	cancel context.CancelFunc
	done   chan struct{}
}

func (c *candidate) start(ctx context.Context) error {
	ctx, c.cancel = context.WithCancel(ctx)
	c.done = make(chan struct{})
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: "default", Name: leaseName},
			Client: c.client.CoordinationV1(), LockConfig: resourcelock.ResourceLockConfig{Identity: c.name}},
		// no leader loses its lease on a busy machine; a leader that resigns releases it
		LeaseDuration: 60 * time.Second, RenewDeadline: 50 * time.Second, RetryPeriod: 200 * time.Millisecond,
		ReleaseOnCancel: true,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) { c.started(); <-ctx.Done() },
			OnStoppedLeading: func() {},
		},
	})
	if err != nil {
		return fmt.Errorf("candidate %s: %w", c.name, err)
	}
	go func(done chan struct{}) {
		defer close(done)
		elector.Run(ctx)
	}(c.done)
	return nil
}

// stop makes the candidate resign, and returns afterwards.
func (c *candidate) stop() {
	c.stopped()
	c.cancel()
	<-c.done
}
