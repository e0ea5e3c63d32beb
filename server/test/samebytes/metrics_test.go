package samebytes

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
)

// TestBytePathAnswers looks at whether what is compared here comes from where it should: the byte path answers GET, LIST
// and WATCH of every resource that memory holds, in JSON and protobuf, and passes none of them on.
func TestBytePathAnswers(t *testing.T) {
	w := open(t)
	ctx := newContext(t)
	strata := w.engines[0]
	for _, r := range w.resources {
		if !r.stored() || r.gvr.Resource == "events" { // of these upstream keeps nothing in memory either
			continue
		}
		t.Run(r.String(), func(t *testing.T) {
			w.settle(t, ctx, r.path())
			objects := list(t, w, r)
			before := readpathMetrics(t, ctx, strata)
			asked := 0
			for _, m := range media {
				switch m.name {
				case "json", "unsaid", "metadata-v1-json", "metadata-v1-protobuf", "metadata-v1beta1-json", "metadata-v1beta1-protobuf":
				case "protobuf":
					if r.custom || r.gvr.Group == "webconsole2.operator.openshift.io" {
						continue
					}
				default:
					continue
				}
				requests := []request{{path: r.path(), accept: m.list}, {path: r.path(), query: "limit=1&resourceVersion=0", accept: m.list}}
				if len(objects) > 0 {
					requests = append(requests, request{path: objectPath(r, objects[0]), accept: m.object})
				}
				for _, r := range requests {
					answer, err := strata.ask(ctx, r)
					check(t, err)
					if answer.code != http.StatusOK {
						t.Fatalf("%s: %d", r, answer.code)
					}
				}
				o, err := strata.watch(ctx, request{path: r.path(), query: initialEvents, accept: m.object}, endOfInitialEvents)
				check(t, err)
				o.read()
				asked += len(requests) + 1
			}
			after := readpathMetrics(t, ctx, strata)
			answered := 0.0
			for name, value := range after {
				if strings.HasPrefix(name, "strata_readpath_requests_total") {
					answered += value - before[name]
				} else if value != before[name] {
					t.Errorf("%s went from %v to %v", name, before[name], value)
				}
			}
			if answered < float64(asked) {
				t.Errorf("the byte path answered %v of %d requests", answered, asked)
			}
		})
	}
}

// readpathMetrics returns the counters of the byte path, with their labels.
func readpathMetrics(t *testing.T, ctx context.Context, e *engine) map[string]float64 {
	t.Helper()
	answer, err := e.ask(ctx, request{path: "/metrics"})
	check(t, err)
	if answer.code != http.StatusOK {
		t.Fatalf("/metrics: %d", answer.code)
	}
	counters := map[string]float64{}
	for lines := bufio.NewScanner(bytes.NewReader(answer.body)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || !strings.HasPrefix(name, "strata_readpath_requests_total") && !strings.HasPrefix(name, "strata_readpath_passed_total") {
			continue
		}
		if counters[name], err = strconv.ParseFloat(value, 64); err != nil {
			t.Fatal(fmt.Errorf("metric %s: %w", name, err))
		}
	}
	return counters
}
