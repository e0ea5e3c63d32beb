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

// Series is one line of an exposition: a counter, a gauge, or the count of a histogram.
type Series struct {
	Name   string
	Labels map[string]string
	Value  float64
}

// Series returns the series that the engine exposes under these names now. An unknown name, or a
// counter without a count, has none.
func (e *Engine) Series(ctx context.Context, names ...string) ([]Series, error) {
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: "/metrics", Accept: "text/plain"}, &body); err != nil {
		return nil, err
	}
	return parseSeries(&body, names)
}

// parseSeries parses only the lines of these names: an API server exposes megabytes of others.
func parseSeries(r io.Reader, names []string) ([]Series, error) {
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
	var all []Series
	for name, family := range families {
		for _, metric := range family.GetMetric() {
			s := Series{Name: name, Labels: map[string]string{}, Value: metric.GetUntyped().GetValue()}
			for _, label := range metric.GetLabel() {
				s.Labels[label.GetName()] = label.GetValue()
			}
			all = append(all, s)
		}
	}
	return all, nil
}

// objectReads are the operations that API servers count when they read objects of a resource from
// etcd.
var objectReads = []string{"list", "get"}

// ObjectReads is the engine's own count of its reads of objects of a resource of the core group
// from etcd so far: ranges and single objects. Reads that count keys or return etcd's revision are
// not included, nor are reads of a mirror of all resources together.
func (e *Engine) ObjectReads(ctx context.Context, resource string) (float64, error) {
	all, err := e.Series(ctx, "etcd_requests_total")
	return sumReads(all, resource), err
}

func sumReads(all []Series, resource string) (reads float64) {
	for _, s := range all {
		if s.Labels["group"] == "" && s.Labels["resource"] == resource && slices.Contains(objectReads, s.Labels["operation"]) {
			reads += s.Value
		}
	}
	return reads
}
