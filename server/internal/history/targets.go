package history

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/server/internal/cli"
)

// selection is the selection of objects by flags.
type selection struct {
	allNamespaces bool
	selector      string
}

func (s *selection) addFlags(flags *pflag.FlagSet) {
	flags.BoolVarP(&s.allNamespaces, "all-namespaces", "A", false, "select the objects of all namespaces")
	flags.StringVarP(&s.selector, "selector", "l", "", "select objects by labels, as in kubectl get")
}

// targets returns the targets of arguments: TYPE[,TYPE...] [NAME...], or TYPE/NAME...
func (c *client) targets(args []string, s selection) ([]target, error) {
	if len(args) == 0 {
		return nil, cli.Misusef("no resource is given: name one, such as pods, deployments/web, or configmaps,secrets")
	}
	if _, err := labels.Parse(s.selector); err != nil {
		return nil, cli.Misusef("--selector %q: %w", s.selector, err)
	}
	type pair struct{ resource, name string }
	var pairs []pair
	if strings.Contains(args[0], "/") {
		for _, arg := range args {
			resource, name, ok := strings.Cut(arg, "/")
			if !ok || resource == "" || name == "" || strings.Contains(name, "/") {
				return nil, cli.Misusef("argument %q: objects are given as TYPE/NAME, like the first one", arg)
			}
			pairs = append(pairs, pair{resource, name})
		}
	} else {
		names := args[1:]
		if len(names) == 0 {
			names = []string{""}
		}
		for _, resource := range strings.Split(args[0], ",") {
			for _, name := range names {
				pairs = append(pairs, pair{resource, name})
			}
		}
	}
	mapper, err := c.flags.ToRESTMapper()
	if err != nil {
		return nil, fmt.Errorf("discover the resources of %s: %w", c.config.Host, err)
	}
	var targets []target
	for _, p := range pairs {
		mapping, err := mappingFor(mapper, p.resource)
		if err != nil {
			return nil, err
		}
		t := target{mapping: mapping, name: p.name, selector: s.selector}
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace && !s.allNamespaces {
			t.namespace = c.namespace
		}
		if t.name != "" && (s.selector != "" || s.allNamespaces && mapping.Scope.Name() == meta.RESTScopeNameNamespace) {
			return nil, cli.Misusef("%s is a name: it cannot be combined with --selector or --all-namespaces", t)
		}
		if !slices.Contains(targets, t) {
			targets = append(targets, t)
		}
	}
	return targets, nil
}

// mappingFor resolves the name of a resource, such as pods, po, Pod, deployments.apps or
// deployments.v1.apps.
func mappingFor(mapper meta.RESTMapper, name string) (*meta.RESTMapping, error) {
	full, resource := schema.ParseResourceArg(name)
	var gvk schema.GroupVersionKind
	if full != nil {
		gvk, _ = mapper.KindFor(*full)
	}
	if gvk.Empty() {
		var err error
		if gvk, err = mapper.KindFor(resource.WithVersion("")); err != nil {
			if mapping, kindErr := mapper.RESTMapping(schema.ParseGroupKind(name)); kindErr == nil {
				return mapping, nil
			}
			if meta.IsNoMatchError(err) {
				return nil, fmt.Errorf("the server has no resource type %q; `kubectl api-resources` lists them", name)
			}
			return nil, fmt.Errorf("resolve resource type %q: %w", name, err)
		}
	}
	return mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
}

// completeResources completes the names of resources, and then those of objects.
func (b *base) completeResources(_ *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return b.completeNames(args[0])
	}
	return b.completeTypes(nil, nil, "")
}

// completeTypes completes the names of the resources that can be listed.
func (b *base) completeTypes(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	c, err := b.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	discovery, err := c.flags.ToDiscoveryClient()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	// without the groups that cannot be discovered
	groups, _ := discovery.ServerPreferredResources()
	var names []string
	for _, group := range groups {
		gv, _ := schema.ParseGroupVersion(group.GroupVersion)
		for _, r := range group.APIResources {
			if slices.Contains(r.Verbs, "list") {
				names = append(names, gv.WithResource(r.Name).GroupResource().String())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), cobra.ShellCompDirectiveNoFileComp
}

func (b *base) completeNamespaces(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return b.completeNames("namespaces")
}

// completeNames returns the names of the present objects of a resource.
func (b *base) completeNames(resource string) ([]string, cobra.ShellCompDirective) {
	c, err := b.connect()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	ts, err := c.targets([]string{resource}, selection{})
	if err != nil || len(ts) != 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	list := &metav1.PartialObjectMetadataList{}
	data, err := raw(c.request(ts[0], "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io").
		Param("limit", fmt.Sprint(pageSize)).Do(completionContext()))
	if err != nil || json.Unmarshal(data, list) != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var names []string
	for _, item := range list.Items {
		names = append(names, item.Name)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

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
