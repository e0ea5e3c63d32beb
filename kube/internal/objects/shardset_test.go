package objects

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"pgregory.net/rapid"
)

const (
	uidField       = "object.metadata.uid"
	namespaceField = "object.metadata.namespace"
)

// TestShardSet_Matches_EqualsUpstream compares sets with upstream's selectors, for hashes at and
// around the ends of ranges.
func TestShardSet_Matches_EqualsUpstream(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	rapid.Check(t, func(t *rapid.T) {
		hash := rapid.Custom(func(t *rapid.T) string {
			if rapid.IntRange(0, 5).Draw(t, "edge") == 0 {
				return rapid.SampledFrom([]string{"0x0000000000000000", "0xffffffffffffffff", endOfHashes}).Draw(t, "end")
			}
			return fmt.Sprintf("0x%016x", rapid.Uint64().Draw(t, "hash"))
		})
		key := rapid.SampledFrom([]string{uidField, namespaceField}).Draw(t, "key")
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{
			UID:       types.UID(rapid.String().Draw(t, "uid")),
			Namespace: rapid.SampledFrom([]string{"", "default", "kube-system", "a"}).Draw(t, "namespace"),
		}}
		own := "0x" + sharding.HashField(map[string]string{uidField: string(pod.UID), namespaceField: pod.Namespace}[key])
		var reqs []sharding.ShardRangeRequirement
		for range rapid.IntRange(1, 4).Draw(t, "ranges") {
			ends := []string{hash.Draw(t, "start"), hash.Draw(t, "end")}
			if rapid.Bool().Draw(t, "own") { // the object's hash is an end
				ends[rapid.IntRange(0, 1).Draw(t, "which")] = own
			}
			reqs = append(reqs, sharding.ShardRangeRequirement{Key: key, Start: ends[0], End: ends[1]})
		}
		sel := sharding.NewSelector(reqs...)
		want, err := sel.Matches(pod)
		if err != nil {
			t.Fatal(err)
		}
		set, ok := parseShardSet(sel)
		if !ok {
			for _, r := range reqs {
				if r.Start == endOfHashes {
					return // no request has it
				}
			}
			t.Fatalf("%s is not parsed", sel)
		}
		a := newAttributes(nil, FieldSet{}, pod)
		if got := set.Selects(a); got != want {
			t.Fatalf("%s selects %s: %v, want %v", sel, own, got, want)
		}
		if got := CoversHash(set.Name, HashValue(a.Hash(set.Key))); got != want {
			t.Fatalf("%s covers %s: %v, want %v", sel, own, got, want)
		}
		for i := 1; i < len(set.ranges); i++ {
			if set.ranges[i].first <= set.ranges[i-1].last {
				t.Fatalf("%s has ranges %v", sel, set.ranges)
			}
		}
	})
}

// TestShardSet_UnusualSelector_UsesUpstream: selectors that no request has are evaluated by
// upstream's code.
func TestShardSet_UnusualSelector_UsesUpstream(t *testing.T) {
	for _, reqs := range [][]sharding.ShardRangeRequirement{
		{{Key: "object.metadata.name", Start: "0x0000000000000000", End: endOfHashes}},
		{{Key: uidField, Start: "0x0", End: endOfHashes}},
		{{Key: uidField, Start: "0x00000000000000AA", End: endOfHashes}},
		{{Key: uidField, Start: "0x0000000000000000", End: "0xff"}},
		{{Key: uidField, Start: "0x0000000000000000", End: endOfHashes}, {Key: namespaceField, Start: "0x0000000000000000", End: endOfHashes}},
	} {
		if set, ok := parseShardSet(sharding.NewSelector(reqs...)); ok {
			t.Errorf("%v is parsed as %v", reqs, set)
		}
	}
}
