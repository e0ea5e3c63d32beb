package etcdcopy

import (
	"slices"
	"strings"
	"testing"
)

func TestParseResource_Names_HavePlacesOfKubeAPIServer(t *testing.T) {
	for text, want := range map[string][]string{ // the form of an override, then the paths
		"events":                      {"/events", "events/"},
		"/events":                     {"/events", "events/"},
		"events.events.k8s.io":        {"/events", "events/"},
		"leases":                      {"coordination.k8s.io/leases", "leases/"},
		"coordination.k8s.io/leases":  {"coordination.k8s.io/leases", "leases/"},
		"pods":                        {"/pods", "pods/"},
		"nodes":                       {"/nodes", "minions/"},
		"endpoints":                   {"/endpoints", "services/endpoints/"},
		"services":                    {"/services", "services/specs/", "ranges/"},
		"ingresses.networking.k8s.io": {"networking.k8s.io/ingresses", "ingress/"},
		"widgets.example.com":         {"example.com/widgets", "example.com/widgets/"},
		"apiextensions.k8s.io/customresourcedefinitions": {"apiextensions.k8s.io/customresourcedefinitions", "apiextensions.k8s.io/customresourcedefinitions/"},
	} {
		r, err := parseResource(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := append([]string{r.override()}, r.paths...); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	for text, want := range map[string]string{
		"":             "is not the name of one resource",
		"apps/":        "is not the name of one resource",
		"apps/*":       "is not the name of one resource",
		"a/b/c":        "is not the name of one resource",
		"lease":        "is not a built-in resource",
		"/deployments": "is not a built-in resource",
	} {
		if _, err := parseResource(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", text, err, want)
		}
	}
}
