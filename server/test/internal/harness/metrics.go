package harness

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Metric returns the sum of all series of /metrics whose text begins with prefix, as in `name{label="value"`. It returns an error
// if there is none.
func (a *API) Metric(ctx context.Context, prefix string) (float64, error) {
	sum, found, err := a.sum(ctx, func(series string) bool { return strings.HasPrefix(series, prefix) })
	if err == nil && !found {
		err = fmt.Errorf("metrics: no series begins with %s", prefix)
	}
	return sum, err
}

// Sum returns the sum of the series of a metric that have all of the labels, as in `label="value"`; 0 if there is none.
func (a *API) Sum(ctx context.Context, metric string, labels ...string) (float64, error) {
	sum, _, err := a.sum(ctx, func(series string) bool {
		name, rest, _ := strings.Cut(series, "{")
		return name == metric && !slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(rest, label) })
	})
	return sum, err
}

func (a *API) sum(ctx context.Context, match func(series string) bool) (sum float64, found bool, err error) {
	r, err := a.DoAs(ctx, http.MethodGet, "/metrics", "", "", "text/plain", nil)
	if err != nil {
		return 0, false, err
	}
	if r.Code != http.StatusOK {
		return 0, false, fmt.Errorf("metrics: %w", r.Err())
	}
	lines := bufio.NewScanner(bytes.NewReader(r.Body))
	lines.Buffer(nil, len(r.Body)+1)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || !match(line[:i]) {
			continue
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return 0, false, fmt.Errorf("metrics: %q: %w", line, err)
		}
		sum, found = sum+value, true
	}
	return sum, found, nil
}
