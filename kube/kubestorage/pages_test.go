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
)

// TestPages_NamespaceSelector_NarrowsFirstPage: a list of all namespaces with a field selector for
// one is narrowed to its keys, for the first page only, from memory and from etcd.
func TestPages_NamespaceSelector_NarrowsFirstPage(t *testing.T) {
	t.Parallel()
	for name, where := range map[string][]func(*options){
		"memory":   nil,
		"etcd":     {fromEtcd},
		"uncached": {uncached},
		"gates":    {withGates(gates(t, Gates(), "ConsistentListFromCache=false,ListFromCacheSnapshot=false"))},
	} {
		t.Run(name, func(t *testing.T) {
			f := setup(t, where...)
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
				if err := f.GetList(ctx, key, opts, list); err != nil {
					t.Fatal(err)
				}
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

// TestPages_OfLargeValues_AreBounded: with any sizes of the preceding values, a response from etcd
// stays small, and no key is missed.
func TestPages_OfLargeValues_AreBounded(t *testing.T) {
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
			if err != nil {
				t.Fatal(err)
			}
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
