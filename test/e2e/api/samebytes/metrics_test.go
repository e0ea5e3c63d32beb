package samebytes

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestBytePath_AnswersReadsOfEveryCachedResource: the byte path itself answers GET, LIST and WATCH
// of every cached resource, in JSON and protobuf, and passes none of them to upstream's handlers.
// Otherwise the comparisons of this package would not cover it.
func TestBytePath_AnswersReadsOfEveryCachedResource(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	stored := slices.DeleteFunc(slices.Clone(w.resources), func(r resource) bool {
		return !r.stored() || r.gvr.Resource == "events" // upstream does not cache these either
	})
	const atOnce = 16 // a page of metrics costs as much as hundreds of requests
	for group := range slices.Chunk(stored, atOnce) {
		var names []string
		for _, r := range group {
			names = append(names, r.String())
		}
		t.Run(strings.Join(names, ","), func(t *testing.T) {
			var requests, watches []request
			for _, r := range group {
				w.settle(t, ctx, r.path())
				objects := list(t, w, r)
				for _, m := range r.bytePathMedia() {
					requests = append(requests, request{path: r.path(), accept: m.list}, request{path: r.path(), query: "limit=1&resourceVersion=0", accept: m.list})
					if len(objects) > 0 {
						requests = append(requests, request{path: objectPath(r, objects[0]), accept: m.object})
					}
					watches = append(watches, request{path: r.path(), query: initialEvents, accept: m.object})
				}
			}
			strata := w.engines[0]
			before := readpathMetrics(t, ctx, strata)
			for _, r := range requests {
				answer, err := strata.patient(ctx, r)
				harness.Check(t, err)
				if answer.code != http.StatusOK {
					t.Fatalf("%s: %d", r, answer.code)
				}
			}
			for _, r := range watches {
				o, err := strata.watch(ctx, r, endOfInitialEvents)
				harness.Check(t, err)
				o.read()
			}
			after := readpathMetrics(t, ctx, strata)
			answered := 0.0
			late := map[string]float64{passedToEtcd: lateReads(after) - lateReads(before)}
			for name, value := range after {
				if strings.HasPrefix(name, "strata_readpath_requests_total") {
					answered += value - before[name]
				} else if strings.HasPrefix(name, "strata_readpath_passed_total") && value-before[name] > late[name] {
					t.Errorf("%s went from %v to %v", name, before[name], value)
				}
			}
			if asked := len(requests) + len(watches); answered < float64(asked) {
				t.Errorf("the byte path answered %v of %d requests", answered, asked)
			}
		})
	}
}

// bytePathMedia are the media types in which the byte path answers reads of the resource.
func (r resource) bytePathMedia() []mediaType {
	return slices.DeleteFunc(slices.Clone(media), func(m mediaType) bool {
		switch m.name {
		case "json", "unsaid", "metadata-v1-json", "metadata-v1-protobuf", "metadata-v1beta1-json", "metadata-v1beta1-protobuf":
			return false
		case "protobuf":
			return r.custom || r.gvr.Group == "webconsole2.operator.openshift.io"
		default:
			return true
		}
	})
}

// counted are the metrics of readpathMetrics.
var counted = []string{"strata_readpath_requests_total", "strata_readpath_passed_total", "apiserver_watch_cache_consistent_read_total"}

// passedToEtcd counts the reads that the byte path has left to etcd.
const passedToEtcd = `strata_readpath_passed_total{reason="etcd"}`

// lateReads returns the number of GETs that etcd has answered because memory did not reach its
// revision within 250 ms, as on a busy machine.
func lateReads(counters map[string]float64) (n float64) {
	for name, value := range counters {
		if strings.HasPrefix(name, "apiserver_watch_cache_consistent_read_total") && strings.Contains(name, `fallback="true"`) {
			n += value
		}
	}
	return n
}

// readpathMetrics returns the counters of the byte path and of consistent reads, with their labels.
func readpathMetrics(t *testing.T, ctx context.Context, e *engine) map[string]float64 {
	t.Helper()
	answer, err := e.ask(ctx, request{path: "/metrics", query: "name[]=" + strings.Join(counted, "&name[]=")})
	harness.Check(t, err)
	if answer.code != http.StatusOK {
		t.Fatalf("/metrics: %d", answer.code)
	}
	counters := map[string]float64{}
	for lines := bufio.NewScanner(bytes.NewReader(answer.body)); lines.Scan(); {
		name, value, ok := strings.Cut(lines.Text(), " ")
		if !ok || !slices.ContainsFunc(counted, func(metric string) bool { return strings.HasPrefix(name, metric) }) {
			continue
		}
		if counters[name], err = strconv.ParseFloat(value, 64); err != nil {
			t.Fatal(fmt.Errorf("metric %s: %w", name, err))
		}
	}
	return counters
}
