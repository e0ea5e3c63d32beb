package target

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// series is one line of an exposition: a counter, a gauge, or the count of a histogram.
type series struct {
	name   string
	labels map[string]string
	value  float64
}

// series returns the series that the engine exposes under these names now. An unknown name, or a
// counter without a count, has none.
func (e *Engine) series(ctx context.Context, names ...string) ([]series, error) {
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: "/metrics", Accept: "text/plain"}, &body); err != nil {
		return nil, err
	}
	return parseSeries(&body, names)
}

// parseSeries parses only the lines of these names: an API server exposes megabytes of others.
func parseSeries(r io.Reader, names []string) ([]series, error) {
	var exposition bytes.Buffer
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if name := line[:max(0, strings.IndexAny(line, "{ "))]; slices.Contains(names, name) {
			fmt.Fprintln(&exposition, line)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	// untyped, since the TYPE lines are omitted
	families, err := parser.TextToMetricFamilies(&exposition)
	if err != nil {
		return nil, fmt.Errorf("read metrics: %w", err)
	}
	var all []series
	for name, family := range families {
		for _, metric := range family.GetMetric() {
			s := series{name: name, labels: map[string]string{}, value: metric.GetUntyped().GetValue()}
			for _, label := range metric.GetLabel() {
				s.labels[label.GetName()] = label.GetValue()
			}
			all = append(all, s)
		}
	}
	return all, nil
}

const (
	// passedOnMetric counts the reads that the byte read path passed on to upstream's handlers, by
	// reason.
	passedOnMetric = "strata_readpath_passed_total"

	// servedMetric counts the reads that it answered. A counter of 0 is not exposed, so either
	// shows that there is a byte path.
	servedMetric = "strata_readpath_requests_total"
)

// PassedOn returns how many reads the engine's byte read path has passed on so far, by reason; nil
// if the engine has no byte path or has not used it yet.
func (e *Engine) PassedOn(ctx context.Context) (map[string]float64, error) {
	all, err := e.series(ctx, passedOnMetric, servedMetric)
	return sumPassedOn(all), err
}

func sumPassedOn(all []series) (passed map[string]float64) {
	for _, s := range all {
		if passed == nil {
			passed = map[string]float64{}
		}
		if s.name == passedOnMetric {
			passed[s.labels["reason"]] += s.value
		}
	}
	return passed
}
