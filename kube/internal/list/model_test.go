package list

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/transcode"
)

// finding makes labels and nodes of pods found in stored bytes.
func finding(o *options) {
	stored := examplev1.SchemeGroupVersion.WithKind("Pod")
	o.Config.Find = func(label bool, name string) transcode.Find {
		switch {
		case label:
			return transcode.FindJSONLabel(stored, name)
		case name == "spec.nodeName":
			return transcode.FindJSONField(stored, name)
		}
		return nil
	}
}

// pagedList is a list of a state of the model, whole or in pages.
type pagedList struct {
	key, prefix string
	opts        storage.ListOptions
	at          int // its revision, in Model.Revs
}

// drawList draws a list of all pods or of a namespace, at the latest or at an old revision.
func drawList(t *testing.T, m *podtest.Model, pred storage.SelectionPredicate) pagedList {
	t.Helper()
	l := pagedList{key: "/pods", prefix: podtest.Root, opts: selecting(pred), at: len(m.Revs) - 1}
	if m.Rand.IntN(4) == 0 {
		l.key, l.prefix = "/pods/ns-1", podtest.Root+"ns-1/"
	}
	if m.Rand.IntN(2) == 0 {
		l.at = m.Rand.IntN(len(m.Revs))
		l.opts = exactly(l.opts, m.Revs[l.at])
	}
	l.opts.Predicate.Limit = int64(m.Rand.IntN(3) * m.Rand.IntN(40))
	return l
}

func (l *pagedList) String() string { return fmt.Sprintf("%s, %s", l.key, describe(l.opts)) }

// walk reads all pages, calls between after each, and returns the first violation: the pages have
// the pods that the selector selects among those of the revision, in the order of their keys. Each
// page but the last is full, and without a selector counts the remaining pods.
func (l *pagedList) walk(t *testing.T, f *fixture, m *podtest.Model, between func()) error {
	t.Helper()
	opts, limit := l.opts, l.opts.Predicate.Limit
	want := m.Selected(t, l.at, l.prefix, l.opts.Predicate)
	var got []string
	for {
		page := &example.PodList{}
		if err := f.getList(podtest.Context(t), l.key, opts, page); err != nil {
			return err
		}
		got = append(got, paths(page)...)
		switch more := page.Continue != ""; {
		case page.ResourceVersion != fmt.Sprint(m.Revs[l.at]):
			return fmt.Errorf("a page of %s, want %d", page.ResourceVersion, m.Revs[l.at])
		case more && int64(len(page.Items)) != limit:
			return fmt.Errorf("a page of %d pods has a token", len(page.Items))
		case limit > 0 && int64(len(page.Items)) > limit:
			return fmt.Errorf("a page of %d pods", len(page.Items))
		case more && opts.Predicate.Empty() != (page.RemainingItemCount != nil), !more && page.RemainingItemCount != nil:
			return fmt.Errorf("remaining items after %d of %d: %v", len(got), len(want), page.RemainingItemCount)
		// before v0.37 upstream counts the objects of all shards
		case page.RemainingItemCount != nil && opts.Predicate.ShardSelector == nil && *page.RemainingItemCount != int64(len(want)-len(got)):
			return fmt.Errorf("%d items remain after %d of %d", *page.RemainingItemCount, len(got), len(want))
		case more:
			opts = continued(opts, page.Continue)
			between()
			continue
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("%d pods, want %d: %v, want %v", len(got), len(want), got, want)
		}
		return nil
	}
}

// TestSelectors_AnyRevisionLimitAndToken_EqualsModel lists with random selectors, of everything or
// of a namespace, at the latest and at old revisions, in memory or older than memory, whole and in
// pages between which pods change.
func TestSelectors_AnyRevisionLimitAndToken_EqualsModel(t *testing.T) {
	for _, finds := range []bool{false, true} {
		t.Run(fmt.Sprintf("values found in stored bytes %t", finds), func(t *testing.T) {
			const rounds = 10
			var change []func(*options)
			if finds {
				change = append(change, finding)
			}
			f, m := newFixture(t, change...), podtest.NewModel(testseed.New(t), 1)
			for round := range rounds {
				for range 1 + m.Rand.IntN(100) {
					m.Step(t, f.Etcd)
				}
				if m.Rand.IntN(3) == 0 {
					f.Mirror.Compact(m.Revs[m.Rand.IntN(len(m.Revs))])
				}
				if round == rounds/2 { // some lists of any seed are older than memory
					f.Mirror.Compact(m.Revs[len(m.Revs)/2])
				}
				for range 30 {
					l := drawList(t, m, m.Selector(t))
					if err := l.walk(t, f, m, func() {
						if m.Rand.IntN(4) == 0 {
							m.Step(t, f.Etcd)
						}
					}); err != nil {
						t.Fatalf("%s: %v", &l, err)
					}
				}
			}
			if n := f.series(t, "strata_list_plans_total", "plan", metrics.PlanIndex); n == 0 {
				t.Error("no list used an index")
			}
			if n := f.series(t, "strata_list_read_values_total", "source", "stored"); finds != (n > 0) {
				t.Errorf("%v values were found in stored bytes", n)
			}
			if n := f.series(t, "strata_lists_total", "source", metrics.SourceEtcd, "reason", metrics.ReasonPast); n == 0 {
				t.Error("no list was older than memory")
			}
		})
	}
}

// TestGetList_AnyPage_EqualsUpstream compares random lists, page by page, with those of upstream's
// store on the same etcd: objects, token and metadata.
func TestGetList_AnyPage_EqualsUpstream(t *testing.T) {
	f, m := newFixture(t), podtest.NewModel(testseed.New(t), 2)
	pages := 0
	for range 10 {
		for range 1 + m.Rand.IntN(60) {
			m.Step(t, f.Etcd)
		}
		for range 20 {
			pred := m.Selector(t)
			pred.IndexFields, pred.IndexLabels = nil, nil // upstream's store has no indexes
			l := drawList(t, m, pred)
			for opts := l.opts; ; pages++ {
				got, want := &example.PodList{}, &example.PodList{}
				gotErr := f.getList(podtest.Context(t), l.key+"/", opts, got)
				if err := f.env.Etcd.GetList(podtest.Context(t), l.key+"/", opts, want); err != nil || gotErr != nil {
					t.Fatalf("%s: %v, want %v", &l, gotErr, err)
				}
				if !reflect.DeepEqual(got, want) {
					t.Fatalf("%s:\n%+v %v, want\n%+v %v", &l, got.ListMeta, paths(got), want.ListMeta, paths(want))
				}
				if opts = continued(opts, got.Continue); got.Continue == "" {
					break
				}
			}
		}
	}
	if pages < 50 {
		t.Errorf("only %d pages were followed by another", pages)
	}
}
