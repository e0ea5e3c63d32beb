package readpath

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// aggregatedAnswer is the aggregated server's answer to every request.
const aggregatedAnswer = `{"kind":"Elsewhere","apiVersion":"test.example.com/v1"}`

// startAggregated starts a server on this host and returns the service for an APIService that
// refers to it.
func startAggregated(t *testing.T, ctx context.Context) (service object) {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, aggregatedAnswer)
	}))
	t.Cleanup(server.Close)
	u, err := url.Parse(server.URL)
	harness.Check(t, err)
	_, port, err := net.SplitHostPort(u.Host)
	harness.Check(t, err)
	var number int
	_, err = fmt.Sscan(port, &number)
	harness.Check(t, err)
	// An API server resolves a service of this kind by its external name.
	r, err := api.Do(ctx, http.MethodPost, "/api/v1/namespaces/default/services", "", object{
		"metadata": object{"name": "elsewhere"}, "spec": object{"type": "ExternalName", "externalName": "localhost"}})
	harness.Check(t, err)
	if r.Code != http.StatusCreated && r.Code != http.StatusConflict {
		t.Fatal(r.Err())
	}
	return object{"namespace": "default", "name": "elsewhere", "port": number}
}

// moveAPIService assigns a group version to another server; a nil service moves it back.
func moveAPIService(t *testing.T, ctx context.Context, name string, service object) {
	t.Helper()
	spec := object{"service": nil, "insecureSkipTLSVerify": nil}
	if service != nil {
		spec = object{"service": service, "insecureSkipTLSVerify": true}
	}
	r, err := api.DoAs(ctx, http.MethodPatch, "/apis/apiregistration.k8s.io/v1/apiservices/"+name, "", "application/merge-patch+json", "", object{
		// Without the label the API server does not reset the APIService.
		"metadata": object{"labels": object{"kube-aggregator.kubernetes.io/automanaged": nil}}, "spec": spec})
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Fatal(r.Err())
	}
}

// TestAPIService_MovedToOtherServer_IsProxied: the aggregated server's answers are returned, also
// for resources that are stored here.
func TestAPIService_MovedToOtherServer_IsProxied(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	newNamespace(t, ctx, "moves")
	startAggregated(t, ctx) // both servers observe its Service before an APIService refers to it
	d := definition{plural: "nomads", kind: "Nomad", versions: []version{{name: "v1", spec: anySpec}}}
	d.create(t, ctx)
	d.add(t, ctx, "moves", "a", object{})
	for _, group := range []struct {
		service  string
		read     [][2]string
		contains string
	}{
		{"v1." + group, d.reads("v1", "moves"), `"name":"a"`},
		{"v1.node.k8s.io", [][2]string{{"/apis/node.k8s.io/v1/runtimeclasses", ""}}, `"kind":"RuntimeClassList"`},
	} {
		path := "/apis/apiregistration.k8s.io/v1/apiservices/" + group.service
		untilBody(t, ctx, path, "", `"type":"Available"`)
		for _, read := range group.read {
			untilBody(t, ctx, read[0], read[1], group.contains)
		}
		byBytes(t, ctx, group.read[0][0], "")

		service := startAggregated(t, ctx)
		for range 2 {
			moveAPIService(t, ctx, group.service, service)
			for _, read := range group.read {
				untilBody(t, ctx, read[0], read[1], aggregatedAnswer)
			}
			untilBody(t, ctx, group.read[0][0], "watch=true&timeoutSeconds=1", aggregatedAnswer)
			passedOn(t, ctx, group.read[0][0], "remote")

			moveAPIService(t, ctx, group.service, nil)
			for _, read := range group.read {
				untilBody(t, ctx, read[0], read[1], group.contains)
			}
			byBytes(t, ctx, group.read[0][0], "")
		}
		// Its service does not answer.
		moveAPIService(t, ctx, group.service, object{"namespace": "default", "name": "nowhere", "port": 443})
		for _, read := range group.read {
			untilCode(t, ctx, read[0], read[1], http.StatusServiceUnavailable)
		}
		// The APIService is deleted: the resources stored here are served again.
		harness.Check(t, api.Delete(ctx, path))
		for _, read := range group.read {
			until(t, ctx, read[0], read[1], func(r *harness.Response) bool { return r.Code == http.StatusOK })
		}
		byBytes(t, ctx, group.read[0][0], "")
	}
}
