package kubestorage

import (
	"fmt"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/listadmission"
)

func TestGetList_TakesBytesUntilRequestEnds(t *testing.T) {
	t.Parallel()
	f := setup(t)
	var pods []*example.Pod
	for i := range 40 {
		pod := newPod(fmt.Sprintf("large-%d", i))
		// 4 MB in total
		pod.Annotations = map[string]string{"value": strings.Repeat("0123456789", 10_000)}
		pods = append(pods, pod)
	}
	pods[0].Labels = map[string]string{"chosen": "yes"}
	f.create(t, pods...)
	list := func(limitBytes int64, pred storage.SelectionPredicate) error {
		t.Helper()
		l := listadmission.New(limitBytes)
		ctx, d := l.Begin(contextFor(t), listadmission.Level{}, listadmission.Form{Factor: 1})
		err := f.GetList(ctx, "/pods/", storage.ListOptions{Recursive: true, Predicate: pred}, newExamplePodList())
		if err == nil && pred.Limit == 0 && pred.Empty() && d.Held() < 4e6 {
			t.Errorf("a list of 4 MB holds %d bytes until its request ends", d.Held())
		}
		d.End()
		if used := l.InFlight(); used != 0 {
			t.Errorf("%d bytes are held after a list", used)
		}
		return err
	}
	page, one, none := storage.Everything, storage.Everything, storage.Everything
	page.Limit = 10
	one.Label = labels.SelectorFromSet(labels.Set{"chosen": "yes"})
	one.GetAttrs, none.GetAttrs = podAttrs, podAttrs
	none.Label = labels.SelectorFromSet(labels.Set{"chosen": "no"})
	all := storage.Everything
	all.Label, all.GetAttrs = must(labels.Parse("chosen!=maybe")), podAttrs
	if err := list((64 << 20), storage.Everything); err != nil {
		t.Errorf("a list of 4 MB where 64 are allowed: %v", err)
	}
	for what, pred := range map[string]storage.SelectionPredicate{"a list": storage.Everything, "a list with a selector": all} {
		if err := list(8<<20, pred); !apierrors.IsRequestEntityTooLargeError(err) {
			t.Errorf("%s of 4 MB where 3 are allowed to one: %v, want 413", what, err)
		}
	}
	for what, pred := range map[string]storage.SelectionPredicate{"a page of 1 MB": page, "a list that selects one object": one, "a list that selects none": none} {
		if err := list(8<<20, pred); err != nil {
			t.Errorf("%s where 3 MB are allowed to one: %v", what, err)
		}
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
