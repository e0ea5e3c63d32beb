package readpath

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// brokenWebhook converts custom resources to v1 until it is down.
type brokenWebhook struct {
	runtime.Codec
	down  atomic.Bool
	calls atomic.Int32 // while it is down
}

func (h *brokenWebhook) Decode(data []byte, kind *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, was, err := h.Codec.Decode(data, kind, into)
	u, ok := obj.(*unstructured.Unstructured)
	if !ok || err != nil || u.GetAPIVersion() == "example.com/v1" {
		return obj, was, err
	}
	if h.down.Load() {
		h.calls.Add(1)
		return nil, was, errors.New("the webhook has failed")
	}
	u.SetAPIVersion("example.com/v1")
	return u, was, nil
}

// TestGet_ConversionFails_IsNotPassedOn: the error of a conversion is the answer. Upstream's
// handler would call the webhook again, in one of the places for reads of etcd.
func TestGet_ConversionFails_IsNotPassedOn(t *testing.T) {
	t.Parallel()
	hook := &brokenWebhook{Codec: unstructured.UnstructuredJSONScheme}
	w := watchedWidgetsWith(t, hook)
	v2 := w.object("w", nil).(*unstructured.Unstructured)
	v2.SetAPIVersion("example.com/v2")
	w.put(t, v2)
	w.locked.Store(true)
	w.put(t, w.object("locked", nil))
	hook.down.Store(true)
	get := func(name string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, "/apis/example.com/v1/namespaces/ns/widgets/"+name, nil)
		req.Header.Set("Accept", jsonType)
		rw := httptest.NewRecorder()
		w.ServeHTTP(rw, req)
		return rw
	}
	got := get("w")
	// A GET may go to etcd while the machine is full.
	for end := time.Now().Add(patience); got.Code == http.StatusNotImplemented && time.Now().Before(end); {
		got = get("w")
	}
	if got.Code != http.StatusInternalServerError || !strings.Contains(got.Body.String(), "the webhook has failed") || hook.calls.Load() != 1 {
		t.Errorf("got %d %s after %d calls of the webhook, want its error after 1", got.Code, got.Body, hook.calls.Load())
	}
	if got := get("locked"); got.Code != http.StatusNotImplemented || strings.TrimSpace(got.Body.String()) != string(reasonEtcd) {
		t.Errorf("an object that cannot be decrypted: %d %s, want it passed on", got.Code, got.Body)
	}
}
