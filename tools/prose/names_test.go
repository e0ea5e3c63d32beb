package main

import (
	"slices"
	"testing"
)

func TestStale_NamesOfComments_ExistInCode(t *testing.T) {
	n := &names{words: map[string]bool{"kubelet": true, "listPods": true}, files: map[string]bool{}, members: map[string]map[string]bool{}, open: map[string]bool{}}
	for file, src := range map[string]string{
		"store/log.go": "package store\n\ntype Log struct {\n\tfloor int\n\t*Tree\n}\n\nfunc (l *Log) Append() {}\n\nfunc Open() {}\n\ntype pageError string\n",
		"store/set.go": "package store\n\ntype Set[T any] interface{ Has(T) bool }\n\nconst Name = \"resourceVersion\"\n",
	} {
		if err := n.addFile(file, []byte(src)); err != nil {
			t.Fatal(err)
		}
	}
	for text, want := range map[string][]string{
		"// Log.Append, Log.floor, Set.Has, store.Open and store.Log.Append in log.go": nil,
		"// Log.kubelet may be a member of Tree; etcd.Get is of a dependency":          nil,
		"// resourceVersion, and listPods of a dependency; pageErrors":                 nil,
		"// a set.yaml, deployment.apps, example.com, e.g. CoDel":                      nil,
		"//\tvar newPods = 1":                                  nil,
		"// Log.Insert, Set.Get":                               {"Log.Insert", "Set.Get"},
		"//\tI1\tstore.Create, store.Log.Insert":               {"store.Create", "store.Log.Insert"},
		"// see tree.go, maxBytes and MaxBytes":                {"tree.go", "maxBytes", "MaxBytes"},
		"/* logs are a\n\trequestQueue\n or a requestQueue */": {"requestQueue"},
	} {
		if got := n.stale(text); !slices.Equal(got, want) {
			t.Errorf("%s: stale %q, want %q", text, got, want)
		}
	}
}
