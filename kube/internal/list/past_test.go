package list

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// pastList is a list at a revision that is in etcd but not in memory.
type pastList struct {
	*fixture
	opts storage.ListOptions
	want map[string]string // resource versions at the revision, by name
}

// newPastList creates n pods, labelled i=0 to i=6 in turn. After the revision a fifth of them
// changes, another is deleted, and one is created.
func newPastList(t *testing.T, n int, change ...func(*options)) *pastList {
	t.Helper()
	p := &pastList{fixture: newFixture(t, change...), want: map[string]string{}}
	for i := range n {
		pod := podtest.Labelled(podName(i), "i", fmt.Sprint(i%7))
		rev := p.Put(t, pod)
		p.want[pod.Name] = fmt.Sprint(rev)
		p.opts = exactly(everything(), rev)
	}
	p.Put(t, podtest.Pod("later"))
	p.olderThanMemory(t)
	for i := range n {
		switch pod := podtest.Labelled(podName(i), "i", "later"); i % 5 {
		case 0:
			p.Put(t, pod)
		case 1:
			p.Etcd.Delete(podtest.Key(pod))
		}
	}
	p.CatchUp(t)
	return p
}

func podName(i int) string { return fmt.Sprintf("pod-%04d", i) }

// requirePods fails unless the list has the pods from, from+every, ... below to, in their state at
// the revision.
func (p *pastList) requirePods(t *testing.T, list *example.PodList, from, to, every int) {
	t.Helper()
	var want []string
	for i := from; i < to; i += every {
		want = append(want, podName(i))
	}
	if got := names(list); got != strings.Join(want, " ") {
		t.Fatalf("list has %q, want %q", got, want)
	}
	for i := range list.Items {
		if pod := &list.Items[i]; pod.ResourceVersion != p.want[pod.Name] || pod.Labels["i"] == "later" {
			t.Errorf("%s is of %s, want %s", pod.Name, pod.ResourceVersion, p.want[pod.Name])
		}
	}
	if list.ResourceVersion != p.opts.ResourceVersion {
		t.Errorf("list is of %s, want %s", list.ResourceVersion, p.opts.ResourceVersion)
	}
	if len(p.env.Past.Places) != 0 {
		t.Errorf("%d places are still taken", len(p.env.Past.Places))
	}
}

// TestPastList_OlderThanMemory_IsReadFromEtcd: completely, in pages whose tokens and counts of
// remaining items are exact, and with selectors.
func TestPastList_OlderThanMemory_IsReadFromEtcd(t *testing.T) {
	const n = 600 // more than the first page from etcd
	p := newPastList(t, n)
	for _, limit := range []int64{0, -1} { // upstream takes a negative limit for no limit
		list := p.list(t, "/pods/", limited(p.opts, limit))
		p.requirePods(t, list, 0, n, 1)
		if list.Continue != "" || list.RemainingItemCount != nil {
			t.Errorf("limit %d: continue %q, %v remain", limit, list.Continue, list.RemainingItemCount)
		}
	}
	for _, limit := range []int{1, n - 1, n, 170} {
		from, opts := 0, limited(p.opts, int64(limit))
		for page := 0; page < 4 && from < n; page++ {
			list, to := p.list(t, "/pods/", opts), min(from+limit, n)
			p.requirePods(t, list, from, to, 1)
			if more := to < n; (list.Continue != "") != more || more && *list.RemainingItemCount != int64(n-to) {
				t.Fatalf("limit %d, after %d: continue %q, %v remain", limit, to, list.Continue, list.RemainingItemCount)
			}
			from, opts = to, continued(opts, list.Continue)
		}
	}
	from, opts := 3, limited(p.opts, 4)
	opts.Predicate.Label, opts.Predicate.GetAttrs = podtest.Selecting(t, "i=3", "").Label, podtest.Attrs
	for more := true; more; {
		list, to := p.list(t, "/pods/", opts), min(from+4*7, n)
		p.requirePods(t, list, from, to, 7)
		if list.RemainingItemCount != nil {
			t.Errorf("%d remain, of a list with a selector", *list.RemainingItemCount)
		}
		from, opts, more = to, continued(opts, list.Continue), list.Continue != ""
	}
	if from != n {
		t.Errorf("the pages ended at %d of %d", from, n)
	}
}

// TestPastList_SecondWalk_HasSameEntries: the entries that fit etcdread.Reader.Keep, and those that
// are read again.
func TestPastList_SecondWalk_HasSameEntries(t *testing.T) {
	p := newPastList(t, 600)
	for _, keep := range []int64{KeepBytes, 0} {
		p.env.Past.Keep = keep
		r := p.read(t, p.opts)
		if held, _ := r.Objects().Count("", ""); !r.FromEtcd() || r.Count() != len(p.want) || held != 0 {
			t.Errorf("from etcd: %t, %d entries, %d in memory", r.FromEtcd(), r.Count(), held)
		}
		for pass := range 2 {
			got := map[string]string{}
			for run := range r.Runs() {
				for _, e := range run.Items() {
					got[strings.TrimPrefix(e.Key(), podtest.Root+"ns/")] = fmt.Sprint(e.ModRevision())
				}
			}
			if !maps.Equal(got, p.want) || r.Err() != nil {
				t.Errorf("keep %d, pass %d: %d entries, %v", keep, pass, len(got), r.Err())
			}
		}
	}
}

// TestPastList_UnchangedObject_IsNotDecodedAgain: an unchanged object that was decoded for a list
// of the present is not decoded again for one of the past.
func TestPastList_UnchangedObject_IsNotDecodedAgain(t *testing.T) {
	p := newPastList(t, 50)
	p.list(t, "/pods/", everything())
	// One more object is decoded to detect that etcd is not compacted, although memory has that
	// revision as compacted.
	if n := p.Decoded(func() { p.list(t, "/pods/", p.opts) }); n != 21 {
		t.Errorf("decoded %d objects, want the 20 that have changed since and one to detect a compaction", n)
	}
}

// TestPastList_OvertakenByCompaction_Returns410: etcd is compacted between two pages of one list
// from etcd, and before one, which does not wait for a place.
func TestPastList_OvertakenByCompaction_Returns410(t *testing.T) {
	p := newPastList(t, 600)
	r := p.read(t, p.opts)
	p.Etcd.Compact(p.Etcd.Revision())
	for range r.Runs() {
	}
	before := p.series(t, "strata_lists_expired_total")
	want := p.env.Etcd.GetList(podtest.Context(t), "/pods/", p.opts, &example.PodList{})
	for range 2 {
		if err := r.Err(); !apierrors.IsResourceExpired(err) || err.Error() != want.Error() {
			t.Errorf("in the middle: %v, want the 410 of upstream's store: %v", err, want)
		}
	}
	if n := p.series(t, "strata_lists_expired_total") - before; n != 1 {
		t.Errorf("%v lists counted as expired, want 1", n)
	}
	for range cap(p.env.Past.Places) {
		p.env.Past.Places <- struct{}{}
	}
	if _, err := p.env.Read(podtest.Context(t), "/pods/", p.opts); !apierrors.IsResourceExpired(err) {
		t.Errorf("without a place: %v, want 410", err)
	}
	for range cap(p.env.Past.Places) {
		<-p.env.Past.Places
	}
	r.Close()
	r.Close() // has no effect
	if _, err := p.env.Read(podtest.Context(t), "/pods/", p.opts); !apierrors.IsResourceExpired(err) {
		t.Errorf("afterwards: %v, want 410", err)
	}
	if n := len(p.env.Past.Places); n > 0 {
		t.Errorf("%d places are still taken", n)
	}
}

// TestPastList_EtcdFails_ErrorIsForClient: in the middle of a list, after a restore of etcd, the
// end of the request, and another error.
func TestPastList_EtcdFails_ErrorIsForClient(t *testing.T) {
	failure := errors.New("no leader")
	has := func(words string) func(error) bool {
		return func(err error) bool { return strings.Contains(strings.ToLower(err.Error()), words) }
	}
	for name, c := range map[string]struct {
		fail func(p *pastList, cancel func(), next *error)
		want func(error) bool
	}{
		"restored": {func(p *pastList, _ func(), _ *error) { p.Etcd.Restore(10_000, nil) }, apierrors.IsTooManyRequests},
		"canceled": {func(_ *pastList, cancel func(), _ *error) { cancel() }, has("timeout")},
		"fails":    {func(_ *pastList, _ func(), next *error) { *next = failure }, has("no leader")},
	} {
		t.Run(name, func(t *testing.T) {
			var next error
			p := newPastList(t, 600, func(o *options) { o.onEtcdRead = func() error { return next } })
			ctx, cancel := context.WithCancel(podtest.Context(t))
			r, err := p.env.Read(ctx, "/pods/", p.opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			c.fail(p, cancel, &next)
			n := 0
			for range r.Candidates() {
				n++
			}
			if err := r.Err(); err == nil || !c.want(err) || n == 0 || n >= len(p.want) {
				t.Errorf("after %d entries: %v", n, err)
			}
		})
	}
}

// TestPastList_WithoutPlace_TimesOut with the request, and is answered when there is a place.
func TestPastList_WithoutPlace_TimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPastList(t, 20)
		places := p.env.Past.Places
		for range cap(places) {
			places <- struct{}{}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := p.env.GetList(ctx, "/pods/", p.opts, &example.PodList{}); !apierrors.IsTimeout(err) {
			t.Errorf("without a place: %v, want a timeout", err)
		}
		done := make(chan error, 1)
		go func() { done <- p.env.GetList(t.Context(), "/pods/", p.opts, &example.PodList{}) }()
		synctest.Wait()
		if len(done) != 0 {
			t.Fatalf("without a place: %v", <-done)
		}
		<-places
		if err := <-done; err != nil {
			t.Errorf("with a place: %v", err)
		}
	})
}

// TestListFromEtcd_ByGate_NeedsNoPlace: places are for lists that are older than memory.
func TestListFromEtcd_ByGate_NeedsNoPlace(t *testing.T) {
	f := newFixture(t)
	f.env.Gates = Gates{}
	f.env.Past.Places = nil // never a place
	f.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"))
	opts := limited(everything(), 2)
	first := f.list(t, "/pods/", opts)
	second := f.list(t, "/pods/", continued(opts, first.Continue))
	if names(first) != "a b" || names(second) != "c" || second.Continue != "" {
		t.Errorf("pages have %q and %q, continue %q", names(first), names(second), second.Continue)
	}
	if n := f.series(t, "strata_lists_total", "source", "etcd", "reason", "gate"); n != 2 {
		t.Errorf("%v lists counted, want 2", n)
	}
}

// TestContinueToken_Expired_ContinuesAtLatest (KEP-365): the 410 of a token whose revision was
// compacted has a token that continues at the same key; the pages from there on are of one revision
// again.
func TestContinueToken_Expired_ContinuesAtLatest(t *testing.T) {
	f := newFixture(t)
	f.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"), podtest.Pod("d"), podtest.Pod("e"))
	opts := limited(everything(), 1)
	first := f.list(t, "/pods/", opts)
	for _, name := range []string{"b", "c"} {
		f.Etcd.Delete(podtest.Key(podtest.Pod(name)))
	}
	last := f.Etcd.Revision()
	f.CatchUp(t)
	f.Etcd.Compact(last)
	f.olderThanMemory(t)
	err := f.env.GetList(podtest.Context(t), "/pods/", continued(opts, first.Continue), &example.PodList{})
	var status apierrors.APIStatus
	if !apierrors.IsResourceExpired(err) || !errors.As(err, &status) || status.Status().Continue == "" {
		t.Fatalf("a page of a compacted revision: %v, want 410 with a token", err)
	}
	second := f.list(t, "/pods/", continued(opts, status.Status().Continue))
	f.Put(t, podtest.Pod("dd"))
	third := f.list(t, "/pods/", continued(opts, second.Continue))
	got := []string{names(first), names(second), names(third)}
	if !slices.Equal(got, []string{"a", "d", "e"}) || third.Continue != "" || second.ResourceVersion != fmt.Sprint(last) || third.ResourceVersion != fmt.Sprint(last) {
		t.Errorf("pages %q of %s and %s, want the latest state at %d", got, second.ResourceVersion, third.ResourceVersion, last)
	}
}
