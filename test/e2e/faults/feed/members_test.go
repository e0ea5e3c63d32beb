package feed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
	"github.com/stratakube/strata/test/harness/faulty"
)

const (
	// switchGoal is the time within which the feed has to switch to another member; on a busy
	// machine a miss is only logged.
	switchGoal = 5 * time.Second
	// switchBound bounds a failing test. Hanging connections are closed after 40 s at the latest,
	// even without the tested mechanism: metrics show that it was the cause of the switch.
	switchBound = 2 * time.Minute
)

// members is a server on an etcd of three members, each behind a link of its own.
type members struct {
	*etcdcluster.Cluster
	links  []*faulty.Link
	server *harness.Server
	api    *harness.API
	client *clientv3.Client // of all members, bypassing the links

	start      int64
	recordings map[*recording]kind
}

func newMembers(t *testing.T, ctx context.Context) *members {
	t.Helper()
	e := harness.New(t)
	return newMembersOf(t, ctx, e, etcdcluster.Start(t, e, 3))
}

// newMembersOf is newMembers of a cluster.
func newMembersOf(t *testing.T, ctx context.Context, e *harness.Env, c *etcdcluster.Cluster) *members {
	t.Helper()
	s := &members{Cluster: c, recordings: map[*recording]kind{}}
	var urls []string
	for _, m := range s.Members {
		l := faulty.NewLink(t, e, m.URL)
		s.links, urls = append(s.links, l), append(urls, l.URL)
	}
	s.server = e.APIServer(through(s.Etcd(), urls...), noServiceAccounts)
	s.api, s.client = s.server.API(), s.Client()
	s.start = commit(t, ctx, s.client, maps.put("one", "first"), secrets.put("one", "first"))
	for _, r := range []struct {
		kind  kind
		query string
	}{{maps, ""}, {maps, "allowWatchBookmarks=true&labelSelector=value"}, {secrets, "allowWatchBookmarks=true"}} {
		s.recordings[record(t, ctx, s.api, r.kind.path, r.query, s.start)] = r.kind
	}
	return s
}

// feeding returns the member over which the feed runs: its link alone transfers the value of a key
// without readers, in two consecutive attempts, since other links transfer as much occasionally.
func (s *members) feeding(t *testing.T, ctx context.Context) int {
	t.Helper()
	const size = 1 << 20
	found, times := -1, 0
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		var before [3]int64
		for i, l := range s.links {
			before[i] = l.Down()
		}
		if _, err := s.client.Put(ctx, "/registry/nobodys/value", strings.Repeat("x", size)); err != nil {
			return false, err
		}
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		var carried []int
		err := harness.Poll(ctx, func(context.Context) (bool, error) {
			carried = carried[:0]
			for i := range s.links {
				if s.links[i].Down()-before[i] > size {
					carried = append(carried, i)
				}
			}
			return len(carried) > 0, errors.New("no link has carried the value")
		})
		switch {
		case err != nil || len(carried) > 1:
			found, times = -1, 0
		case carried[0] != found:
			found, times = carried[0], 1
		default:
			times++
		}
		return times == 2, fmt.Errorf("member %d has carried the value %d times in turn: %w", found, times, err)
	}))
	return found
}

// write changes a ConfigMap and a Secret, in one transaction, repeatedly until stop is closed.
func write(t *testing.T, ctx context.Context, stop <-chan struct{}, client *clientv3.Client) {
	for n := 0; ; n++ {
		name := fmt.Sprintf("written-%d", n%5)
		ops := []clientv3.Op{maps.put(name, fmt.Sprint(n)), secrets.put(name, fmt.Sprint(n))}
		if n%5 == 4 {
			ops = []clientv3.Op{clientv3.OpDelete(maps.prefix, clientv3.WithPrefix()), secrets.put(name, fmt.Sprint(n))}
		}
		// etcd may elect another leader once more.
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Logf("write past the member that fails: %v", err)
		}
		select {
		case <-stop:
			return
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// reads has the results of a client that reads continuously.
type reads struct {
	answered, refused, failed int
	longest                   time.Duration // time to the answer or refusal
	last                      string        // failure
}

func (r reads) String() string {
	return fmt.Sprintf("%d answered, %d refused, %d failed, the longest took %v", r.answered, r.refused, r.failed, r.longest.Round(time.Millisecond))
}

// read reads until stop is closed, and completes the last request. A refusal that asks for a retry
// is retried after a moment.
func read(ctx context.Context, stop <-chan struct{}, api *harness.API, path string) (r reads) {
	for {
		began := time.Now()
		resp, err := api.Do(ctx, http.MethodGet, path, "", nil)
		switch {
		case err == nil && resp.Code == http.StatusOK:
			r.answered++
		case err == nil && resp.Code == http.StatusTooManyRequests && resp.Header.Get("Retry-After") != "":
			r.refused++
		default:
			r.failed++
			r.last = fmt.Sprintf("%+v, %v", resp, err)
		}
		r.longest = max(r.longest, time.Since(began))
		select {
		case <-stop:
			return r
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// requireHistory fails the test unless every watch is open and has delivered etcd's history.
func (s *members) requireHistory(t *testing.T, ctx context.Context) {
	t.Helper()
	fence := commit(t, ctx, s.client, maps.put("fence", ""), secrets.put("fence", ""))
	for r, k := range s.recordings {
		r.requireEvents(t, ctx, history(t, ctx, s.client, k.prefix, r.after, fence))
	}
	if t.Failed() {
		t.FailNow()
	}
}

// TestFeed_MemberFails_UsesOtherMember: the etcd member that serves the feed is paused, or all its
// packets are dropped, or it has lost its peers and still answers clients. Watches deliver writes
// through the other members within 5 s; no watch ends, and none delivers an event twice. Before, a
// member that does not feed is paused, and reads continue. At the end all members fail at once.
func TestFeed_MemberFails_UsesOtherMember(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 2*testTimeout)
	s := newMembers(t, ctx)
	t.Run("a member that does not feed", func(t *testing.T) { s.requireReads(t, ctx) })
	for _, fault := range []struct {
		name   string
		metric string // that must increase
		fail   func(i int, on bool)
	}{
		{"stopped", "silent_feeds_total", func(i int, on bool) {
			if on {
				s.Members[i].Pause()
			} else {
				s.Members[i].Continue()
			}
		}},
		{"half-open", "silent_feeds_total", func(i int, on bool) { s.links[i].Silence(on) }},
		{"without peers", "reconnects_total", func(i int, on bool) { s.Cut(s.Members[i], on) }},
	} {
		for range 2 {
			t.Run(fault.name, func(t *testing.T) {
				// a missing metric fails the check below
				before, _ := s.api.Metric(ctx, "strata_mirror_"+fault.metric+"{")
				failed := s.feeding(t, ctx)
				fault.fail(failed, true)
				s.requireGoesOn(t, ctx, failed)
				fault.fail(failed, false)
				if after, err := s.api.Metric(ctx, "strata_mirror_"+fault.metric+"{"); err != nil || after <= before {
					t.Errorf("strata_mirror_%s is %v (%v), and was %v before", fault.metric, after, err, before)
				}
				s.requireHistory(t, ctx)
			})
		}
	}
	t.Run("no member answers", func(t *testing.T) { s.requireReadsFromMemory(t, ctx) })
}

// requireReads requires that reads are answered while a member is paused that is neither the leader
// nor that of the feed. Each read needs etcd's revision, and asks another member if the first one
// does not answer.
func (s *members) requireReads(t *testing.T, ctx context.Context) {
	feeding := s.feeding(t, ctx)
	leader, err := s.Leader(ctx)
	harness.Check(t, err)
	i := slices.IndexFunc(s.Members, func(m *etcdcluster.Member) bool { return m != leader && m != s.Members[feeding] })
	s.Members[i].Pause()
	defer s.Members[i].Continue()
	refused := 0
	for n := range 30 { // any of them may ask the paused member
		r, err := s.api.Do(ctx, http.MethodGet, maps.path, "", nil)
		if err == nil && refused < 3 && r.Code == http.StatusTooManyRequests && r.Header.Get("Retry-After") != "" {
			// A busy machine may pause the other members too. Without another attempt, every third
			// read would be refused.
			refused++
			t.Logf("read %d was refused", n)
			continue
		}
		if err != nil || r.Code != http.StatusOK {
			t.Fatalf("read %d while member %d is paused: %+v, %v", n, i, r, err)
		}
	}
}

// requireGoesOn requires that watches deliver writes through the remaining members, and that reads
// are answered.
func (s *members) requireGoesOn(t *testing.T, ctx context.Context, failed int) {
	t.Helper()
	began := time.Now()
	bound, cancel := context.WithTimeoutCause(ctx, switchBound, fmt.Errorf("not within %v", switchBound))
	defer cancel()
	var left []*harness.Etcd
	for i, m := range s.Members {
		if i != failed {
			left = append(left, m.Etcd)
		}
	}
	client := harness.Endpoints(left...).Client()
	var first int64
	harness.Check(t, harness.Poll(bound, func(ctx context.Context) (bool, error) {
		// the other members may have to elect a leader
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		resp, err := client.Txn(ctx).Then(maps.put("first", fmt.Sprint(failed)), secrets.put("first", fmt.Sprint(failed))).Commit()
		if err == nil {
			first = resp.Header.Revision
		}
		return err == nil, err
	}))
	elected := time.Since(began)

	stop := make(chan struct{})
	var group sync.WaitGroup
	var lists, gets reads
	group.Go(func() { write(t, ctx, stop, client) })
	group.Go(func() { lists = read(ctx, stop, s.api, maps.path) })
	group.Go(func() { gets = read(ctx, stop, s.api, secrets.path+"/one") })
	var switched time.Duration
	for r := range s.recordings {
		if err := r.awaitRevision(bound, first); err != nil {
			t.Error(err)
			continue
		}
		switched = max(switched, time.Since(began))
	}
	var consistent time.Duration
	if err := harness.Poll(bound, func(ctx context.Context) (bool, error) {
		list, err := s.api.List(ctx, maps.path, "")
		if err == nil && harness.Revision(t, list.Metadata.ResourceVersion) < first {
			t.Errorf("a list of the latest state is of %s, want %d or later", list.Metadata.ResourceVersion, first)
		}
		return err == nil, err
	}); err != nil {
		t.Errorf("no list of the latest state: %v", err)
	}
	consistent = time.Since(began)
	close(stop)
	group.Wait()
	t.Logf("member %d: the others write after %v, watches continue after %v, lists after %v (goal %v); LISTs: %v; GETs: %v", failed,
		elected.Round(time.Millisecond), switched.Round(time.Millisecond), consistent.Round(time.Millisecond), switchGoal, lists, gets)
	for _, r := range []reads{lists, gets} {
		if r.failed > 0 {
			t.Errorf("%d reads failed in another way than by being refused with Retry-After: %s", r.failed, r.last)
		}
	}
}

// requireReadsFromMemory: with all members paused the feed has no other member. Memory still
// answers requests for any resource version; when the members continue, so do the watches.
func (s *members) requireReadsFromMemory(t *testing.T, ctx context.Context) {
	for _, fault := range []struct {
		name string
		fail func(on bool)
	}{
		{"stopped", func(on bool) {
			for _, m := range s.Members {
				if on {
					m.Pause()
				} else {
					m.Continue()
				}
			}
		}},
		{"half-open", func(on bool) {
			for _, l := range s.links {
				l.Silence(on)
			}
		}},
	} {
		t.Run(fault.name, func(t *testing.T) {
			s.feeding(t, ctx)
			fault.fail(true)
			until := time.Now().Add(switchGoal + 2*time.Second) // time to try every member
			for n := 0; time.Now().Before(until); n++ {
				if _, err := s.api.List(ctx, maps.path, "resourceVersion=0"); err != nil {
					t.Fatalf("list %d at any resource version: %v", n, err)
				}
				select {
				case <-time.After(100 * time.Millisecond):
				case <-ctx.Done():
					t.Fatal(context.Cause(ctx))
				}
			}
			fault.fail(false)
			began := time.Now()
			s.requireHistory(t, ctx)
			harness.AwaitList(t, ctx, s.api, maps.path)
			t.Logf("reads, watches and lists work again after %v", time.Since(began).Round(time.Millisecond))
		})
	}
}
