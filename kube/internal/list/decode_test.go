package list

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/example"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestList_AtZero_IgnoresLimit (KEP-2340, rows L6 and L9): it returns everything, no token and no
// count of remaining items. A token has its limit (L7).
func TestList_AtZero_IgnoresLimit(t *testing.T) {
	f := newFixture(t)
	f.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"))
	f.CatchUp(t)
	for _, match := range []metav1.ResourceVersionMatch{"", metav1.ResourceVersionMatchNotOlderThan} {
		opts := limited(everything(), 1)
		opts.ResourceVersion, opts.ResourceVersionMatch = "0", match
		if list := f.list(t, "/pods/", opts); names(list) != "a b c" || list.Continue != "" || list.RemainingItemCount != nil {
			t.Errorf("match %q: %q, continue %q, %v remain", match, names(list), list.Continue, list.RemainingItemCount)
		}
	}
	for _, rev := range []mirror.Revision{f.Etcd.Revision(), -2} { // -2: at the latest revision
		opts := continued(limited(everything(), 1), token(t, "a", rev))
		opts.ResourceVersion = "0"
		if list := f.list(t, "/pods/", opts); names(list) != "b" {
			t.Errorf("with a token of %d: %q, want the page of the token", rev, names(list))
		}
	}
}

// TestChunking_GateOff_IgnoresLimitAndContinue: limit and continue are ignored, and no token is
// returned, from memory and from etcd.
func TestChunking_GateOff_IgnoresLimitAndContinue(t *testing.T) {
	for _, g := range []Gates{{Latest: true, AtRevision: true}, {}} {
		f := newFixture(t, func(o *options) { o.unchunked = true })
		f.env.Gates = g
		first := f.Put(t, podtest.Pod("a"))
		f.Put(t, podtest.Pod("b"), podtest.Pod("c"))
		atFirst := limited(everything(), 1)
		atFirst.ResourceVersion = fmt.Sprint(first)
		f.CatchUp(t)
		for name, opts := range map[string]storage.ListOptions{
			"limit":            limited(everything(), 1),
			"continue":         continued(everything(), token(t, "a", first)),
			"both":             continued(limited(everything(), 1), token(t, "a", first)),
			"garbage":          continued(everything(), "garbage"),
			"limit at version": atFirst,
		} {
			if list := f.list(t, "/pods/", opts); names(list) != "a b c" || list.Continue != "" || list.RemainingItemCount != nil {
				t.Errorf("%+v, %s: %q, continue %q, %v remain", g, name, names(list), list.Continue, list.RemainingItemCount)
			}
		}
	}
}

// TestPages_NamespaceSelector_NarrowsFirstPage: a list of all namespaces with a field selector for
// one is narrowed to its keys, for the first page only, from memory and from etcd.
func TestPages_NamespaceSelector_NarrowsFirstPage(t *testing.T) {
	for _, g := range []Gates{{Latest: true, AtRevision: true}, {}} {
		f := newFixture(t)
		f.env.Gates = g
		var want []string
		for i := range 20 {
			pod := podtest.Pod(podName(i))
			f.Put(t, pod)
			pod.Namespace = "other"
			f.Put(t, pod)
			want = append(want, "other/"+pod.Name)
		}
		ctx := apirequest.WithRequestInfo(podtest.Context(t), &apirequest.RequestInfo{Resource: "pods"})
		opts := limited(selecting(podtest.Selecting(t, "", "metadata.namespace=other")), 7)
		var got []string
		for key, more := "/pods/other", true; more; key = "/pods" { // as registries narrow it
			page := &example.PodList{}
			testcheck.NoError(t, f.env.GetList(ctx, key, opts, page))
			got, opts, more = append(got, paths(page)...), continued(opts, page.Continue), page.Continue != ""
		}
		if !slices.Equal(got, want) {
			t.Errorf("%+v: the pages have %q, want %q", g, got, want)
		}
	}
}

// TestGetList_RequestEnds_ReturnsTimeout instead of decoding the rest.
func TestGetList_RequestEnds_ReturnsTimeout(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 200)
	ctx, cancel := context.WithCancel(podtest.Context(t))
	r, err := f.env.Read(ctx, "/pods/", everything())
	testcheck.NoError(t, err)
	defer r.Close()
	cancel()
	n := f.Decoded(func() { err = r.fill(ctx, nil, &example.PodList{}) })
	if err == nil || !strings.Contains(err.Error(), "request timeout") || n != 0 {
		t.Errorf("%v, after %d objects", err, n)
	}
}

// TestGetList_NoListObject_IsError, not a panic.
func TestGetList_NoListObject_IsError(t *testing.T) {
	f := newFixture(t)
	if err := f.env.GetList(podtest.Context(t), "/pods/", everything(), &example.Pod{}); err == nil {
		t.Error("a pod was filled with a list")
	}
}

// TestGetList_SharesDecodedObjects: the second list decodes nothing, and its items are copies of
// the struct, so that a client may replace their fields.
func TestGetList_SharesDecodedObjects(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 100)
	var first, second *example.PodList
	if n := f.Decoded(func() { first = f.list(t, "/pods/", everything()) }); n != 100 {
		t.Errorf("the first list decoded %d objects", n)
	}
	first.Items[0].Name = "changed"
	if n := f.Decoded(func() { second = f.list(t, "/pods/", everything()) }); n != 0 || second.Items[0].Name == "changed" {
		t.Errorf("the second list decoded %d objects, its first item is %s", n, second.Items[0].Name)
	}
}

// TestGetList_Selector_GrowsWithSelectedObjects: a page with a selector reserves no room for the
// objects that it does not select.
func TestGetList_Selector_GrowsWithSelectedObjects(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 3000)
	for _, c := range []struct {
		opts       storage.ListOptions
		items, cap int
	}{
		{everything(), 3000, 3000},
		{limited(everything(), 10), 10, 10},
		{selecting(podtest.Selecting(t, "i=3", "")), 300, 2048},
		{limited(selecting(podtest.Selecting(t, "i=3", "")), 5), 5, 5},
	} {
		if list := f.list(t, "/pods/", c.opts); len(list.Items) != c.items || cap(list.Items) > c.cap {
			t.Errorf("%s: %d items of %d, want %d of %d", describe(c.opts), len(list.Items), cap(list.Items), c.items, c.cap)
		}
	}
}
