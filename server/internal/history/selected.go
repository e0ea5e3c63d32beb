package history

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// noisy are resources that the commands leave out unless they are named: they change all the time
// and say little.
var noisy = map[string]bool{"events": true, "events.events.k8s.io": true, "leases.coordination.k8s.io": true}

// everything returns a target for every resource that can be listed and watched, except for noisy
// ones.
func (c *client) everything(s selection) ([]target, error) {
	discovery, err := c.flags.ToDiscoveryClient()
	if err != nil {
		return nil, fmt.Errorf("discover the resources of %s: %w", c.config.Host, err)
	}
	groups, err := discovery.ServerPreferredResources()
	if len(groups) == 0 && err != nil {
		return nil, fmt.Errorf("discover the resources of %s: %w", c.config.Host, err)
	}
	var targets []target
	for _, group := range groups {
		gv, err := schema.ParseGroupVersion(group.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range group.APIResources {
			gvr := gv.WithResource(r.Name)
			if noisy[gvr.GroupResource().String()] || !slices.Contains(r.Verbs, "list") || !slices.Contains(r.Verbs, "watch") {
				continue
			}
			t := target{selector: s.selector, mapping: &meta.RESTMapping{Resource: gvr, GroupVersionKind: gv.WithKind(r.Kind), Scope: meta.RESTScopeRoot}}
			if r.Namespaced {
				t.mapping.Scope = meta.RESTScopeNamespace
				if !s.allNamespaces && *c.flags.Namespace != "" {
					t.namespace = c.namespace
				}
			}
			targets = append(targets, t)
		}
	}
	return targets, nil
}

// count returns a number with its noun.
func count(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return fmt.Sprintf("%d %s", n, noun)
}
