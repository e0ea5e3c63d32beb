package target

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
)

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
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: "/metrics", Accept: "text/plain"}, &body); err != nil {
		return nil, err
	}
	return parsePassedOn(&body)
}

// parsePassedOn parses only the lines of the counter: an API server exposes megabytes of others.
func parsePassedOn(r io.Reader) (map[string]float64, error) {
	var passed map[string]float64
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := lines.Text()
		if strings.HasPrefix(line, servedMetric+"{") && passed == nil {
			passed = map[string]float64{}
		}
		sample, ok := strings.CutPrefix(line, passedOnMetric+"{")
		if !ok {
			continue
		}
		labels, value, ok := strings.Cut(sample, "} ")
		n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if !ok || err != nil {
			return nil, fmt.Errorf("metric %q is not name{labels} value", line)
		}
		if passed == nil {
			passed = map[string]float64{}
		}
		_, reason, _ := strings.Cut(labels, `reason="`)
		reason, _, _ = strings.Cut(reason, `"`)
		passed[reason] += n
	}
	return passed, lines.Err()
}
