package kubestorage

import (
	"bytes"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/mirror"
)

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
