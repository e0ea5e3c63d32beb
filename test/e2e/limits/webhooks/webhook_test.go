package webhooks

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/test/harness"
)

// webhook is a conversion webhook for routes that serves HTTPS on loopback until the test ends.
type webhook struct {
	url string
	ca  []byte // PEM

	calls, objects, held atomic.Int64 // requests, objects in them, and requests waiting in before
}

// newWebhook starts a webhook. It calls before, if that is not nil, before each conversion; an
// error of before is its answer. The context of before ends when the caller disconnects or the test
// ends.
func newWebhook(t *testing.T, before func(context.Context) error) *webhook {
	t.Helper()
	authority := harness.New(t).Authority()
	issued := authority.Issue("webhook")
	pair, err := tls.X509KeyPair(issued.CertPEM, issued.KeyPEM)
	harness.Check(t, err)
	h := &webhook{ca: authority.CertPEM}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review apiextensionsv1.ConversionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, fmt.Sprintf("no conversion request: %v", err), http.StatusBadRequest)
			return
		}
		h.calls.Add(1)
		h.objects.Add(int64(len(review.Request.Objects)))
		review.Response = h.answer(r.Context(), review.Request, before)
		review.Request = nil
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(&review) // an error means that the caller has disconnected
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	s.StartTLS()
	t.Cleanup(func() {
		s.CloseClientConnections() // ends the contexts of hanging requests
		s.Close()
	})
	h.url = s.URL + "/convert"
	return h
}

func (h *webhook) answer(ctx context.Context, request *apiextensionsv1.ConversionRequest, before func(context.Context) error) *apiextensionsv1.ConversionResponse {
	response := &apiextensionsv1.ConversionResponse{UID: request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
	failed := func(err error) *apiextensionsv1.ConversionResponse {
		response.Result = metav1.Status{Status: metav1.StatusFailure, Message: err.Error()}
		response.ConvertedObjects = nil
		return response
	}
	if before != nil {
		h.held.Add(1)
		err := before(ctx)
		h.held.Add(-1)
		if err != nil {
			return failed(err)
		}
	}
	for _, raw := range request.Objects {
		converted, err := convert(raw.Raw, request.DesiredAPIVersion)
		if err != nil {
			return failed(err)
		}
		response.ConvertedObjects = append(response.ConvertedObjects, runtime.RawExtension{Raw: converted})
	}
	return response
}

// convert returns a route, given as JSON, in the other version.
func convert(route []byte, apiVersion string) ([]byte, error) {
	o := &unstructured.Unstructured{}
	if err := o.UnmarshalJSON(route); err != nil {
		return nil, err
	}
	from, to := o.GetAPIVersion(), apiVersion
	data, _, err := unstructured.NestedStringMap(o.Object, "data")
	if err != nil {
		return nil, fmt.Errorf("convert %s: %w", o.GetName(), err)
	}
	other := map[string]string{}
	switch {
	case from == group+"/v1" && to == group+"/v2":
		other["host"], other["port"], _ = strings.Cut(data["address"], ":")
	case from == group+"/v2" && to == group+"/v1":
		other["address"] = data["host"] + ":" + data["port"]
	default:
		return nil, fmt.Errorf("convert %s: from %s to %s is no conversion of routes", o.GetName(), from, to)
	}
	o.SetAPIVersion(to)
	if err := unstructured.SetNestedStringMap(o.Object, other, "data"); err != nil {
		return nil, err
	}
	return o.MarshalJSON()
}

// gate lets callers of pass through while it is open.
type gate struct {
	shut atomic.Pointer[chan struct{}]
}

func (g *gate) close() {
	c := make(chan struct{})
	g.shut.Store(&c)
}

// open may be called more than once.
func (g *gate) open() {
	if c := g.shut.Swap(nil); c != nil {
		close(*c)
	}
}

// pass returns when the gate is open, or the error of ctx.
func (g *gate) pass(ctx context.Context) error {
	c := g.shut.Load()
	if c == nil {
		return nil
	}
	select {
	case <-*c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
