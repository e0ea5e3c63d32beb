package readpath

import (
	"net/http"
	"testing"
)

// TestProbePanicsWhereItWasSent: a handler that panics takes down the request that made the resolver ask, whose filters
// recover it, and not the process.
func TestProbePanicsWhereItWasSent(t *testing.T) {
	defer func() {
		if got := recover(); got != "handler" {
			t.Errorf("recovered %v, want handler", got)
		}
	}()
	found := probe(route{version: "v1", resource: "configmaps", verb: "list"}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic("handler") }))
	t.Errorf("found %v, want a panic", found)
}
