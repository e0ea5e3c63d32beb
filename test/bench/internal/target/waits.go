package target

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// readWaitMetric is the histogram of waits of reads until memory was fresh enough, by resource.
const readWaitMetric = "apiserver_watch_cache_read_wait_seconds"

// Waits is a histogram of durations: the number of waits of at most each bound, in seconds. The last bound is infinite.
type Waits struct {
	bounds     []float64 // ascending
	cumulative []uint64
}

// ReadWaits returns how long reads of a resource of the core group have waited so far, from the engine's metrics. An engine without
// this metric, or that has not served such reads, has no waits.
func (e *Engine) ReadWaits(ctx context.Context, resource string) (Waits, error) {
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: "/metrics", Accept: "text/plain"}, &body); err != nil {
		return Waits{}, err
	}
	return parseWaits(&body, resource)
}

// parseWaits parses only the lines of the histogram: an API server exposes megabytes of others.
func parseWaits(r io.Reader, resource string) (Waits, error) {
	var exposition bytes.Buffer
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if line := lines.Text(); strings.HasPrefix(line, readWaitMetric) || strings.HasPrefix(line, "# TYPE "+readWaitMetric+" ") {
			fmt.Fprintln(&exposition, line)
		}
	}
	if err := lines.Err(); err != nil {
		return Waits{}, fmt.Errorf("read metrics: %w", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(&exposition)
	if err != nil {
		return Waits{}, fmt.Errorf("read metrics: %w", err)
	}
	for _, metric := range families[readWaitMetric].GetMetric() {
		labels := map[string]string{}
		for _, label := range metric.GetLabel() {
			labels[label.GetName()] = label.GetValue()
		}
		if labels["group"] != "" || labels["resource"] != resource {
			continue
		}
		var w Waits
		for _, bucket := range metric.GetHistogram().GetBucket() {
			w.bounds = append(w.bounds, bucket.GetUpperBound())
			w.cumulative = append(w.cumulative, bucket.GetCumulativeCount())
		}
		return w, nil
	}
	return Waits{}, nil
}

// Total is the number of waits.
func (w Waits) Total() uint64 {
	if len(w.cumulative) == 0 {
		return 0
	}
	return w.cumulative[len(w.cumulative)-1]
}

// Since returns the waits after earlier, which is none or has the same bounds.
func (w Waits) Since(earlier Waits) Waits {
	if len(earlier.cumulative) == 0 {
		return w
	}
	since := Waits{bounds: w.bounds, cumulative: make([]uint64, len(w.cumulative))}
	for i := range since.cumulative {
		since.cumulative[i] = w.cumulative[i] - earlier.cumulative[i]
	}
	return since
}

// AtMost returns the least bound in seconds that at least the share p, with 0 < p <= 1, of all waits do not exceed. It is an error
// if there is none but the infinite one.
func (w Waits) AtMost(p float64) (float64, error) {
	for i, n := range w.cumulative {
		if float64(n) >= p*float64(w.Total()) && n > 0 && !math.IsInf(w.bounds[i], 1) {
			return w.bounds[i], nil
		}
	}
	return 0, fmt.Errorf("less than %g %% of %d waits are within the finite bounds of the histogram", 100*p, w.Total())
}
