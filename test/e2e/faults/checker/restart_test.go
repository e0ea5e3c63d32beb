package checker

import (
	"context"
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// TestConsistencyCheck_PanicEnabled_DifferencePanics drops an event of a custom resource on the way
// to the strict server, which panics at differences that it finds on schedule.
func TestConsistencyCheck_PanicEnabled_DifferencePanics(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	const lost, value = "lost-before-the-panic", "a confidential value"
	before := requireStatus(t, ctx, strict, maps, "success")
	list(t, ctx, strict, routes, "")
	rule := strictProxy.DropEvents(etcdproxy.Key(routes.key(lost)), 1)
	t.Cleanup(rule.Remove)
	commit(t, ctx, routes.put(lost, value))
	harness.Check(t, rule.Await(ctx, 1))
	t.Cleanup(func() { commit(t, context.WithoutCancel(ctx), clientv3.OpDelete(routes.key(lost))) })
	commit(t, ctx, maps.put("fence", "panic")) // its revision is beyond the lost event
	code, err := strict.Wait(ctx)
	harness.Check(t, err)
	log := strict.Output()
	_, message, _ := strings.Cut(log, "panic: ")
	message, _, _ = strings.Cut(message, "\n")
	if code != 2 || !strings.Contains(message, "default/"+lost) || !strings.Contains(message, "routes") || !strings.Contains(message, "KUBE_WATCHCACHE_CONSISTENCY_CHECKER") {
		t.Errorf("it ended with code %d and %q, want 2 and a message that names %s", code, message, lost)
	}
	if strings.Contains(log, value) {
		t.Error("the log has a value")
	}
	// It starts with the state of etcd.
	strict.Restart()
	items, now := list(t, ctx, strict, routes, "")
	truth := stored(t, ctx, routes.prefix, now)
	requireSame(t, "after the restart", items, truth)
	requireAfterRestart(t, ctx, strict, before)
}

// requireAfterRestart requires that checks of a server succeed, and that its history of ConfigMaps
// includes a check from before.
func requireAfterRestart(t *testing.T, ctx context.Context, s *harness.Server, before harness.Consistency) {
	t.Helper()
	for _, k := range []kind{maps, things, routes} {
		list(t, ctx, s, k, "")
		requireStatus(t, ctx, s, k, "success")
	}
	// History is restored: the hash at the old revision is unchanged.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		at, err := s.API().HashAt(ctx, maps.name, before.Revision)
		if err == nil && at.Hash != "" && at.Hash != before.Hash {
			t.Fatalf("after the restart %+v at %d, want %+v", at, before.Revision, before)
		}
		return err == nil && at.Hash == before.Hash, fmt.Errorf("after the restart %+v at %d, %w", at, before.Revision, err)
	}))
}

// TestConsistencyCheck_Restarts_ReportNoDifference stops and starts etcd, and the lossy server,
// during comparisons. The server then compares on schedule: it detects and repairs a lost event,
// and answers lists at past revisions from memory again.
func TestConsistencyCheck_Restarts_ReportNoDifference(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	before := requireStatus(t, ctx, lossy, maps, "success")
	verify := noAlarm(t, ctx)
	rule, done := asked(t, ctx, maps, "")
	etcd.Kill()
	rule.Remove()
	etcd.Start()
	if c := <-done; c.Status != "success" && c.Status != "error" {
		t.Errorf("a check while etcd is started again is %+v", c)
	}
	for _, k := range []kind{maps, things, routes} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			c := compare(t, ctx, lossy, k)
			return c.Status == "success", fmt.Errorf("%+v", c)
		}))
	}
	verify()

	// A stopping server does not wait for a hanging check.
	rule, done = asked(t, ctx, maps, "")
	harness.Check(t, lossy.Stop())
	rule.Remove()
	if c := <-done; c.Status == "failure" {
		t.Errorf("a check whose server ends is %+v", c)
	}
	lossy.Restart(often)
	requireAfterRestart(t, ctx, lossy, before)
	t.Run("on schedule", func(t *testing.T) { requireRepairOnSchedule(t, ctx) })
}

// requireRepairOnSchedule drops an event and waits for its repair.
func requireRepairOnSchedule(t *testing.T, ctx context.Context) {
	list(t, ctx, lossy, things, "")
	rule := proxy.DropEvents(etcdproxy.Key(things.key("lost-unseen")), 1)
	t.Cleanup(rule.Remove)
	lost := commit(t, ctx, things.put("lost-unseen", ""))
	harness.Check(t, rule.Await(ctx, 1))
	commit(t, ctx, things.put("fence", "unseen"))
	inconsistent := func() int {
		t.Helper()
		n, err := lossy.API().Sum(ctx, "strata_mirror_resource_inconsistent")
		harness.Check(t, err)
		return int(n)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		n := checks(t, ctx, lossy, things, "failure")
		return n == 1 && inconsistent() == 0, fmt.Errorf("%d failures, %d inconsistent resources", n, inconsistent())
	}))
	now := commit(t, ctx, things.put("fence", "seen"))
	commit(t, ctx, things.put("fence", "past"))
	list(t, ctx, lossy, things, "") // waits until memory is past now
	before := lists(t, ctx, lossy, things, "memory_past")
	for _, revision := range []int64{lost, now} {
		items, _ := list(t, ctx, lossy, things, exactly(revision))
		truth := stored(t, ctx, things.prefix, revision)
		requireSame(t, fmt.Sprintf("the list at %d", revision), items, truth)
	}
	if n := lists(t, ctx, lossy, things, "memory_past"); n == before {
		t.Error("lists at old revisions still go to etcd")
	}
	if all, err := lossy.API().Checks(ctx, "", "failure"); err != nil || all != 1 {
		t.Errorf("%d failures in all, %v, want 1", all, err)
	}
}
