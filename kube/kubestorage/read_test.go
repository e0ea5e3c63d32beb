package kubestorage

import (
	"bytes"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/mirror"
)

// fillPods creates n pods, labelled i=0 to i=9 in turn, and waits until memory has them.
func fillPods(t testing.TB, f *fixture, n int) {
	t.Helper()
	ctx := contextFor(t)
	for i := range n {
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: fmt.Sprintf("ns-%d", i%3), Name: fmt.Sprintf("pod-%04d", i),
			Labels: map[string]string{"i": fmt.Sprint(i % 10)},
		}}
		if err := f.Create(ctx, fmt.Sprintf("/pods/%s/%s", pod.Namespace, pod.Name), pod, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	f.catchUp(t)
}

// newRepresentation returns a representation of the objects of a store, or of a type that embeds
// one.
func newRepresentation(s interface{ generation() *objects.Generation }, encode representation.ItemEncoder, splice representation.Splicer) *representation.Representation {
	return representation.Of(s.generation(), new(int), representation.Format{Encode: encode, Splice: splice})
}

func (s *Store) generation() *objects.Generation { return s.view.CurrentGeneration() }

// podItem is an ItemEncoder.
func podItem(dst []byte, obj runtime.Object) ([]byte, error) {
	buf := bytes.NewBuffer(dst)
	err := codecs.LegacyCodec(examplev1.SchemeGroupVersion).Encode(obj, buf)
	return buf.Bytes(), err
}

func mustLatest(t testing.TB, s *Store) mirror.Snapshot {
	t.Helper()
	snap, err := s.resource.Latest()
	if err != nil {
		t.Fatal(err)
	}
	return snap
}
