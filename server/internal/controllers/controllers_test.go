package controllers

import (
	"slices"
	"testing"

	"k8s.io/kubernetes/cmd/kube-controller-manager/app"
	"k8s.io/kubernetes/cmd/kube-controller-manager/names"
)

// enabled returns the controllers that upstream runs for a resolved list.
func enabled(list []string) []string {
	var on []string
	for _, name := range app.KnownControllers() {
		if Enabled(list, name) {
			on = append(on, name)
		}
	}
	slices.Sort(on)
	return on
}

func sorted(list []string, more ...string) []string {
	all := append(slices.Clone(list), more...)
	slices.Sort(all)
	return all
}

func TestResolve_EnablesListedControllers(t *testing.T) {
	everything := enabled([]string{"*"})
	withoutQuota := slices.DeleteFunc(sorted(Default), func(name string) bool { return name == names.ResourceQuotaController })
	for name, test := range map[string]struct{ list, want []string }{
		"default":                    {[]string{"default"}, sorted(Default)},
		"default and more":           {[]string{"default", "horizontal-pod-autoscaler-controller"}, sorted(Default, names.HorizontalPodAutoscalerController)},
		"a short name":               {[]string{"default", "horizontalpodautoscaling"}, sorted(Default, names.HorizontalPodAutoscalerController)},
		"default but one":            {[]string{"default", "-resourcequota"}, withoutQuota},
		"default but one, one first": {[]string{"-resourcequota-controller", "default"}, withoutQuota},
		"one":                        {[]string{"namespace"}, []string{names.NamespaceController}},
		"all":                        {[]string{"*"}, everything},
		"all and one that is off":    {[]string{"*", "bootstrapsigner"}, sorted(everything, names.BootstrapSignerController)},
		"none":                       {[]string{"none"}, nil},
		"an empty list":              {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			list, err := Resolve(test.list)
			if err != nil {
				t.Fatal(err)
			}
			if got := enabled(list); !slices.Equal(got, test.want) {
				t.Errorf("%q enables\n%q, want\n%q", test.list, got, test.want)
			}
		})
	}
}

func TestResolve_UnknownName_ReturnsError(t *testing.T) {
	for _, list := range [][]string{{"bogus"}, {"default", "-bogus"}, {""}, {"-default"}, {"-*"}, {"none", "namespace"}} {
		if got, err := Resolve(list); err == nil {
			t.Errorf("Resolve(%q) = %q", list, got)
		}
	}
}

func TestDefaultAndOthers_AreAllControllers(t *testing.T) {
	all := sorted(Default, Others()...)
	known := app.KnownControllers()
	slices.Sort(known)
	if !slices.Equal(all, known) {
		t.Errorf("%q, want\n%q", all, known)
	}
}
