package readpath

import (
	"net/http"
	"testing"
)

// TestProbe_HandlerPanics_PanicsInRequest: a panic of the probed handler propagates to the request
// that triggered the probe, whose filters recover it, and does not end the process.
func TestProbe_HandlerPanics_PanicsInRequest(t *testing.T) {
	defer func() {
		if got := recover(); got != "handler" {
			t.Errorf("recovered %v, want handler", got)
		}
	}()
	found := probe(route{version: "v1", resource: "configmaps", verb: "list"}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("handler") }))
	t.Errorf("found %v, want a panic", found)
}
