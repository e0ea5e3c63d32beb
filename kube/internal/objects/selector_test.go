package objects_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// matching returns the names of the pods that the selector matches.
func matching(t testing.TB, c *podtest.Cluster, sel *objects.Selector) (names []string) {
	t.Helper()
	for e := range c.Latest(t).All("", "") {
		ok, err := sel.Matches(podtest.Context(t), e)
		testcheck.NoError(t, err)
		if ok {
			names = append(names, strings.TrimPrefix(e.Key(), podtest.Root))
		}
	}
	return names
}

// fill stores n pods of ten tiers, on 20 nodes.
func fill(t testing.TB, c *podtest.Cluster, n int) (last mirror.Revision) {
	t.Helper()
	for i := range n {
		pod := podtest.Labelled(fmt.Sprintf("pod-%03d", i), "tier", fmt.Sprint(i%10))
		pod.Spec.NodeName = fmt.Sprint("node-", i%20)
		pod.Annotations = map[string]string{"whole": fmt.Sprint(i)}
		last = c.Put(t, pod)
	}
	c.CatchUp(t)
	return last
}

// TestSelector_LabelsAndFields_DecodeOnce: an object is decoded once for all selectors, and not at
// all without one.
func TestSelector_LabelsAndFields_DecodeOnce(t *testing.T) {
	c := podtest.New(t)
	fill(t, c, 100)
	gen := c.View.CurrentGeneration()
	for _, s := range []struct {
		label, field  string
		want, decoded int
	}{{"", "", 100, 0}, {"tier=3", "", 10, 100}, {"tier=3", "spec.nodeName=node-3", 5, 0}, {"tier notin (3,4)", "metadata.name!=pod-000", 79, 0}, {"!tier", "", 0, 0}} {
		sel := gen.Selector(podtest.Selecting(t, s.label, s.field))
		if sel.All != (s.label+s.field == "") || sel.Plain != sel.All || sel.Shard != nil {
			t.Errorf("%q %q: all %t, plain %t", s.label, s.field, sel.All, sel.Plain)
		}
		if n := c.Decoded(func() {
			if got := matching(t, c, &sel); len(got) != s.want {
				t.Errorf("%q %q matches %d pods, want %d", s.label, s.field, len(got), s.want)
			}
		}); n != s.decoded {
			t.Errorf("%q %q decoded %d objects, want %d", s.label, s.field, n, s.decoded)
		}
	}
}

// shards is the selector of the hashes of a key from start on.
func shards(key, start string) sharding.Selector {
	return sharding.NewSelector(sharding.ShardRangeRequirement{Key: key, Start: start, End: "0x10000000000000000"})
}

// TestSelector_Shards_MatchAsUpstream, by their hashes and by objects, and not with the gate off.
func TestSelector_Shards_MatchAsUpstream(t *testing.T) {
	c := podtest.New(t)
	for i := range 90 {
		pod := podtest.Pod(fmt.Sprintf("pod-%02d", i))
		pod.UID = types.UID(fmt.Sprint(i, "-uid"))
		c.Put(t, pod)
	}
	c.CatchUp(t)
	for _, on := range []bool{false, true} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, on)
		gen := c.View.CurrentGeneration()
		pred := storage.Everything
		pred.ShardSelector = shards("object.metadata.uid", "0x8000000000000000")
		sel := gen.Selector(pred)
		if (sel.Shard != nil) != on || sel.All == on || !sel.Plain {
			t.Errorf("gate %t: sharded %t, all %t, plain %t", on, sel.Shard != nil, sel.All, sel.Plain)
		}
		var want []string
		for e := range c.Latest(t).All("", "") {
			obj, err := gen.Decode(podtest.Context(t), e, e.ModRevision())
			testcheck.NoError(t, err)
			if ok, err := pred.ShardSelector.Matches(obj); err != nil {
				t.Fatal(err)
			} else if ok || !on {
				want = append(want, strings.TrimPrefix(e.Key(), podtest.Root))
			}
		}
		if got := matching(t, c, &sel); !slices.Equal(got, want) || on && (len(got) == 0 || len(got) == 90) {
			t.Errorf("gate %t: %v, want %v", on, got, want)
		}
	}
	pred := storage.Everything
	pred.ShardSelector = shards("object.metadata.unknown", "0x0000000000000000")
	if sel := c.View.CurrentGeneration().Selector(pred); !sel.NeedsObject || sel.Plain || sel.Shard != nil {
		t.Errorf("a selector of another key: %+v", sel)
	}
}

// abridgePod leaves the fields of a stored pod that podtest.Attrs reads.
func abridgePod(dst, value []byte) ([]byte, bool) {
	var pod struct {
		Kind       string `json:"kind"`
		APIVersion string `json:"apiVersion"`
		Metadata   struct {
			Name      string            `json:"name"`
			Namespace string            `json:"namespace"`
			Labels    map[string]string `json:"labels"`
		} `json:"metadata"`
		Spec struct {
			NodeName string `json:"nodeName"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(value, &pod); err != nil {
		return dst, false
	}
	short, err := json.Marshal(pod)
	return append(dst, short...), err == nil
}

// TestAbridge_AnyResult_SelectsSameObjects: objects and events are selected by labels and fields in
// the same way, whether values are cut down before selectors are evaluated, or cannot be, or the
// rest cannot be decoded. Values that cannot be cut down are tried 100 times.
func TestAbridge_AnyResult_SelectsSameObjects(t *testing.T) {
	for name, a := range map[string]struct {
		abridge func(dst, value []byte) ([]byte, bool)
		cut     int64
	}{
		"cut down":           {abridgePod, 203},
		"declined":           {func(dst, _ []byte) ([]byte, bool) { return dst, false }, 100},
		"cannot be decoded":  {func(dst, _ []byte) ([]byte, bool) { return append(dst, "{"...), true }, 203},
		"of another kind":    {func(dst, _ []byte) ([]byte, bool) { return append(dst, `{"kind":"Other","apiVersion":"v1"}`...), true }, 203},
		"without the option": {},
	} {
		t.Run(name, func(t *testing.T) {
			var cut atomic.Int64
			c := podtest.New(t, func(o *podtest.Options) {
				if a.abridge != nil {
					o.Config.Abridge = func(dst, value []byte) ([]byte, bool) {
						cut.Add(1)
						return a.abridge(dst, value)
					}
				}
			})
			last := fill(t, c, 200)
			sel := c.View.CurrentGeneration().Selector(podtest.Selecting(t, "tier=3", "spec.nodeName=node-3"))
			for range 2 { // the second time with cached attributes
				if got := matching(t, c, &sel); len(got) != 10 || got[1] != "ns/pod-023" {
					t.Fatalf("selected %v", got)
				}
			}
			for _, i := range []int{203, 204, 223} {
				pod := podtest.Labelled(fmt.Sprintf("pod-%03d", i), "tier", fmt.Sprint(i%10))
				pod.Spec.NodeName = fmt.Sprint("node-", i%20)
				c.Put(t, pod)
			}
			c.CatchUp(t)
			for i, ev := range c.EventsAfter(t, last) {
				if before, now, err := sel.MatchesEvent(t.Context(), ev); err != nil || before || now != (i != 1) {
					t.Errorf("event %d: selected before %t, now %t (%v)", i, before, now, err)
				}
			}
			if cut.Load() != a.cut {
				t.Errorf("values were cut down %d times, want %d", cut.Load(), a.cut)
			}
		})
	}
}
