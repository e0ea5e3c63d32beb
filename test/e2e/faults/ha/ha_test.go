package ha

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

const (
	informerCount = 300
	seeds         = 40

	kill = "SIGKILL"
	term = "SIGTERM"
)

// leadingMember stands for the process that leads etcd at that time.
const leadingMember = "leader of etcd"

// turns are the processes that the test ends, in order.
func turns() (all []fault) {
	short := []fault{
		{process: "server-1", signal: kill}, {process: leadingMember, signal: kill}, {process: "replica-1", signal: kill},
		{process: "server-2", signal: term}, {process: leadingMember, signal: term}, {process: "replica-2", signal: term},
	}
	if !harness.Long() {
		return short
	}
	for range 2 {
		for _, signal := range []string{kill, term} {
			for _, process := range []string{"server-1", "etcd-1", "replica-1", "server-2", "etcd-2", "replica-2", "server-3", "etcd-3", leadingMember} {
				all = append(all, fault{process: process, signal: signal})
			}
		}
	}
	return all
}

// TestUpHA_EachProcessEnds_ClientsContinue ends processes of each kind while 300 informers, two
// elected controllers, readers and writers run. No informer relists, every informer receives every
// event once and in order, no leader loses its lease, and no request fails except for those in
// flight on an ended process.
func TestUpHA_EachProcessEnds_ClientsContinue(t *testing.T) {
	s := startScene(t)
	ctx := harness.Context(t, harness.Pick(8*time.Minute, 30*time.Minute))
	api := s.up.API()
	harness.Namespace(t, ctx, api, inputs)
	harness.Namespace(t, ctx, api, outputs)
	for i := range seeds {
		for _, resource := range []string{configMaps, secrets} {
			harness.Check(t, api.Ensure(ctx, "/api/v1/namespaces/"+namespace+"/"+resource, object{
				"metadata": object{"name": fmt.Sprint("seed-", i), "labels": object{"shard": fmt.Sprint(i % shards)}}}))
		}
	}
	history := recorded.Follow(t, ctx, s.etcd, "/registry/")
	fleet := s.newFleet(t, informerCount)
	fleet.Start(t, ctx)
	before := fleet.Counts()
	relisted := func() (lists int) {
		for n, counts := range fleet.Counts() {
			lists += counts.Since(before[n]).Lists
		}
		return lists
	}
	elections := []*election{startElection(t, ctx, "at-servers", s.servers), startElection(t, ctx, "at-replicas", s.replicas)}
	load, elected := s.startLoad(t, ctx), s.followElections(t, ctx)
	began := time.Now()

	faults := turns()
	for i := range faults {
		f := &faults[i]
		if f.process == leadingMember {
			f.process, f.leader = s.leader(t, ctx), true
		} else {
			f.leader = f.process == s.leader(t, ctx)
		}
		s.createInput(t, ctx, i)
		fleet.AwaitSettled(t, ctx)
		s.end(t, ctx, f)
		t.Logf("%5.1f s: %s of %s, ready again after %.1f s; %d writes; %d lists, errors of informers %v",
			time.Since(began).Seconds(), f.signal, f.process, f.ended.Sub(f.began).Seconds(), load.wrote.Load(), relisted(), fleet.Errors())
	}
	for _, e := range elections {
		e.judge(t, ctx, len(faults))
	}
	load.end()
	fleet.AwaitEqual(t, ctx, s.etcd)
	fleet.RequireHistory(t, ctx, history)
	load.judge(t, append(faults, elected()...))
	if lists := relisted(); lists > 0 {
		t.Errorf("informers relisted %d times, want 0; errors %v", lists, fleet.Errors())
	}
	harness.Check(t, s.up.RequireConsistent())
}

// createInput creates an object for the controllers, and retries while the write fails.
func (s *scene) createInput(t *testing.T, ctx context.Context, i int) {
	t.Helper()
	api := s.up.API()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, "POST", "/api/v1/namespaces/"+inputs+"/configmaps", "", object{"metadata": object{"name": fmt.Sprint("input-", i)}})
		if err != nil {
			return false, err
		}
		return r.Code == 201 || r.Code == 409, r.Err()
	}))
}
