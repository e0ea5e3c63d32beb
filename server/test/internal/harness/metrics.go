package harness

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Metric returns the sum of all series of /metrics whose text begins with prefix, as in `name{label="value"`. That there
// is none is an error.
func (a *API) Metric(ctx context.Context, prefix string) (float64, error) {
	r, err := a.DoAs(ctx, http.MethodGet, "/metrics", "", "", "text/plain", nil)
	if err != nil {
		return 0, err
	}
	if r.Code != http.StatusOK {
		return 0, fmt.Errorf("metrics: %w", r.Err())
	}
	sum, found := 0.0, false
	lines := bufio.NewScanner(bytes.NewReader(r.Body))
	lines.Buffer(nil, len(r.Body)+1)
	for lines.Scan() {
		line := lines.Text()
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || !strings.HasPrefix(line, prefix) {
			continue
		}
		value, err := strconv.ParseFloat(line[i+1:], 64)
		if err != nil {
			return 0, fmt.Errorf("metrics: %q: %w", line, err)
		}
		sum, found = sum+value, true
	}
	if !found {
		return 0, fmt.Errorf("metrics: no series begins with %s", prefix)
	}
	return sum, nil
}
