package checker

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// watched returns a watch of a kind, in the namespace default, from a revision on.
func watched(t *testing.T, ctx context.Context, s *harness.Server, k kind, after int64) *harness.Watch {
	t.Helper()
	return harness.StartWatch(t, ctx, s.API(), k.in("default"), fmt.Sprintf("resourceVersion=%d", after))
}

// until reads a watch until an event of an object, and returns the texts of all events including
// that one.
func until(t *testing.T, ctx context.Context, w *harness.Watch, name string, revision int64) (events []string) {
	t.Helper()
	for {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type == "ERROR" {
			t.Fatalf("a watch ends with %d %s, want %s", e.Status.Code, e.Status.Message, name)
		}
		events = append(events, fmt.Sprintf("%s %s@%s", e.Type, e.Object.Metadata.Name, e.Object.Metadata.ResourceVersion))
		if e.Object.Metadata.Name == name && e.Object.Metadata.ResourceVersion == fmt.Sprint(revision) {
			return events
		}
	}
}

// requireGone requires that a watch ends with 410 and delivers no further events.
func requireGone(t *testing.T, ctx context.Context, what string, w *harness.Watch) {
	t.Helper()
	e, err := w.Next(ctx)
	if err != nil || e.Type != "ERROR" || e.Status.Code != http.StatusGone {
		t.Errorf("%s: %+v, %v, want the end with 410", what, e, err)
		return
	}
	if e, err := w.Next(ctx); !errors.Is(err, harness.ErrEnded) {
		t.Errorf("%s: after its 410 %+v, %v", what, e, err)
	}
}

// lists returns the number of lists of a kind that a server has answered from a source.
func lists(t *testing.T, ctx context.Context, s *harness.Server, k kind, source string) int {
	t.Helper()
	resource, _, _ := strings.Cut(k.name, ".")
	n, err := s.API().Sum(ctx, "strata_lists_total", fmt.Sprintf("resource=%q", resource), fmt.Sprintf("source=%q", source))
	harness.Check(t, err)
	return int(n)
}

// valuesRead returns the keys of a kind whose values the lossy server has read from etcd.
func valuesRead(k kind) (keys []string) {
	for _, r := range proxy.Ranges() {
		if key := string(r.Key); !r.KeysOnly && !r.CountOnly && strings.HasPrefix(key, k.prefix) {
			keys = append(keys, key)
			if end := string(r.RangeEnd); end != "" && end != key+"\x00" {
				keys = append(keys, "up to "+end)
			}
		}
	}
	return keys
}

// TestConsistencyCheck_LostEvents_AreDetectedAndRepaired drops events of ConfigMaps on their way to
// the lossy server: creations, updates, deletions, and some of each, in turn. A check detects and
// repairs the difference.
func TestConsistencyCheck_LostEvents_AreDetectedAndRepaired(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	const value = "a confidential value"
	mistakes, err := lossy.API().Checks(ctx, "", "error")
	harness.Check(t, err)
	for _, c := range []struct {
		what    string
		before  []clientv3.Op
		lost    []clientv3.Op
		missing []string // names in the namespace default
		differ  []string
		extra   []string
	}{
		{what: "a creation",
			lost:    []clientv3.Op{maps.put("created", value)},
			missing: []string{"created"}},
		{what: "an update",
			before: []clientv3.Op{maps.put("updated", "before")},
			lost:   []clientv3.Op{maps.put("updated", value)},
			differ: []string{"updated"}},
		{what: "a deletion",
			before: []clientv3.Op{maps.put("deleted", value)},
			lost:   []clientv3.Op{clientv3.OpDelete(maps.key("deleted"))},
			extra:  []string{"deleted"}},
		{what: "some of each",
			before:  []clientv3.Op{maps.put("a", ""), maps.put("d", ""), maps.put("e", ""), maps.put("y", "")},
			lost:    []clientv3.Op{clientv3.OpDelete(maps.key("a")), maps.put("b", value), maps.put("c", value), maps.put("d", value), maps.put("e", value), clientv3.OpDelete(maps.key("y")), maps.put("z", value)},
			missing: []string{"b", "c", "z"}, differ: []string{"d", "e"}, extra: []string{"a", "y"}},
	} {
		t.Run(c.what, func(t *testing.T) {
			start := commit(t, ctx, append(c.before, maps.put("fence", "0"), secrets.put("fence", "0"))...)
			list(t, ctx, lossy, maps, exactly(start))
			for range 2 { // two checks, after which failures of earlier cases no longer count
				requireStatus(t, ctx, lossy, maps, "success")
			}
			watch, whole, beside := watched(t, ctx, lossy, maps, start), watched(t, ctx, lossy, things, start), watched(t, ctx, lossy, secrets, start)

			bad := map[string]bool{}
			for _, op := range c.lost {
				bad[string(op.KeyBytes())] = true
			}
			rule := proxy.DropEvents(func(e *mvccpb.Event) bool { return bad[string(e.Kv.Key)] }, len(c.lost))
			t.Cleanup(rule.Remove)
			lost := commit(t, ctx, c.lost...)
			fence := commit(t, ctx, maps.put("fence", "1"), secrets.put("fence", "1"), things.put("fence", "1"))
			harness.Check(t, rule.Await(ctx, len(c.lost)))
			if events := until(t, ctx, watch, "fence", fence); len(events) != 1 {
				t.Fatalf("%v, want the events lost", events)
			}
			until(t, ctx, beside, "fence", fence)
			until(t, ctx, whole, "fence", fence)
			truth := stored(t, ctx, maps.prefix, fence)
			if items, _ := list(t, ctx, lossy, maps, exactly(fence)); slices.Equal(items, truth) {
				t.Fatal("no event was lost")
			}

			failures, fromEtcd := checks(t, ctx, lossy, maps, "failure"), lists(t, ctx, lossy, maps, "etcd")
			logged := len(lossy.Output())
			proxy.Reset()
			found := requireStatus(t, ctx, lossy, maps, "failure")
			inDefault := func(names []string) (keys []string) {
				for _, name := range names {
					keys = append(keys, "default/"+name)
				}
				return keys
			}
			if !slices.Equal(found.Missing, inDefault(c.missing)) || !slices.Equal(found.Differing, inDefault(c.differ)) || !slices.Equal(found.Extra, inDefault(c.extra)) ||
				found.Differences != len(c.lost) || !found.Repaired {
				t.Errorf("found %+v, want missing %v, differing %v, extra %v, and all repaired", found, c.missing, c.differ, c.extra)
			}
			atThat := stored(t, ctx, maps.prefix, found.Revision)
			if found.EtcdHash != hashOf(atThat) || found.Hash == found.EtcdHash {
				t.Errorf("found %+v, want etcd's hash to be %s, and another one in memory", found, hashOf(atThat))
			}
			if n := checks(t, ctx, lossy, maps, "failure"); n != failures+1 {
				t.Errorf("%d failures are counted, and were %d before", n, failures)
			}
			log := lossy.Output()[logged:]
			line := ""
			for l := range strings.Lines(log) {
				if strings.Contains(l, "Memory differs from etcd") {
					line = l
				}
			}
			for _, key := range slices.Concat(inDefault(c.missing), inDefault(c.differ), inDefault(c.extra)) {
				if !strings.Contains(line, key) {
					t.Errorf("the log does not name %s: %q", key, line)
				}
			}
			if strings.Contains(log, value) {
				t.Errorf("the log has a value: %s", log)
			}

			// Only the affected keys were read again.
			want := []string{}
			for _, name := range slices.Concat(c.missing, c.differ) {
				want = append(want, maps.key(name))
			}
			got := valuesRead(maps)
			slices.Sort(want)
			slices.Sort(got)
			if !slices.Equal(got, want) {
				t.Errorf("values of %v were read, want those of %v", got, want)
			}

			// Lists of the present are correct at once, and older requests get 410.
			items, now := list(t, ctx, lossy, maps, "")
			truth = stored(t, ctx, maps.prefix, now)
			requireSame(t, "the latest state after the check", items, truth)
			for _, name := range slices.Concat(c.missing, c.differ, c.extra) {
				r, err := lossy.API().Do(ctx, http.MethodGet, maps.in("default")+"/"+name, "", nil)
				harness.Check(t, err)
				if isThere := r.Code == http.StatusOK; isThere == slices.Contains(c.extra, name) || isThere && !strings.Contains(string(r.Body), value) {
					t.Errorf("get of %s: %v", name, r.Err())
				}
			}
			requireGone(t, ctx, "a watch that ran", watch)
			for _, after := range []int64{start, lost, fence} {
				if after < found.Revision {
					requireRefusedOrGone(t, ctx, maps, after)
				}
			}
			resumed := watched(t, ctx, lossy, maps, now)

			// Lists at past revisions read etcd until a check has found no difference; those at
			// still older revisions always do.
			if n := lists(t, ctx, lossy, maps, "etcd"); n != fromEtcd {
				t.Errorf("%d lists from etcd, and %d before the lists at old revisions", n, fromEtcd)
			}
			last := commit(t, ctx, maps.put("fence", "2"), secrets.put("fence", "2"), things.put("fence", "2"))
			past := func(revision int64, source string) {
				t.Helper()
				before := lists(t, ctx, lossy, maps, source)
				items, _ := list(t, ctx, lossy, maps, exactly(revision))
				truth := stored(t, ctx, maps.prefix, revision)
				requireSame(t, fmt.Sprintf("the list at %d, from %s", revision, source), items, truth)
				if n := lists(t, ctx, lossy, maps, source); n != before+1 {
					t.Errorf("at %d: %d lists from %s, and %d before", revision, n, source, before)
				}
			}
			for _, revision := range []int64{start, lost, fence, found.Revision} {
				past(revision, "etcd")
			}
			list(t, ctx, lossy, maps, "") // waits until memory is past now
			requireStatus(t, ctx, lossy, maps, "success")
			past(now, "memory_past") // the repair may be after the check, and is before now
			past(start, "etcd")

			// Watches of other resources, and resumed ones, are not affected.
			for k, w := range map[kind]*harness.Watch{maps: resumed, secrets: beside, things: whole} {
				if events := until(t, ctx, w, "fence", last); len(events) != 1 {
					t.Errorf("%s: a watch shows %v, want the last write alone", k.name, events)
				}
			}
			for _, k := range []kind{secrets, things, routes} {
				requireStatus(t, ctx, lossy, k, "success")
			}
			if n := checks(t, ctx, lossy, maps, "failure"); n != failures+1 {
				t.Errorf("%d failures are counted in the end, and were %d before", n, failures)
			}
		})
	}
	if n, err := lossy.API().Checks(ctx, "", "error"); err != nil || n != mistakes {
		t.Errorf("%d checks ended with an error, %v, and %d before", n, err, mistakes)
	}
	// The consistency check at the end of all tests can fail.
	if err := lossy.RequireConsistent(); err == nil {
		t.Error("a server with failures is taken for consistent")
	}
	harness.Check(t, strict.RequireConsistent())
}

// requireRefusedOrGone requires that a watch after a revision gets 410, as its answer or as its
// first event.
func requireRefusedOrGone(t *testing.T, ctx context.Context, k kind, after int64) {
	t.Helper()
	w, refused, err := lossy.API().Watch(ctx, k.in("default"), fmt.Sprintf("resourceVersion=%d", after))
	harness.Check(t, err)
	if refused == nil {
		requireGone(t, ctx, fmt.Sprintf("a new watch after %d", after), w)
		w.Close()
	} else if refused.Code != http.StatusGone {
		t.Errorf("a new watch after %d: %v, want 410", after, refused.Err())
	}
}

// TestConsistencyCheck_EarlyProgress_FindsMissingEvent sends the lossy server a progress
// notification before an event that it covers, which etcd never does: a check detects the missing
// event, and its late arrival has no effect.
func TestConsistencyCheck_EarlyProgress_FindsMissingEvent(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	const name = "overtaken"
	list(t, ctx, lossy, maps, exactly(commit(t, ctx, maps.put("fence", "before"))))
	rule := proxy.HoldEvents(etcdproxy.Key(maps.key(name)))
	t.Cleanup(rule.Remove)
	overtaken := commit(t, ctx, maps.put(name, "1"))
	harness.Check(t, rule.Await(ctx, 1))
	// A consistent list makes the server request progress, which passes the proxy.
	items, now := list(t, ctx, lossy, maps, "")
	truth := stored(t, ctx, maps.prefix, now)
	if now < overtaken || slices.Equal(items, truth) {
		t.Fatalf("the list at %d contains the event that was held back at %d", now, overtaken)
	}
	found := requireStatus(t, ctx, lossy, maps, "failure")
	if !slices.Equal(found.Missing, []string{"default/" + name}) || found.Differences != 1 {
		t.Errorf("found %+v, want %s missing", found, name)
	}
	items, now = list(t, ctx, lossy, maps, "")
	truth = stored(t, ctx, maps.prefix, now)
	requireSame(t, "the latest state after the check", items, truth)
	rule.Remove()
	for i := range 3 {
		last := commit(t, ctx, maps.put(name, fmt.Sprint(i)), secrets.put("fence", "late"))
		items, now = list(t, ctx, lossy, maps, exactly(last))
		truth = stored(t, ctx, maps.prefix, last)
		requireSame(t, "after the late event", items, truth)
		if now != last {
			t.Errorf("a list at %d is of %d", last, now)
		}
	}
	for _, k := range []kind{maps, secrets, things, routes} {
		list(t, ctx, lossy, k, "")
		requireStatus(t, ctx, lossy, k, "success")
	}
}
