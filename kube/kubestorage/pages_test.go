package kubestorage

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
)

// TestPages_NamespaceSelector_NarrowsFirstPage: a list of all namespaces with a field selector for
// one is narrowed to its keys, for the first page only, where etcd answers every list. Package list
// has the lists from memory.
func TestPages_NamespaceSelector_NarrowsFirstPage(t *testing.T) {
	t.Parallel()
	for name, where := range map[string]func(*options){"etcd": fromEtcd, "uncached": uncached} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, where)
			want := ""
			for i := range 20 {
				pod := newPod(fmt.Sprintf("pod-%02d", i))
				f.create(t, pod)
				pod.Namespace = "other"
				f.create(t, pod)
				want += " " + pod.Name
			}
			f.catchUp(t)
			ctx := request.WithRequestInfo(contextFor(t), &request.RequestInfo{Resource: "pods"})
			opts := everything()
			opts.Predicate = storage.SelectionPredicate{Label: labels.Everything(), Field: fields.OneTermEqualSelector("metadata.namespace", "other"), GetAttrs: podAttrs, Limit: 7}
			got, key := "", "/pods/other" // as registries narrow it
			for {
				list := &example.PodList{}
				testcheck.NoError(t, f.GetList(ctx, key, opts, list))
				for i := range list.Items {
					got += " " + list.Items[i].Name
				}
				if opts.Predicate.Continue = list.Continue; list.Continue == "" {
					break
				}
				key = "/pods"
			}
			if got != want {
				t.Errorf("the walk has%s, want%s", got, want)
			}
		})
	}
}

// TestChunking_GateOff_IgnoresLimitAndContinue: limit and continue are ignored, and no token is
// returned, where etcd answers every list. Package list has the lists from memory.
func TestChunking_GateOff_IgnoresLimitAndContinue(t *testing.T) {
	t.Parallel()
	for name, where := range map[string]func(*options){"etcd": fromEtcd, "uncached": uncached} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, where, withGates(gates(t, Gates(), "APIListChunking=false")))
			first := f.create(t, newPod("a"))[0]
			f.create(t, newPod("b"), newPod("c"))
			f.catchUp(t)
			token, err := storage.EncodeContinue("/pods/b", "/pods", parseRevision(t, first.ResourceVersion))
			testcheck.NoError(t, err)
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

// TestPages_OfLargeValues_AreBounded: with any sizes of the preceding values, a response from etcd
// stays small, and no key is missed.
func TestPages_OfLargeValues_AreBounded(t *testing.T) {
	if testrace.Few() {
		t.Skip("one sequence: not under the race detector")
	}
	t.Parallel()
	f := setup(t)
	ctx := contextFor(t)
	large, small := strings.Repeat("v", 1<<20), strings.Repeat("v", 100)
	const n = 120
	for i := range n {
		value := large
		if i >= 40 && i < 80 {
			value = small
		}
		if _, err := f.client.Client.Put(ctx, fmt.Sprintf("/x/%03d", i), value); err != nil {
			t.Fatal(err)
		}
	}
	for _, expected := range []int64{0, 100, 1 << 20} {
		pager := etcdsource.NewPager(f.cluster.ranges, "/x/", "/x0", 0)
		if expected > 0 {
			pager.HintValueBytes(expected)
		}
		keys := 0
		for !pager.Done() {
			page, err := pager.Next(ctx, 0)
			testcheck.NoError(t, err)
			bytes := 0
			for _, kv := range page.KVs {
				if want := fmt.Sprintf("/x/%03d", keys); string(kv.Key) != want {
					t.Fatalf("key %s, want %s", kv.Key, want)
				}
				keys++
				bytes += len(kv.Value)
			}
			if bytes > 26<<20 {
				t.Errorf("a page of %d keys has %d MiB", len(page.KVs), bytes>>20)
			}
		}
		if keys != n {
			t.Errorf("%d keys, want %d", keys, n)
		}
	}
}
