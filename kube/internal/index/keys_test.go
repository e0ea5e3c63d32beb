package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// keeping returns a fixture that keeps keys of the nodes of pods, found in stored bytes.
func keeping(t testing.TB, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	f := findingDeclared(t, []string{"spec.nodeName"}, change...)
	if f.started.Load() != 1 {
		t.Fatalf("%d goroutines keep the keys of a field", f.started.Load())
	}
	return f
}

// nodeKeys returns the keys of the nodes of pods.
func (f *fixture) nodeKeys() *keys { return f.s.keyed.load()["spec.nodeName"] }

// hold keeps the keys from following events until release.
func (k *keys) hold(t testing.TB) (release func()) {
	t.Helper()
	if !k.lock(podtest.Context(t)) {
		t.Fatal("the keys are held")
	}
	return sync.OnceFunc(k.unlock)
}

// fillNodes stores n pods on n/4 nodes.
func (f *fixture) fillNodes(t testing.TB, n int) {
	t.Helper()
	for i := range n {
		f.Put(t, podOn(fmt.Sprintf("pod-%04d", i), fmt.Sprint("node-", i%(n/4))))
	}
	f.CatchUp(t)
}

// settle returns when the keys have followed all events. It is called in a synctest bubble.
func (f *fixture) settle(t testing.TB) {
	t.Helper()
	f.CatchUp(t)
	time.Sleep(2 * keysPace)
	synctest.Wait()
}

// scan returns the names of the pods that the selector of a list selects, without a plan.
func (r *read) scan(t testing.TB) ([]string, error) {
	t.Helper()
	return (&read{r.f, r.sel, nil, r.snap}).selected(podtest.Context(t))
}

// requireScan fails unless a list selects what a scan does, and returns its plan.
func (r *read) requireScan(t testing.TB) string {
	t.Helper()
	got, err := r.selected(podtest.Context(t))
	want, failed := r.scan(t)
	if r.plan != nil && r.plan.Exact() && !slices.Equal(r.candidates(""), got) {
		t.Fatalf("%q at %d selects %v, not the exact candidates %v", r.sel.Predicate.Field, r.snap.Rev, got, r.candidates(""))
	}
	if (err == nil) != (failed == nil) || err == nil && !slices.Equal(got, want) {
		t.Fatalf("%q at %d with the plan %s: %v (%v), want %v (%v)", r.sel.Predicate.Field, r.snap.Rev, r.name(), got, err, want, failed)
	}
	return r.name()
}

// TestKeys_Unused_CostNothing: a resource without declared fields starts no goroutine until a
// second list uses an eager field.
func TestKeys_Unused_CostNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.events(t, 200)
		f.require(t, podtest.Selecting(t, "", "involvedObject.name=object-7"), byIndex, 2)
		f.require(t, onNode(t, "object-7"), byIndex, 2)
		f.require(t, onNode(t, "object-7"), byIndex, 2)
		if f.started.Load() != 0 || len(f.s.keyed.load()) != 0 {
			t.Errorf("%d goroutines, keys of %v", f.started.Load(), slices.Collect(maps.Keys(f.s.keyed.load())))
		}
	})
}

// TestKeys_EagerField_AreKeptFromSecondUse: of the eager fields of a selector, that with the most
// values gets keys, until it has no readers.
func TestKeys_EagerField_AreKeptFromSecondUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		rest := f.Blocks.Stats().Used
		f.events(t, 500)
		pred := podtest.Selecting(t, "", "involvedObject.kind=Pod,involvedObject.name=object-8")
		f.require(t, pred, byIndex, 5)
		f.require(t, pred, byIndex, 5)
		synctest.Wait()
		f.require(t, pred, byKeys, 5)
		if kept := slices.Collect(maps.Keys(f.s.keyed.load())); !slices.Equal(kept, []string{"involvedObject.name"}) || f.started.Load() != 1 {
			t.Errorf("keys of %v, %d goroutines", kept, f.started.Load())
		}
		for range 3 {
			time.Sleep(indexIdle / 2)
			f.require(t, pred, byKeys, 5)
		}
		time.Sleep(3 * indexIdle)
		if used := f.Blocks.Stats().Used; len(f.s.keyed.load()) != 0 || used != rest || f.bytes.Load() != 0 || f.indexes.Load() != 0 {
			t.Errorf("without readers %d keys are kept, %d bytes used, %d before, %d and %d reported", len(f.s.keyed.load()), used, rest, f.indexes.Load(), f.bytes.Load())
		}
		f.require(t, pred, byIndex, 5)
	})
}

// TestKeys_List_DecodesNoObject: lists know their candidates and that they are selected; they make
// no digests.
func TestKeys_List_DecodesNoObject(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.fillNodes(t, 400)
		f.settle(t)
		f.Put(t, podOn("pod-0000", "node-7"))
		f.CatchUp(t)
		r := f.of(t, onNode(t, "node-7"))
		if got := r.candidates(""); len(got) != 5 || r.name() != byKeys {
			t.Errorf("plan %s with the candidates %v, want the keys of 5 pods", r.name(), got)
		}
		if !r.plan.Exact() || f.attributes(t) != 0 {
			t.Errorf("the candidates are exact: %t; %d pods were decoded, want none", r.plan.Exact(), f.attributes(t))
		}
		if n := r.plan.Known(r.snap, podtest.Root+"ns/pod-0200", "", 1000).N; n != 2 {
			t.Errorf("%d candidates are known in a part of the range, want 2", n)
		}
		if got := r.candidates(podtest.Root + "ns/pod-0200"); len(got) != 2 {
			t.Errorf("the candidates %v are in a part of the range, want 2", got)
		}
		pred := onNode(t, "node-7")
		d := DeclaredIndex(&pred)
		for start, want := range map[string]bool{"": true, "ns/pod-0307\x00": false, "ns/pod-0307": true} {
			if got := d.Any(podtest.Context(t), r.plan, f.View.CurrentGeneration(), r.snap, podtest.Root+start, ""); got != want {
				t.Errorf("entries from %q: %t, want %t", start, got, want)
			}
		}
		if n := f.digests(t); len(n) != 0 {
			t.Errorf("a list by keys made the digests %v", n)
		}
	})
}

// TestKeys_RandomSteps_EqualScan changes pods at random, one or several in a revision, while the
// feed breaks, events are lost, etcd is compacted and restored, keys that encrypt values are
// replaced and objects cannot be decoded. Lists at the newest revision, and at those before it,
// select what a scan does, in key order.
func TestKeys_RandomSteps_EqualScan(t *testing.T) {
	for _, bits := range []int{32, 2} {
		t.Run(fmt.Sprintf("hashes of %d bits", bits), func(t *testing.T) {
			hashMask = uint32(1<<bits - 1)
			defer func() { hashMask = ^uint32(0) }()
			seed := testseed.New(t)
			plans, exact := map[string]int{}, 0
			for round := range testrace.Count(6, 2) {
				synctest.Test(t, func(t *testing.T) {
					s := &keySteps{rnd: rand.New(rand.NewPCG(seed, uint64(round))), plans: plans}
					s.run(t, 150)
					exact += s.exact
				})
			}
			// Of the values of four hashes, none may have one alone.
			if plans[byKeys] < 2*plans[byIndex] || plans[byIndex] == 0 || bits == 32 && exact < plans[byKeys]/20 {
				t.Errorf("plans of lists: %v, %d of them exact", plans, exact)
			}
		})
	}
}

// keySteps are the random steps of a test.
type keySteps struct {
	rnd   *rand.Rand
	f     *fixture
	codec *podtest.Swappable
	key   int // that encrypts new values
	plans map[string]int
	exact int // of them
}

func (s *keySteps) run(t *testing.T, steps int) {
	t.Helper()
	s.codec = podtest.NewSwappable(podtest.Encryption(t, "1"))
	s.key = 1
	s.f = keeping(t, s.codec.With)
	for range 100 {
		s.put(t)
	}
	for range steps {
		for range 1 + s.rnd.IntN(20) {
			s.step(t)
		}
		if s.rnd.IntN(3) == 0 {
			time.Sleep(2 * keysPace)
		}
		_, _ = s.f.Mirror.ReadRevision(podtest.Context(t)) // notices a restore
		s.f.CatchUp(t)
		testcheck.NoError(t, s.f.Resource.WaitReady(podtest.Context(t)))
		snap := s.f.Latest(t)
		for range 3 {
			s.plans[s.list(t, snap)]++
		}
		past, err := s.f.Resource.At(max(1, snap.Rev-s.rnd.Int64N(100)))
		if err == nil {
			s.list(t, past)
		}
	}
}

func (s *keySteps) node() string { return []string{"", "a", "b", "c", "d"}[s.rnd.IntN(5)] }

func (s *keySteps) pod() string { return fmt.Sprintf("pod-%03d", s.rnd.IntN(200)) }

func (s *keySteps) list(t *testing.T, snap mirror.Snapshot) (plan string) {
	t.Helper()
	r := s.f.read(podtest.Context(t), snap, onNode(t, s.node()))
	if r.plan != nil && r.plan.Exact() {
		s.exact++
	}
	return r.requireScan(t)
}

func (s *keySteps) put(t *testing.T) {
	t.Helper()
	s.f.Seal(t, podtest.Encryption(t, fmt.Sprint(s.key)), podOn(s.pod(), s.node()))
}

func (s *keySteps) step(t *testing.T) {
	t.Helper()
	etcd, key := s.f.Etcd, podtest.Root+"ns/"+s.pod()
	switch n := s.rnd.IntN(200); {
	case n < 20:
		if _, ok := s.f.Latest(t).Get(key); ok {
			etcd.Delete(key)
		}
	case n < 24: // undecodable
		etcd.Put(key, "?")
	case n < 28:
		for _, e := range slices.Collect(s.f.Latest(t).All("", "")) {
			if string(e.Value()) == "?" {
				etcd.Delete(e.Key())
			}
		}
	case n < 34: // at one revision
		var ops []memory.Op
		for e := range s.f.Latest(t).All("", "") {
			if s.rnd.IntN(4) == 0 {
				ops = append(ops, memory.Op{Key: e.Key(), Value: string(e.Value()), Delete: s.rnd.IntN(2) == 0})
			}
		}
		if len(ops) > 0 {
			etcd.Txn(ops...)
		}
	case n < 36:
		etcd.Break()
	case n < 38:
		etcd.Compact(etcd.Revision())
	case n < 40: // the next event of the key shows the gap, and the resource is relisted
		etcd.DropIf(func(c driver.Change) bool { return string(c.Key) == key })
		s.put(t)
		etcd.Put(key, "?")
		s.f.CatchUp(t)
		etcd.DropIf(nil)
		s.f.Seal(t, podtest.Encryption(t, fmt.Sprint(s.key)), podOn(key[len(podtest.Root+"ns/"):], "a"))
		s.f.CatchUp(t)
		time.Sleep(5 * time.Second)
		testcheck.NoError(t, s.f.Resource.WaitReady(podtest.Context(t)))
	case n < 41:
		keys := map[string]string{}
		for e := range s.f.Latest(t).All("", "") {
			if s.rnd.IntN(4) > 0 {
				keys[e.Key()] = string(e.Value())
			}
		}
		etcd.Restore(etcd.Revision()-s.rnd.Int64N(20), keys)
		time.Sleep(5 * time.Second)
	case n < 43: // values of both keys are readable, at other places in memory
		s.key = 3 - s.key
		s.codec.Set(podtest.Encryption(t, fmt.Sprint(s.key), fmt.Sprint(3-s.key)))
		s.f.View.CurrentGeneration()
	default:
		s.put(t)
	}
}

// TestKeys_WhileWritten_ListsEqualScan: lists at the newest revision race with writes and with the
// goroutine of the keys.
func TestKeys_WhileWritten_ListsEqualScan(t *testing.T) {
	f := keeping(t)
	f.fillNodes(t, 200)
	seed := testseed.New(t)
	var running sync.WaitGroup
	done := make(chan struct{})
	running.Go(func() {
		defer close(done)
		rnd := rand.New(rand.NewPCG(seed, 0))
		for i := range 3000 {
			if i%100 == 0 { // a list follows no more events
				f.CatchUp(t)
				podtest.Eventually(t, "the keys have followed the events", func() bool { return f.of(t, onNode(t, "node-0")).name() == byKeys })
			}
			pod := podOn(fmt.Sprintf("pod-%04d", rnd.IntN(200)), fmt.Sprint("node-", rnd.IntN(10)))
			if _, ok := f.Latest(t).Get(podtest.Key(pod)); ok && rnd.IntN(5) == 0 {
				f.Etcd.Delete(podtest.Key(pod))
			} else {
				f.Put(t, pod)
			}
		}
	})
	for i := range 4 {
		running.Go(func() {
			plans, ctx := map[string]int{}, podtest.Context(t)
			for n := i; ; n++ {
				select {
				case <-done:
					if plans[byKeys] > 0 {
						return
					}
					if ctx.Err() != nil {
						t.Errorf("plans of lists: %v", plans)
						return
					}
				default:
				}
				r := f.of(t, onNode(t, fmt.Sprint("node-", n%10)))
				got, err := r.selected(podtest.Context(t))
				want, _ := r.scan(t)
				if plans[r.name()]++; err != nil || !slices.Equal(got, want) {
					t.Errorf("node-%d at %d, plan %s: %v (%v), want %v", n%10, r.snap.Rev, r.name(), got, err, want)
					return
				}
			}
		})
	}
	running.Wait()
}

// TestKeys_Behind_ListFollowsEvents: a list follows due events itself while the goroutine lets
// events arrive, unless they are many or another list does not end.
func TestKeys_Behind_ListFollowsEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.fillNodes(t, 400)
		f.settle(t)
		f.Put(t, podOn("pod-0000", "node-7"))
		f.CatchUp(t)
		if plan := f.of(t, onNode(t, "node-7")).requireScan(t); plan != byKeys {
			t.Errorf("after a write the plan is %s", plan)
		}
		release := f.nodeKeys().hold(t)
		f.Put(t, podOn("pod-0001", "node-7"))
		f.CatchUp(t)
		began := time.Now()
		if plan := f.of(t, onNode(t, "node-7")).requireScan(t); plan != byIndex || time.Since(began) > keysPatience {
			t.Errorf("beside a list that does not end the plan is %s after %v", plan, time.Since(began))
		}
		for i := range maxBehind {
			f.Put(t, podOn(fmt.Sprintf("pod-%04d", i), "node-8"))
		}
		f.CatchUp(t)
		k, snap := f.nodeKeys(), f.Latest(t)
		if err := k.advance(podtest.Context(t), maxBehind); err != errBehind {
			t.Errorf("a list follows %d events: %v", maxBehind+1, err)
		}
		release()
		f.settle(t)
		if plan := f.read(podtest.Context(t), snap, onNode(t, "node-8")).requireScan(t); plan != byKeys {
			t.Errorf("after the events the plan is %s", plan)
		}
	})
}

// TestKeys_OldRevision_UsesDigests: a snapshot some events old is read with the keys, an older one
// with digests.
func TestKeys_OldRevision_UsesDigests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.fillNodes(t, 400)
		f.settle(t)
		rev := f.Etcd.Revision()
		for i := range maxAhead {
			f.Put(t, podOn(fmt.Sprintf("pod-%04d", i), "node-8"))
		}
		f.settle(t)
		for back, want := range map[mirror.Revision]string{0: byKeys, -1: byIndex} {
			snap, err := f.Resource.At(rev + back)
			testcheck.NoError(t, err)
			for _, node := range []string{"node-8", "node-0"} {
				if plan := f.read(podtest.Context(t), snap, onNode(t, node)).requireScan(t); plan != want {
					t.Errorf("%d events back the plan is %s, want %s", maxAhead-back, plan, want)
				}
			}
		}
	})
}

// TestKeys_FrequentValue_UsesDigests: keys serve values with up to maxKeyed entries.
func TestKeys_FrequentValue_UsesDigests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		for i := range maxKeyed {
			f.Put(t, podOn(fmt.Sprintf("pod-%05d", i), ""))
		}
		f.settle(t)
		f.require(t, onNode(t, ""), byKeys, maxKeyed)
		f.Put(t, podOn("pod", ""))
		f.CatchUp(t)
		f.require(t, onNode(t, ""), byIndex, maxKeyed+1)
		f.Put(t, podOn("pod", "node"))
		f.CatchUp(t)
		f.require(t, onNode(t, ""), byKeys, maxKeyed)
	})
}

// TestKeys_BeingBuilt_ListsWait: a list waits for a build, but not for long.
func TestKeys_BeingBuilt_ListsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.fillNodes(t, 400)
		f.View.Kind().Declared = []string{"spec.nodeName"}
		start, build := f.s.cfg.Start, func() {}
		f.s.cfg.Start = func(run func()) bool {
			build = run
			return true
		}
		f.s.keep("spec.nodeName", true)
		f.s.cfg.Start = start
		release := f.nodeKeys().hold(t)
		start(build)
		began := time.Now()
		if plan := f.of(t, onNode(t, "node-7")).requireScan(t); plan != byIndex || time.Since(began) != buildPatience {
			t.Errorf("a list has waited %v for a build that does not end, and has the plan %s", time.Since(began), plan)
		}
		time.AfterFunc(buildPatience/2, release)
		if plan := f.of(t, onNode(t, "node-7")).requireScan(t); plan != byKeys {
			t.Errorf("a list that has waited for a build has the plan %s", plan)
		}
	})
}

// TestKeys_Undecodable_AreCandidates: lists of every node meet an object that cannot be decoded.
// Too many of them end the keys, which are built again when the objects are gone.
func TestKeys_Undecodable_AreCandidates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t)
		f.fillNodes(t, 400)
		f.settle(t)
		last := f.Etcd.Put(podtest.Key(podtest.Pod("pod-0399")), "?")
		f.CatchUp(t)
		r := f.of(t, onNode(t, "node-7"))
		if got := r.candidates(""); r.name() != byKeys || len(got) != 5 || got[4] != "ns/pod-0399" {
			t.Errorf("plan %s with the candidates %v, want the undecodable pod too", r.name(), got)
		}
		for i := range maxUnknown {
			last = f.Etcd.Put(podtest.Key(podtest.Pod(fmt.Sprintf("pod-%04d", i))), "?")
		}
		f.CatchUp(t)
		if plan := f.of(t, onNode(t, "node-70")).name(); plan != byIndex {
			t.Errorf("with %d undecodable objects the plan is %s", maxUnknown+1, plan)
		}
		time.Sleep(2 * keysRetry)
		if plan := f.of(t, onNode(t, "node-70")).name(); plan != byIndex || f.Etcd.Revision() != last {
			t.Errorf("after another build the plan is %s", plan)
		}
		f.fillNodes(t, 400)
		time.Sleep(2 * keysRetry)
		f.require(t, onNode(t, "node-70"), byKeys, 4)
	})
}

// TestKeys_NoRoom_AreRefused: without room in the part of the budget for one resource, or for all,
// there are no keys.
func TestKeys_NoRoom_AreRefused(t *testing.T) {
	const all = 1 << 20
	for name, test := range map[string]struct{ limit, others int64 }{
		"of the resource": {limit: 24 << 10},
		// others are bytes of the indexes of other resources
		"of all": {limit: all, others: all/4*3 - 4<<10},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := keeping(t, func(o *podtest.Options) { o.Bytes = test.limit })
				f.Blocks.Charge(test.others)
				f.fillNodes(t, 400)
				time.Sleep(2 * keysRetry)
				if plan := f.of(t, onNode(t, "node-7")).requireScan(t); plan != byIndex || f.refused.Load() == 0 || f.bytes.Load() != 0 {
					t.Errorf("plan %s; %d refusals, %d bytes", plan, f.refused.Load(), f.bytes.Load())
				}
				if test.others == 0 {
					return
				}
				f.Blocks.Charge(-test.others)
				time.Sleep(2 * keysRetry)
				f.require(t, onNode(t, "node-7"), byKeys, 4)
				if f.bytes.Load() == 0 || f.Blocks.Charged() < 400*12 {
					t.Errorf("%d bytes are reported, %d counted in the budget", f.bytes.Load(), f.Blocks.Charged())
				}
			})
		})
	}
}

// TestKeys_KeysReplaced_AreBuiltAgain: lists of the next generation use digests until then.
func TestKeys_KeysReplaced_AreBuiltAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		codec := podtest.NewSwappable(podtest.Encryption(t, "1"))
		f := keeping(t, codec.With)
		for i := range 100 {
			f.Seal(t, podtest.Encryption(t, "1"), podOn(fmt.Sprintf("pod-%04d", i), fmt.Sprint("node-", i%25)))
		}
		f.CatchUp(t)
		f.require(t, onNode(t, "node-7"), byKeys, 4)
		release := f.nodeKeys().hold(t)
		codec.Set(podtest.Encryption(t, "2", "1"))
		f.require(t, onNode(t, "node-7"), byIndex, 4)
		release()
		synctest.Wait()
		f.require(t, onNode(t, "node-7"), byKeys, 4)
		codec.Set(podtest.Encryption(t, "2")) // nothing can be decrypted
		synctest.Wait()
		if _, err := f.of(t, onNode(t, "node-7")).selected(podtest.Context(t)); err == nil {
			t.Error("a list was answered with a removed key")
		}
	})
}

// TestKeys_Relisted_HoldNoOldEntry: after a relist the keys have the entries of the new list, and
// a snapshot before it is not read with them.
func TestKeys_Relisted_HoldNoOldEntry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := keeping(t, func(o *podtest.Options) { o.Window = mirror.Window{MaxAge: time.Second} })
		f.fillNodes(t, 400)
		f.settle(t)
		f.require(t, onNode(t, "node-7"), byKeys, 4)
		var entries []weak.Pointer[mirror.Entry]
		for e := range f.Latest(t).All("", "") {
			entries = append(entries, weak.Make(e))
		}
		before := f.Latest(t)
		restored := map[string]string{}
		for i := range 100 {
			pod := podOn(fmt.Sprintf("pod-%04d", i), "node-7")
			restored[podtest.Key(pod)] = podtest.Stored(t, pod)
		}
		f.Etcd.Restore(f.Etcd.Revision(), restored)
		time.Sleep(5 * time.Second)
		f.require(t, onNode(t, "node-7"), byKeys, 100)
		if plan := f.read(podtest.Context(t), before, onNode(t, "node-7")).requireScan(t); plan != byIndex {
			t.Errorf("a snapshot before the restore is read with the plan %s", plan)
		}
		before = mirror.Snapshot{}
		time.Sleep(2 * indexIdle)
		if held := held(entries); held > 0 {
			t.Errorf("%d entries of the list before are held", held)
		}
	})
}
