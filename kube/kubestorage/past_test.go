package kubestorage

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/representation"
)

// olderThanMemory returns the options of a list at the current revision, and then makes memory drop
// that revision: etcd is not compacted.
func (f *fixture) olderThanMemory(t testing.TB) storage.ListOptions {
	t.Helper()
	f.catchUp(t)
	rev := f.cluster.mirror.PublishedRevision()
	f.create(t, newPod("later"))
	f.catchUp(t)
	f.cluster.mirror.Compact(f.cluster.mirror.PublishedRevision())
	eventually(t, "the mirror compacts its history", func() bool { return f.cluster.mirror.Stats().Compacted > rev })
	opts := everything()
	opts.ResourceVersion, opts.ResourceVersionMatch = fmt.Sprint(rev), metav1.ResourceVersionMatchExact
	return opts
}

// pastPods creates pods of which a part is changed or deleted after the revision of the returned
// options, which is older than memory; want is the state at that revision.
func pastPods(t testing.TB, f *fixture, n int, pad string) (opts storage.ListOptions, want map[string]*example.Pod) {
	t.Helper()
	want = map[string]*example.Pod{}
	for i := range n {
		pod := withLabel(newPod(fmt.Sprintf("pod-%04d", i)), "i", fmt.Sprint(i%7))
		pod.Annotations = map[string]string{"pad": pad}
		want[pod.Name] = f.create(t, pod)[0]
	}
	opts = f.olderThanMemory(t)
	for i, name := range slices.Sorted(maps.Keys(want)) {
		switch i % 5 {
		case 0:
			f.update(t, want[name], "later")
		case 1:
			f.remove(t, want[name])
		}
	}
	f.catchUp(t)
	return opts, want
}

// pastList is a list at a revision that is in etcd but not in memory.
type pastList struct {
	f    *fixture
	opts storage.ListOptions
	n    int // pods, of which memory shares three fifths
	pad  string
	want map[string]*example.Pod
}

// requirePods fails unless the list has the pods from, from+every, ... below to, in their state at
// the revision.
func (p *pastList) requirePods(t *testing.T, list *example.PodList, from, to, every int) {
	t.Helper()
	var names []string
	for i := from; i < to; i += every {
		names = append(names, fmt.Sprintf("pod-%04d", i))
	}
	if got := podNames(list); got != strings.Join(names, " ") {
		t.Fatalf("list has %q, want %q", got, names)
	}
	for i := range list.Items {
		got, want := &list.Items[i], p.want[list.Items[i].Name]
		if got.ResourceVersion != want.ResourceVersion || got.Annotations["pad"] != p.pad || got.Annotations["value"] != "" {
			t.Errorf("%s is of %s, want %s", got.Name, got.ResourceVersion, want.ResourceVersion)
		}
	}
	if list.ResourceVersion != p.opts.ResourceVersion {
		t.Errorf("list is of %s, want %s", list.ResourceVersion, p.opts.ResourceVersion)
	}
}

// testWithoutLimit lists without a limit, and with a negative one, which upstream takes for no
// limit.
func (p *pastList) testWithoutLimit(t *testing.T) {
	for _, limit := range []int64{0, -1} {
		all := p.opts
		all.Predicate.Limit = limit
		list := p.f.list(t, all)
		p.requirePods(t, list, 0, p.n, 1)
		if list.Continue != "" || list.RemainingItemCount != nil {
			t.Errorf("limit %d: continue %q, %v remain", limit, list.Continue, list.RemainingItemCount)
		}
	}
}

// testPages lists in pages, whose tokens and counts of remaining items are exact.
func (p *pastList) testPages(t *testing.T) {
	page, from := p.opts, 0
	page.ResourceVersionMatch, page.Predicate.Limit = "", 17 // the legacy form
	for {
		list := p.f.list(t, page)
		to := min(p.n, from+17)
		p.requirePods(t, list, from, to, 1)
		if from = to; from == p.n {
			if list.Continue != "" {
				t.Error("a token after the last page")
			}
			break
		}
		if list.RemainingItemCount == nil || *list.RemainingItemCount != int64(p.n-to) {
			t.Fatalf("%v remain after %d of %d", list.RemainingItemCount, to, p.n)
		}
		page.ResourceVersion, page.Predicate.Continue = "", list.Continue
	}
}

// testSelectedPages lists every seventh pod in pages, which have no count of remaining items.
func (p *pastList) testSelectedPages(t *testing.T) {
	page, from := p.opts, 3
	page.Predicate = storage.SelectionPredicate{Label: labels.SelectorFromSet(labels.Set{"i": "3"}), Field: fields.Everything(), GetAttrs: podAttrs, Limit: 4}
	for {
		list := p.f.list(t, page)
		to := min(from+4*7, p.n)
		p.requirePods(t, list, from, to, 7)
		if list.RemainingItemCount != nil {
			t.Errorf("%d remain, of a list with a selector", *list.RemainingItemCount)
		}
		if from = to; list.Continue == "" {
			break
		}
		page.ResourceVersion, page.ResourceVersionMatch, page.Predicate.Continue = "", "", list.Continue
	}
	if from != p.n {
		t.Errorf("the walk ended at %d of %d", from, p.n)
	}
}

// testBytes encodes the list twice, as the read path does: the bytes of the measuring pass equal
// those of the writing pass.
func (p *pastList) testBytes(t *testing.T) {
	s := p.f.engine(t)
	rep := newRepresentation(s, nameEncoder, nil)
	r, err := s.Read(contextFor(t), "/pods", p.opts)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if !r.FromEtcd() || r.Count() != p.n {
		t.Fatalf("from etcd: %t, %d objects", r.FromEtcd(), r.Count())
	}
	var passes [2]string
	for i := range passes {
		var spans representation.Spans
		for run := range r.Runs() {
			spans.Reset()
			if err := rep.AppendOnce(contextFor(t), &spans, run); err != nil {
				t.Fatal(err)
			}
			for _, span := range spans.All {
				passes[i] += string(span)
			}
		}
		if err := r.Err(); err != nil {
			t.Fatal(err)
		}
	}
	if passes[0] != passes[1] || strings.Count(passes[0], "\n") != p.n {
		t.Errorf("the passes differ, or have not %d items: %d, %d", p.n, strings.Count(passes[0], "\n"), strings.Count(passes[1], "\n"))
	}
}

// TestPastList_OlderThanMemory_IsReadFromEtcd reads a revision that is in etcd but not in memory:
// completely, in pages, with selectors, encoded. Unchanged objects are not decoded again.
func TestPastList_OlderThanMemory_IsReadFromEtcd(t *testing.T) {
	t.Parallel()
	p := &pastList{f: setup(t), n: 150, pad: "0123456789012345678901234567890123456789"}
	p.opts, p.want = pastPods(t, p.f, p.n, p.pad)
	t.Run("all", p.testWithoutLimit)
	t.Run("pages", p.testPages)
	t.Run("selected pages", p.testSelectedPages)
	t.Run("bytes", p.testBytes)
	if len(p.f.cluster.listPlaces) != 0 {
		t.Errorf("%d places are still taken", len(p.f.cluster.listPlaces))
	}
}

// nameEncoder encodes an object as a line with its name and resource version.
func nameEncoder(dst []byte, obj runtime.Object) ([]byte, error) {
	pod := obj.(*example.Pod)
	return fmt.Appendf(dst, "%s %s\n", pod.Name, pod.ResourceVersion), nil
}

// TestPastList_UnchangedObject_IsNotDecodedAgain: an unchanged object that was decoded for a list
// of the present is not decoded again for one of the past.
func TestPastList_UnchangedObject_IsNotDecodedAgain(t *testing.T) {
	t.Parallel()
	f := setup(t)
	opts, _ := pastPods(t, f, 50, "")
	f.list(t, everything())
	decoded := f.codec.during(func() { f.list(t, opts) })
	// One more object is decoded to detect that etcd is not compacted, although memory has that
	// revision as compacted.
	if len(decoded) != 21 {
		t.Errorf("decoded %d objects, want the 20 that have changed since", len(decoded))
	}
}

// TestPastList_OvertakenByCompaction_Returns410: etcd is compacted between two pages of one list
// from etcd, and before one.
func TestPastList_OvertakenByCompaction_Returns410(t *testing.T) {
	f := setup(t)
	opts, _ := pastPods(t, f, 600, "") // more than the first page from etcd
	s, ctx := f.engine(t), contextFor(t)
	r, err := s.Read(ctx, "/pods", opts)
	if err != nil {
		t.Fatal(err)
	}
	f.compact(ctx, t, fmt.Sprint(f.cluster.mirror.PublishedRevision()))
	for range r.Runs() {
	}
	before, _ := series(t, "strata_lists_expired_total", podsResource)
	for range 2 {
		if err := r.Err(); !apierrors.IsResourceExpired(err) {
			t.Errorf("in the middle: %v, want 410", err)
		}
	}
	if n, _ := series(t, "strata_lists_expired_total", podsResource); n != before+1 {
		t.Errorf("%v lists counted as expired, want 1", n-before)
	}
	// A request for a compacted revision does not wait for readers.
	for range cap(f.cluster.listPlaces) {
		f.cluster.listPlaces <- struct{}{}
	}
	if err := s.GetList(ctx, "/pods", opts, &example.PodList{}); !apierrors.IsResourceExpired(err) {
		t.Errorf("without a place: %v, want 410", err)
	}
	for range cap(f.cluster.listPlaces) {
		<-f.cluster.listPlaces
	}
	r.Close()
	r.Close() // has no effect
	if err := s.GetList(ctx, "/pods", opts, &example.PodList{}); !apierrors.IsResourceExpired(err) {
		t.Errorf("afterwards: %v, want 410", err)
	}
	if len(f.cluster.listPlaces) != 0 {
		t.Errorf("%d places are still taken", len(f.cluster.listPlaces))
	}
}

// TestPastList_RequestCanceled_StopsReadingEtcd: it sends no more requests to etcd.
func TestPastList_RequestCanceled_StopsReadingEtcd(t *testing.T) {
	t.Parallel()
	f := setup(t)
	opts, _ := pastPods(t, f, 600, "")
	ctx, cancel := context.WithCancel(contextFor(t))
	r, err := f.engine(t).Read(ctx, "/pods", opts)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cancel()
	for range r.Runs() {
	}
	if err := r.Err(); err == nil {
		t.Error("the list went on without its request")
	}
}

// TestChunking_GateOff_IgnoresLimitAndContinue: limit and continue are ignored, and no token is
// returned.
func TestChunking_GateOff_IgnoresLimitAndContinue(t *testing.T) {
	t.Parallel()
	for name, where := range map[string][]func(*options){"memory": nil, "etcd": {fromEtcd}, "uncached": {uncached}} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, append(where, withGates(gates(t, Gates(), "APIListChunking=false")))...)
			first := f.create(t, newPod("a"))[0]
			f.create(t, newPod("b"), newPod("c"))
			f.catchUp(t)
			token, err := storage.EncodeContinue("/pods/b", "/pods", parseRevision(t, first.ResourceVersion))
			if err != nil {
				t.Fatal(err)
			}
			for name, change := range map[string]func(*storage.ListOptions){
				"limit":            func(o *storage.ListOptions) { o.Predicate.Limit = 1 },
				"continue":         func(o *storage.ListOptions) { o.Predicate.Continue = token },
				"both":             func(o *storage.ListOptions) { o.Predicate.Limit, o.Predicate.Continue = 1, token },
				"garbage":          func(o *storage.ListOptions) { o.Predicate.Continue = "garbage" },
				"limit at version": func(o *storage.ListOptions) { o.Predicate.Limit, o.ResourceVersion = 1, first.ResourceVersion },
			} {
				opts := everything()
				change(&opts)
				if list := f.list(t, opts); podNames(list) != "a b c" || list.Continue != "" || list.RemainingItemCount != nil {
					t.Errorf("%s: %q, continue %q, %v remain", name, podNames(list), list.Continue, list.RemainingItemCount)
				}
			}
		})
	}
}

// TestListMetrics_CountBySourceAndReason by source and reason.
func TestListMetrics_CountBySourceAndReason(t *testing.T) {
	f := setup(t)
	f.create(t, newPod("a"), newPod("b"), newPod("c"))
	f.catchUp(t)
	count := func(source, reason string) float64 {
		n, _ := series(t, "strata_lists_total", podsResource, "source", source, "reason", reason)
		return n
	}
	pages := func(continued string) float64 {
		n, _ := series(t, "strata_list_pages_total", podsResource, "continued", continued)
		return n
	}
	list := func(source, reason string, change func(*storage.ListOptions)) *example.PodList {
		t.Helper()
		opts := everything()
		change(&opts)
		before := count(source, reason)
		list := f.list(t, opts)
		if n := count(source, reason) - before; n != 1 {
			t.Errorf("%s, %s: %v lists counted, want 1", source, reason, n)
		}
		return list
	}
	present := f.cluster.mirror.PublishedRevision()
	exactly := func(o *storage.ListOptions) {
		o.ResourceVersion, o.ResourceVersionMatch = fmt.Sprint(present), metav1.ResourceVersionMatchExact
	}
	list(metrics.SourcePresent, metrics.ReasonConsistent, func(o *storage.ListOptions) {})
	list(metrics.SourcePresent, metrics.ReasonAny, func(o *storage.ListOptions) { o.ResourceVersion = "0" })
	list(metrics.SourcePresent, metrics.ReasonNotOlder, func(o *storage.ListOptions) { o.ResourceVersion = "1" })
	list(metrics.SourcePresent, metrics.ReasonExact, exactly)
	first := list(metrics.SourcePresent, metrics.ReasonConsistent, func(o *storage.ListOptions) { o.Predicate.Limit = 1 })
	f.create(t, newPod("d"))
	f.catchUp(t)
	list(metrics.SourcePast, metrics.ReasonExact, exactly)
	list(metrics.SourcePast, metrics.ReasonLegacy, func(o *storage.ListOptions) { o.ResourceVersion, o.Predicate.Limit = fmt.Sprint(present), 1 })
	before := pages("true")
	list(metrics.SourcePast, metrics.ReasonContinue, func(o *storage.ListOptions) { o.Predicate.Limit, o.Predicate.Continue = 1, first.Continue })
	if n := pages("true") - before; n != 1 {
		t.Errorf("%v pages counted, want 1", n)
	}
	f.olderThanMemory(t)
	list(metrics.SourceEtcd, metrics.ReasonPast, exactly)
	if st := f.engine(t).resource.Stats(); st.Readers != 0 {
		t.Errorf("%d readers of old revisions are counted after the last has ended", st.Readers)
	}
}
