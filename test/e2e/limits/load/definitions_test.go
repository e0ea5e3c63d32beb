package load

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

type object = map[string]any

// TestDefinitions_Many_AddNoGoroutines: custom resources that no client reads add no goroutine, and
// their definitions are not cached in decoded form. Those that were read add no goroutine of the
// engine; upstream's registry has one for each, which counts objects.
func TestDefinitions_Many_AddNoGoroutines(t *testing.T) {
	harness.OnlyStrata(t)
	const (
		definitions = 50
		noise       = definitions / 2 // goroutines of connections and controllers that come and go
	)
	ctx := harness.Context(t, testTimeout)
	server, api := shared.server, shared.api
	createDefinition(t, ctx, api, 0)
	awaitEstablished(t, ctx, api, 1)
	readDefinition(t, ctx, api, 0)
	before, err := server.Held(ctx, api)
	harness.Check(t, err)
	engineBefore := engineGoroutines(t, ctx, api)
	cachedBefore := cachedBytes(t, ctx, api)

	size := 0
	for i := 1; i <= definitions; i++ {
		size += createDefinition(t, ctx, api, i)
	}
	awaitEstablished(t, ctx, api, 1+definitions)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		now, err := server.Held(ctx, api)
		return err == nil && now.Goroutines <= before.Goroutines+noise, fmt.Errorf("%d goroutines with %d unread definitions, %d before (%v)", now.Goroutines, definitions, before.Goroutines, err)
	}))
	// Encodings that the server's own informers read are cached, in at most two forms. A decoded
	// definition would count four times its size.
	if more := cachedBytes(t, ctx, api) - cachedBefore; more > 3*float64(size) {
		t.Errorf("definitions of %d bytes add %.0f cached bytes", size, more)
	}

	for i := 1; i <= definitions; i++ {
		readDefinition(t, ctx, api, i)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		now := engineGoroutines(t, ctx, api)
		return now <= engineBefore+noise, fmt.Errorf("%d goroutines of the engine with %d definitions that were read, %d before", now, definitions, engineBefore)
	}))
	after, err := server.Held(ctx, api)
	harness.Check(t, err)
	t.Logf("goroutines: %d with one definition, %d with %d more that were read; %d and %d of the engine", before.Goroutines, after.Goroutines, definitions, engineBefore, engineGoroutines(t, ctx, api))
}

func definitionGroup(i int) string { return fmt.Sprintf("group-%d.load.example.com", i) }

// createDefinition creates the definition of a custom resource with a long schema, and returns its
// size in JSON.
func createDefinition(t *testing.T, ctx context.Context, api *harness.API, i int) int {
	t.Helper()
	properties := object{}
	for p := range 100 {
		properties[fmt.Sprint("property-", p)] = object{"type": "string", "description": strings.Repeat("A text. ", 30)}
	}
	definition := object{
		"metadata": object{"name": "things." + definitionGroup(i)},
		"spec": object{
			"group": definitionGroup(i), "scope": "Namespaced",
			"names": object{"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
			"versions": []any{object{"name": "v1", "served": true, "storage": true, "schema": object{"openAPIV3Schema": object{
				"type": "object", "properties": object{"spec": object{"type": "object", "properties": properties}}}}}},
		},
	}
	_, err := api.Create(ctx, definitionsPath, definition)
	harness.Check(t, err)
	encoded, err := json.Marshal(definition)
	harness.Check(t, err)
	return len(encoded)
}

const definitionsPath = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"

// awaitEstablished returns when n definitions are established.
func awaitEstablished(t *testing.T, ctx context.Context, api *harness.API, n int) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, definitionsPath, "", nil)
		if err != nil {
			return false, err
		}
		established := strings.Count(string(r.Body), `"type":"Established"`)
		return established == n, fmt.Errorf("%d of %d definitions are established", established, n)
	}))
}

// readDefinition lists the objects of a definition, which makes its storage, as soon as it is
// served.
func readDefinition(t *testing.T, ctx context.Context, api *harness.API, i int) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		_, err := api.List(ctx, "/apis/"+definitionGroup(i)+"/v1/things", "")
		return err == nil, err
	}))
}

// engineGoroutines returns the number of goroutines that the engine runs. Handlers of requests are
// not among them.
func engineGoroutines(t *testing.T, ctx context.Context, api *harness.API) (n int) {
	t.Helper()
	r := harness.Must[*harness.Response](t)(api.DoAs(ctx, http.MethodGet, "/debug/pprof/goroutine", "debug=2", "", "text/plain", nil))
	for stack := range strings.SplitSeq(string(r.Body), "\n\n") {
		if strings.Contains(stack, "github.com/stratakube/strata/") && !strings.Contains(stack, ".ServeHTTP(") {
			n++
		}
	}
	if n == 0 {
		t.Error("found no goroutine of the engine: the detection of this test is wrong")
	}
	return n
}

// cachedBytes returns the size of cached encodings and decoded objects.
func cachedBytes(t *testing.T, ctx context.Context, api *harness.API) float64 {
	t.Helper()
	return harness.Must[float64](t)(api.Sum(ctx, "strata_representation_bytes"))
}
