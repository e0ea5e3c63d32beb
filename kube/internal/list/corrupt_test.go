package list

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// unsafeDelete turns the gate AllowUnsafeMalformedObjectDeletion on for a fixture and upstream's
// store.
func unsafeDelete(t testing.TB) func(*options) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.AllowUnsafeMalformedObjectDeletion, true)
	return func(o *options) { o.UnsafeDelete = true }
}

// encrypted makes values that are not encrypted unreadable.
func encrypted(t testing.TB) func(*options) {
	return func(o *options) { o.Config.Transformer = podtest.Encryption(t, "1") }
}

// corrupt stores n unreadable pods.
func (f *fixture) corrupt(t testing.TB, n int) {
	t.Helper()
	for i := range n {
		f.Etcd.Put(podtest.Root+"ns/"+podName(i), "key1:too short")
	}
	f.CatchUp(t)
}

// causes returns the number of objects that an error names.
func causes(err error) int {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return 0
	}
	return len(status.Status().Details.Causes)
}

// statusOf returns the status of an error. Before v0.37 the message of upstream's store has no
// cause: with another error of that store, the cause is removed.
func statusOf(t testing.TB, err, upstream error) metav1.Status {
	t.Helper()
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		t.Fatalf("%v is not a status", err)
	}
	s := status.Status()
	if strings.HasSuffix(upstream.Error(), " from the storage") {
		s.Message, _, _ = strings.Cut(s.Message, ": ")
	}
	return s
}

// TestUndecodableObject_ManyInList_FirstHundredAreNamed, as upstream's store does.
func TestUndecodableObject_ManyInList_FirstHundredAreNamed(t *testing.T) {
	unsafe := unsafeDelete(t)
	for _, n := range []int{1, 2, 99, 100, 101, 102} {
		f := newFixture(t, encrypted(t), unsafe)
		f.corrupt(t, n)
		got := f.env.GetList(podtest.Context(t), "/pods/", everything(), &example.PodList{})
		want := f.env.Etcd.GetList(podtest.Context(t), "/pods/", everything(), &example.PodList{})
		if n == maxCorrupt && causes(want) == n {
			continue // before v0.37 the hundredth object does not end the list
		}
		if named := causes(got); !reflect.DeepEqual(statusOf(t, got, want), statusOf(t, want, want)) || named < min(n, 100) || named > 101 {
			t.Errorf("%d objects: %d named: %v, want\n%v", n, named, got, want)
		}
	}
}

// TestUndecodableObject_InPage_FillsPage: a page that begins at undecodable objects ends at its
// limit, and its error names as many of them.
func TestUndecodableObject_InPage_FillsPage(t *testing.T) {
	const n = 3
	f := newFixture(t, encrypted(t), unsafeDelete(t))
	f.corrupt(t, n)
	for limit := int64(1); limit <= n+1; limit++ {
		err := f.env.GetList(podtest.Context(t), "/pods/", limited(everything(), limit), &example.PodList{})
		if named := causes(err); int64(named) != min(limit, n) {
			t.Errorf("limit %d: the error names %d objects, want %d: %v", limit, named, min(limit, n), err)
		}
	}
}

// TestUndecodableObject_GateOff_FirstEndsList with its own error.
func TestUndecodableObject_GateOff_FirstEndsList(t *testing.T) {
	f := newFixture(t, encrypted(t))
	f.corrupt(t, 3)
	got := f.env.GetList(podtest.Context(t), "/pods/", everything(), &example.PodList{})
	want := f.env.Etcd.GetList(podtest.Context(t), "/pods/", everything(), &example.PodList{})
	if fmt.Sprint(got) != fmt.Sprint(want) || want == nil || !strings.Contains(got.Error(), podName(0)) {
		t.Errorf("%v, want %v", got, want)
	}
	if err := f.env.GetList(podtest.Context(t), "/pods/other/", everything(), &example.PodList{}); err != nil {
		t.Errorf("a list without them: %v", err)
	}
}

// TestRead_Unreadable_NamesObjects: Unreadable replaces an error of encoding by one that names the
// undecodable objects of the page. Errors below 500, and those of ended requests, stay.
func TestRead_Unreadable_NamesObjects(t *testing.T) {
	f := newFixture(t, encrypted(t), unsafeDelete(t))
	f.corrupt(t, 3)
	ctx, failed := podtest.Context(t), errors.New("cannot encode")
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for limit, want := range map[int64]int{0: 3, 2: 2, 5: 3} {
		if err := f.read(t, limited(everything(), limit)).Unreadable(ctx, failed); causes(err) != want {
			t.Errorf("limit %d: %v, want %d objects", limit, err, want)
		}
	}
	r := f.read(t, everything())
	for _, c := range []struct {
		ctx context.Context
		err error
	}{{ctx, apierrors.NewBadRequest("x")}, {ctx, apierrors.NewTimeoutError("x", 1)}, {ended, failed}} {
		if got := r.Unreadable(c.ctx, c.err); got != c.err {
			t.Errorf("%v is replaced by %v", c.err, got)
		}
	}
	if got := r.Unreadable(ctx, apierrors.NewInternalError(failed)); causes(got) != 3 {
		t.Errorf("an internal error is kept: %v", got)
	}
	f.env.Gates.UnsafeDelete = false
	if got := r.Unreadable(ctx, failed); got != failed {
		t.Errorf("with the gate off: %v", got)
	}
}

// TestFinder_UndecodableObjects_FailListsThatMaySelectThem: an object whose bytes are intact where
// the finder reads is not decoded by a list that excludes its value, and is not among the objects
// that the list reports. One whose bytes are malformed fails every list.
func TestFinder_UndecodableObjects_FailListsThatMaySelectThem(t *testing.T) {
	for _, unsafe := range []bool{false, true} {
		f := newFixture(t, finding)
		f.env.Gates.UnsafeDelete = unsafe
		for i := range 200 {
			f.Put(t, podtest.Labelled(podName(i), "n", fmt.Sprint(i%50)))
		}
		// reports is the number of objects that a list names: the first one, or all with the gate.
		reports := func(selector string) int {
			t.Helper()
			err := f.env.GetList(podtest.Context(t), "/pods/", selecting(podtest.Selecting(t, selector, "")), &example.PodList{})
			if err != nil && !unsafe {
				return 1
			}
			read := f.read(t, selecting(podtest.Selecting(t, selector, "")))
			if n := causes(read.Unreadable(podtest.Context(t), errors.New("cannot encode"))); n != causes(err) {
				t.Errorf("a list of %q names %d objects that cannot be encoded, want %d", selector, n, causes(err))
			}
			return causes(err)
		}
		put := func(name, end string) {
			value := `{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":%q,"labels":{"n":"1"}},"spec":{"nodeName":5}%s`
			f.Etcd.Put(podtest.Root+"ns/"+name, fmt.Sprintf(value, name, end))
		}
		put("pod-0000-x", "}") // the node is a string in upstream's type
		for round := range 3 { // by stored values, and by the index
			for selector, want := range map[string]int{"n=7": 0, "n=1": 1, "n!=7": 1, "n in (7,8)": 0, "": 1} {
				if got := reports(selector); got != want {
					t.Errorf("round %d: a list of %q reports %d objects, want %d", round, selector, got, want)
				}
			}
		}
		put("pod-0000-y", "")
		for selector, want := range map[string]int{"n=7": 1, "n=1": 2, "n!=7": 2, "": 2} {
			if !unsafe {
				want = 1
			}
			if got := reports(selector); got != want {
				t.Errorf("with malformed bytes, a list of %q reports %d objects, want %d", selector, got, want)
			}
		}
	}
}
