package keyrotation

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

var pods = schema.GroupResource{Resource: "pods"}

func overrides(t value.Transformer) map[schema.GroupResource]value.Transformer {
	return map[schema.GroupResource]value.Transformer{pods: t}
}

func TestKeysOf_DynamicTransformer_ChangesWithReload(t *testing.T) {
	key := podtest.Encryption(t, "1")
	r := encryptionconfig.NewDynamicTransformers(overrides(key), nil, func() {}, 0)
	keys := func(gr schema.GroupResource) func() any {
		t.Helper()
		current, err := KeysOf(r.TransformerForResource(gr), gr)
		if err != nil || current == nil {
			t.Fatalf("keys of %s: %v, want a function", gr, err)
		}
		return current
	}
	ofPods, services := keys(pods), keys(schema.GroupResource{Resource: "services"})
	secrets := keys(schema.GroupResource{Resource: "secrets"})
	seen := []any{ofPods()}
	unencrypted := services()
	if ofPods() != seen[0] {
		t.Error("the identity of the keys changes without a reload")
	}
	for range 3 {
		r.Set(overrides(key), func() {}, nil, 0)
		if slices.Contains(seen, ofPods()) {
			t.Error("a reload does not change the identity of the keys")
		}
		seen = append(seen, ofPods())
		if services() != unencrypted || secrets() != unencrypted {
			t.Error("a reload changes the identity of a resource that is not encrypted")
		}
	}
	for _, gr := range []schema.GroupResource{{Group: "", Resource: "*"}, {Group: "*", Resource: "*"}} {
		r.Set(map[schema.GroupResource]value.Transformer{gr: key}, func() {}, nil, 0)
		if services() == unencrypted {
			t.Errorf("%s does not encrypt services", gr)
		}
	}
	if n := testing.AllocsPerRun(100, func() { ofPods() }); n > 0 {
		t.Errorf("%v allocations to learn whether keys have changed", n)
	}

	static := encryptionconfig.StaticTransformers(overrides(key)).TransformerForResource(pods)
	for _, constant := range []value.Transformer{static, key, nil} {
		if current, err := KeysOf(constant, pods); current != nil || err != nil {
			t.Errorf("%T has keys that change: %v", constant, err)
		}
	}
}

// TestKeysOf_Transformer_IsAsked: a transformer that reports its keys itself is trusted.
func TestKeysOf_Transformer_IsAsked(t *testing.T) {
	swap := podtest.NewSwappable(podtest.Encryption(t, "1"))
	keys, err := KeysOf(swap, pods)
	if err != nil || keys == nil {
		t.Fatal(err)
	}
	before := keys()
	if swap.Set(podtest.Encryption(t, "1")); keys() == before {
		t.Error("a change is not reported")
	}
}

// TestReloads_ViewWithoutReaders_DropsRemovedKeys within a second, until it is removed. Views whose
// keys are constant cost nothing.
func TestReloads_ViewWithoutReaders_DropsRemovedKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Reloads
		constant := podtest.New(t)
		r.Add(constant.View)()
		if r.cancel != nil {
			t.Error("views with constant keys are polled")
		}
		swap := podtest.NewSwappable(podtest.Encryption(t, "1"))
		c := podtest.New(t, swap.With)
		c.Seal(t, podtest.Encryption(t, "1"), podtest.Pod("a"))
		c.CatchUp(t)
		cache := func() *objects.Generation {
			t.Helper()
			gen := c.View.CurrentGeneration()
			if _, err := gen.Object(podtest.Context(t), c.Entry(t, podtest.Pod("a")), c.Blocks.Now()); err != nil || c.Blocks.Stats().Used == 0 {
				t.Fatalf("nothing is cached: %v", err)
			}
			return gen
		}
		gen, remove := cache(), r.Add(c.View)
		time.Sleep(2 * reloadInterval)
		if gen.Ended() {
			t.Error("the generation ends without a change of keys")
		}
		swap.Set(podtest.Encryption(t, "2", "1"))
		time.Sleep(reloadInterval + time.Millisecond)
		if synctest.Wait(); !gen.Ended() || c.Blocks.Stats().Used != 0 {
			t.Errorf("a second after a change of keys %d bytes are cached", c.Blocks.Stats().Used)
		}
		gen = cache()
		remove()
		swap.Set(podtest.Encryption(t, "2"))
		time.Sleep(2 * reloadInterval)
		if synctest.Wait(); gen.Ended() {
			t.Error("a removed view is polled")
		}
		r.Close()
		r.Close() // has no effect
	})
}
