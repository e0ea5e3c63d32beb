package kubestorage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
)

// podFinder finds labels and the node in pods that are stored as JSON, and counts the values.
func podFinder(found *atomic.Int64) func(obj runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool) {
	stored := examplev1.SchemeGroupVersion.WithKind("Pod")
	return func(_ runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool) {
		var find transcode.Find
		switch {
		case label:
			find = transcode.FindJSONLabel(stored, name)
		case name == "involvedObject.name": // see involvedAttrs
			find = transcode.FindJSONField(stored, "spec.nodeName")
		case name == "spec.nodeName":
			find = transcode.FindJSONField(stored, name)
		}
		if find == nil {
			return nil
		}
		return func(stored []byte) ([]byte, bool, bool) {
			value, present, ok := find(stored)
			if ok {
				found.Add(1)
			}
			return value, present, ok
		}
	}
}

func withFinder(found *atomic.Int64) func(*options) {
	return func(o *options) { o.engine.Finder = podFinder(found) }
}

// foundTwin is eventTwin with values that are found in stored bytes.
func foundTwin(t *testing.T, n int, found *atomic.Int64) *twin {
	t.Helper()
	w := newTwinOf(t, mirror.Window{}, func(cfg *storeConfig) {
		cfg.GroupResource, cfg.GetAttrs = schema.GroupResource{Group: t.Name(), Resource: "events"}, involvedAttrs
	}, podFinder(found))
	for i := range n {
		pod := newPod(fmt.Sprintf("event-%04d", i))
		pod.Spec.NodeName, pod.Labels = fmt.Sprint("object-", i%100), map[string]string{"n": fmt.Sprint(i % 50)}
		w.put(t, pod)
	}
	w.catchUp(t)
	return w
}

// readValues returns strata_list_read_values_total.
func readValues(t *testing.T, w *twin, source string) float64 {
	t.Helper()
	n, err := testutil.GetCounterMetricValue(metrics.ListValues.WithLabelValues(w.group.Group, w.group.Resource, source))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// cachedAttributes counts the objects that have cached attributes.
func cachedAttributes(t *testing.T, w *twin) (n int) {
	t.Helper()
	gen := w.view.CurrentGeneration()
	for e := range mustLatest(t, w.Store).All("", "") {
		if gen.KnownAttributes(e) != nil {
			n++
		}
	}
	return n
}

// TestFinder_FirstLists_DecodeSelectedObjects: lists by a label or field decode the selected objects, and cache their attributes, from the first one on:
// without an index, while its digests are made, and for a negation after that.
func TestFinder_FirstLists_DecodeSelectedObjects(t *testing.T) {
	const n = 1000
	var found atomic.Int64
	w := foundTwin(t, n, &found)
	label := storage.SelectionPredicate{Label: parseLabels(t, "n=7"), Field: fields.Everything(), GetAttrs: involvedAttrs}
	exists := label
	exists.Label = parseLabels(t, "none")
	field := involved(t, "spec.nodeName=object-8")
	field.IndexFields = []string{"spec.nodeName"}
	for i, c := range []struct {
		pred     storage.SelectionPredicate
		plan     string
		selected int
		decoded  int // selected objects that no list has decoded for their attributes
		found    int64
	}{
		{exists, metrics.PlanStored, 0, 0, n}, // the first use of a label makes no index
		{label, metrics.PlanStored, 20, 20, n},
		{label, metrics.PlanIndex, 20, 0, n - 20}, // digests of cached attributes, and of stored values
		{label, metrics.PlanIndex, 20, 0, 0},
		{field, metrics.PlanIndex, 10, 10, n - 20},
		{field, metrics.PlanIndex, 10, 0, 0},
	} {
		opts := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: c.pred}
		r, err := w.Read(contextFor(t), "/pods/", opts)
		if err != nil {
			t.Fatal(err)
		}
		before, values, attributes := found.Load(), readValues(t, w, "stored"), cachedAttributes(t, w)
		if got := r.planName(); got != c.plan {
			t.Errorf("list %d has the plan %s, want %s", i, got, c.plan)
		}
		selected := 0
		for e := range r.Candidates() {
			ok, err := r.Matches(contextFor(t), e)
			if err != nil {
				t.Fatal(err)
			}
			if ok {
				selected++
			}
		}
		r.Close()
		if got := found.Load() - before; got != c.found {
			t.Errorf("list %d found %d stored values, want %d", i, got, c.found)
		}
		if got := readValues(t, w, "stored") - values; got != float64(c.found) {
			t.Errorf("list %d has counted %v stored values, want %d", i, got, c.found)
		}
		if got := cachedAttributes(t, w) - attributes; got != c.decoded || selected != c.selected {
			t.Errorf("list %d selected %d objects and cached the attributes of %d, want %d and %d", i, selected, got, c.selected, c.decoded)
		}
	}
	if n := readValues(t, w, "decoded"); n != 0 {
		t.Errorf("%v objects were decoded for their values", n)
	}
}

// TestFinder_ValuesThatAreNotFound_AreDecoded: an object without the field may have a default, so it is decoded, and lists are the same.
func TestFinder_ValuesThatAreNotFound_AreDecoded(t *testing.T) {
	var found atomic.Int64
	w := foundTwin(t, 200, &found)
	before := readValues(t, w, "decoded")
	for i := range 50 {
		pod := newPod(fmt.Sprintf("event-9%03d", i))
		pod.Labels = map[string]string{"n": []string{"é", `"`, `\`}[i%3]}
		w.put(t, pod)
	}
	w.catchUp(t)
	names := func(selector string) []string {
		t.Helper()
		out := &example.PodList{}
		pred := involved(t, selector)
		pred.IndexFields = []string{"spec.nodeName"}
		if err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}, out); err != nil {
			t.Fatal(err)
		}
		return podPaths(out)
	}
	for range 3 {
		if got := names("spec.nodeName="); len(got) != 50 || slices.Contains(got, "ns/event-0000") {
			t.Errorf("%d objects have no node, want 50: %v", len(got), got)
		}
		if got := names("spec.nodeName!=object-7"); len(got) != 248 {
			t.Errorf("%d objects have another node, want 248", len(got))
		}
		if got := names("spec.nodeName!="); len(got) != 200 {
			t.Errorf("%d objects have a node, want 200", len(got))
		}
	}
	if decoded := readValues(t, w, "decoded") - before; found.Load() == 0 || decoded != 50 {
		t.Errorf("%d values were found, and %v objects decoded, want 50", found.Load(), decoded)
	}
}

// TestFinder_MostValuesAreNotFound_EndsSearches: values stored in another form are searched up to a bound, then lists decode all objects as without a
// finder. A resource of which most values are found continues.
func TestFinder_MostValuesAreNotFound_EndsSearches(t *testing.T) {
	const pods, bound = 2000, 1000
	for _, known := range []int{0, pods / 4, pods * 3 / 4} { // pods whose value is found
		var searched atomic.Int64
		w := newTwinOf(t, mirror.Window{}, func(*storeConfig) {}, func(runtime.Object, bool, string) objects.Find {
			return func(stored []byte) ([]byte, bool, bool) {
				searched.Add(1)
				return []byte("b"), true, bytes.Contains(stored, []byte(`"known":"yes"`))
			}
		})
		for i := range pods {
			pod := newPod(fmt.Sprintf("pod-%04d", i))
			pod.Labels = map[string]string{"a": "b", "known": "no"}
			if i%4 < known*4/pods {
				pod.Labels["known"] = "yes"
			}
			w.put(t, pod)
		}
		w.catchUp(t)
		list := func() (plan string, candidates int) {
			t.Helper()
			pred := storage.SelectionPredicate{Label: parseLabels(t, "a=c"), Field: fields.Everything(), GetAttrs: podAttrs}
			r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			for e := range r.Candidates() {
				if ok, err := r.Matches(contextFor(t), e); err != nil || ok {
					t.Fatalf("%s: %t, %v", e.Key(), ok, err)
				}
				candidates++
			}
			return r.planName(), candidates
		}
		if plan, n := list(); plan != metrics.PlanStored || n < pods-known {
			t.Errorf("of %d known values, the first list has the plan %s and %d candidates", known, plan, n)
		}
		first := searched.Load()
		gen := w.view.CurrentGeneration()
		finder := gen.Finder(true, "other")
		if ends := known < pods/2; ends != (finder == nil) {
			t.Errorf("of %d known values, %d were searched, and there is a finder: %t", known, first, finder != nil)
		} else if missed := first * int64(pods-known) / pods; ends && missed > bound+64 || !ends && first != pods {
			t.Errorf("of %d known values, %d were searched", known, first)
		}
		if known == 0 {
			other := storage.SelectionPredicate{Label: parseLabels(t, "other=c"), Field: fields.Everything(), GetAttrs: podAttrs}
			r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: other})
			if err != nil {
				t.Fatal(err)
			}
			if got := r.planName(); got != metrics.PlanScan {
				t.Errorf("a later list has the plan %s", got)
			}
			r.Close()
		}
		list() // by the index, which has the finder
		if n := searched.Load() - first; finder == nil && n != 0 {
			t.Errorf("of %d known values, %d were searched later", known, n)
		}
	}
}

// TestFinder_Uses_MakeIndex: the second use of a label within ten minutes makes its index, and the first one where values are large. A list in the next minutes
// then reads no stored value.
func TestFinder_Uses_MakeIndex(t *testing.T) {
	const pods = 100
	for _, c := range []struct {
		size, found int64 // bytes of an annotation; values that are found in all lists
		pause       time.Duration
		plans       []string
	}{
		{100, 2 * pods, 2 * time.Minute, []string{metrics.PlanStored, metrics.PlanIndex, metrics.PlanIndex}},
		{100, 3 * pods, 11 * time.Minute, []string{metrics.PlanStored, metrics.PlanStored, metrics.PlanStored}},
		{5000, pods, 2 * time.Minute, []string{metrics.PlanIndex, metrics.PlanIndex, metrics.PlanIndex}},
	} {
		synctest.Test(t, func(t *testing.T) {
			var found atomic.Int64
			w := newTwinOf(t, mirror.Window{}, func(*storeConfig) {}, podFinder(&found))
			for i := range pods {
				pod := newPod(fmt.Sprintf("pod-%04d", i))
				pod.Labels, pod.Annotations = map[string]string{"n": "1"}, map[string]string{"text": strings.Repeat("t", int(c.size))}
				w.put(t, pod)
			}
			w.catchUp(t)
			var plans []string
			for range c.plans {
				r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: labelled("n", "2")})
				if err != nil {
					t.Fatal(err)
				}
				plans = append(plans, r.planName())
				for e := range r.Candidates() {
					t.Fatalf("%s is a candidate", e.Key())
				}
				r.Close()
				time.Sleep(c.pause)
			}
			if !slices.Equal(plans, c.plans) || found.Load() != c.found {
				t.Errorf("with %d bytes and a list each %s: plans %s, want %s; %d values were found, want %d", c.size, c.pause, plans, c.plans, found.Load(), c.found)
			}
		})
	}
}

// TestFinder_UndecodableObjects_FailListsThatMaySelectThem: an object whose bytes are intact where the finder reads is not decoded by a list that excludes its
// value, and is not among the objects that the list reports. One whose bytes are malformed, or hidden by a missing key, fails every list.
func TestFinder_UndecodableObjects_FailListsThatMaySelectThem(t *testing.T) {
	for _, unsafe := range []bool{false, true} {
		var found atomic.Int64
		w := foundTwin(t, 200, &found)
		w.unsafeDelete = unsafe
		// reports are the objects that a list reports: the first one, or all with AllowUnsafeMalformedObjectDeletion.
		reports := func(selector string) (n int) {
			t.Helper()
			pred := storage.SelectionPredicate{Label: parseLabels(t, selector), Field: fields.Everything(), GetAttrs: involvedAttrs}
			err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}, &example.PodList{})
			var status *apierrors.StatusError
			switch {
			case errors.As(err, &status) && unsafe:
				return len(status.ErrStatus.Details.Causes)
			case err != nil:
				return 1
			}
			return 0
		}
		put := func(name, spec, end string) {
			w.etcd.Put(etcdKey(newPod(name)), fmt.Sprintf(`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":%q,"labels":{"n":"1"}},"spec":{"nodeName":%s}%s`, name, spec, end))
			w.catchUp(t)
		}
		put("event-0000-x", "5", "}") // a string in upstream's type
		for round := range 3 {        // by stored values, and by the index
			for selector, want := range map[string]int{"n=7": 0, "n=1": 1, "n!=7": 1, "n in (7,8)": 0, "": 1} {
				if got := reports(selector); got != want {
					t.Errorf("round %d: a list of %q reports %d objects, want %d", round, selector, got, want)
				}
			}
		}
		put("event-0000-y", "5", "")
		for selector, want := range map[string]int{"n=7": 1, "n=1": 2, "n!=7": 2, "": 2} {
			if !unsafe {
				want = 1
			}
			if got := reports(selector); got != want {
				t.Errorf("with malformed bytes, a list of %q reports %d objects, want %d", selector, got, want)
			}
		}
	}
}

// TestFinder_StoredPlan_CountsDecodedObjects: a list without an index finds the values of most objects, and decodes the others to compare them.
func TestFinder_StoredPlan_CountsDecodedObjects(t *testing.T) {
	var found atomic.Int64
	w := foundTwin(t, 200, &found)
	for i := range 50 {
		pod := newPod(fmt.Sprintf("event-9%03d", i))
		pod.Labels = map[string]string{"n": `\`}
		w.put(t, pod)
	}
	w.catchUp(t)
	stored, decoded := readValues(t, w, "stored"), readValues(t, w, "decoded")
	pred := storage.SelectionPredicate{Label: parseLabels(t, "n=7"), Field: fields.Everything(), GetAttrs: involvedAttrs}
	out := &example.PodList{}
	if err := w.GetList(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred}, out); err != nil {
		t.Fatal(err)
	}
	stored, decoded = readValues(t, w, "stored")-stored, readValues(t, w, "decoded")-decoded
	if len(out.Items) != 4 || stored != 200 || decoded != 50 || cachedAttributes(t, w) != 54 {
		t.Errorf("%d objects, want 4; %v values were found, want 200; %v objects decoded, want 50; %d have attributes, want 54", len(out.Items), stored, decoded, cachedAttributes(t, w))
	}
}

// TestFinder_Negation_ComparesStoredValues: the digest has values by their hashes, and a negation compares one value of each hash, which no cached
// attributes have.
func TestFinder_Negation_ComparesStoredValues(t *testing.T) {
	var found atomic.Int64
	w := foundTwin(t, 1000, &found)
	pred := involved(t, "spec.nodeName!=object-8")
	pred.IndexFields = []string{"spec.nodeName"}
	r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	candidates := map[string]bool{}
	for e := range r.Candidates() {
		candidates[e.Key()] = true
	}
	if len(candidates) != 990 || cachedAttributes(t, w) != 0 {
		t.Errorf("%d candidates, want 990; %d objects have cached attributes, want none: %v", len(candidates), cachedAttributes(t, w), slices.Sorted(maps.Keys(candidates))[:3])
	}
}

// TestFinder_ConcurrentWalksOfEndedList_DoNotWrite: the walks of a list share its plan, also after its context has ended. The race detector checks it.
func TestFinder_ConcurrentWalksOfEndedList_DoNotWrite(t *testing.T) {
	var found atomic.Int64
	w := foundTwin(t, 200, &found)
	ctx, cancel := context.WithCancel(contextFor(t))
	pred := storage.SelectionPredicate{Label: parseLabels(t, "n=7"), Field: fields.Everything(), GetAttrs: involvedAttrs}
	r, err := w.Read(ctx, "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got := r.planName(); got != metrics.PlanStored {
		t.Fatalf("plan %s", got)
	}
	cancel()
	var walks sync.WaitGroup
	for range 4 {
		walks.Go(func() {
			for range r.Candidates() {
			}
		})
	}
	walks.Wait()
}

// TestEstimate_Negation_ReadsNoStoredValue: the walk compares a value of each hash; an estimate before it leaves that to the walk.
func TestEstimate_Negation_ReadsNoStoredValue(t *testing.T) {
	var found atomic.Int64
	w := foundTwin(t, 1000, &found)
	pred := involved(t, "spec.nodeName!=object-8")
	pred.IndexFields = []string{"spec.nodeName"}
	for round, want := range []bool{true, false} { // without digests, and with them
		r, err := w.Read(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
		if err != nil {
			t.Fatal(err)
		}
		before := found.Load()
		if r.EstimatedBytes() == 0 || found.Load() != before {
			t.Errorf("round %d: the estimate has read %d stored values", round, found.Load()-before)
		}
		n := 0
		for range r.Candidates() {
			n++
		}
		r.Close()
		if read := found.Load() - before; n != 990 || (read >= 1000) != want || read == 0 {
			t.Errorf("round %d: %d candidates, want 990; %d stored values were read", round, n, read)
		}
	}
}

// TestEstimate_AnyLimitAndDigests_LeavesCandidates: an estimate keeps the candidates that it finds, up to its limit, to the first leaf without a digest, or
// to the bound of held candidates; a walk yields the same candidates as without an estimate.
func TestEstimate_AnyLimitAndDigests_LeavesCandidates(t *testing.T) {
	for _, finds := range []bool{false, true} {
		finder := podFinder(new(atomic.Int64))
		if !finds {
			finder = nil
		}
		w := newTwinOf(t, mirror.Window{}, func(cfg *storeConfig) {
			cfg.GroupResource, cfg.GetAttrs = schema.GroupResource{Resource: "events"}, involvedAttrs
		}, finder)
		put := func(from, to int) {
			for i := from; i < to; i++ {
				pod := newPod(fmt.Sprintf("event-%05d", i))
				pod.Spec.NodeName = fmt.Sprint("object-", i%2)
				w.put(t, pod)
			}
			w.catchUp(t)
		}
		candidates := func(estimate bool, limit int64, selector string, start int) (keys []string) {
			pred := involved(t, selector)
			pred.Limit = limit
			opts := storage.ListOptions{Recursive: true, Predicate: pred}
			r, err := w.Read(contextFor(t), "/pods/", opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			if r.plan == nil {
				t.Fatalf("%s has no plan", selector)
			}
			if start > 0 {
				r.Start = etcdKey(newPod(fmt.Sprintf("event-%05d", start)))
			}
			if estimate {
				r.EstimatedBytes()
			}
			if estimate != (r.known != nil) {
				t.Fatalf("candidates of an estimate are used: %t", !estimate)
			}
			for e := range r.Candidates() {
				keys = append(keys, e.Key())
			}
			return keys
		}
		put(0, 10_000) // 5,000 of each object: more than an estimate holds
		for round := range 3 {
			for _, selector := range []string{"involvedObject.name=object-1", "involvedObject.kind=Pod,involvedObject.name=object-1", "involvedObject.name!=object-1"} {
				for _, limit := range []int64{0, 1, 30, 31, 32, 500, 4096, 4097} {
					for _, start := range []int{0, 1, 777, 9_990} {
						// Before the walk without an estimate: that makes all digests.
						got := candidates(true, limit, selector, start)
						want := candidates(false, limit, selector, start)
						if !slices.Equal(got, want) || len(want) == 0 {
							t.Fatalf("%s from %d, limit %d, round %d: %d candidates, want %d", selector, start, limit, round, len(got), len(want))
						}
					}
				}
				put(3000*round, 3000*round+70) // leaves without digests
			}
		}
	}
}
