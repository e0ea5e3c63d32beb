package readpath

import (
	"strings"
	"testing"

	"github.com/stratakube/strata/kube/internal/representation"
)

// TestEncoding_InvalidData_IsNotQuotedInError: errors do not quote invalid data, which may be a
// Secret, because errors reach clients and logs.
func TestEncoding_InvalidData_IsNotQuotedInError(t *testing.T) {
	t.Parallel()
	const text = "correct horse battery staple"
	for _, data := range []string{text, "k8s\x00" + text, "k8s\x00\x12\x7f" + text} {
		if _, _, _, err := representation.OpenUnknown([]byte(data)); err == nil || strings.Contains(err.Error(), "horse") {
			t.Errorf("%q: %v", data, err)
		}
	}
	w := watchedPodsWith(t)
	f := format{media: mediaJSON}
	enc, err := newEncoding(w.resource, f)
	if err != nil {
		t.Fatal(err)
	}
	enc.head = []byte(`{"kind":"Other",`)
	obj := w.resource.Store.NewFunc()
	if _, err := enc.appendItem(nil, obj); err == nil || strings.Contains(err.Error(), "metadata") {
		t.Errorf("an object without its head: %v", err)
	}
}
