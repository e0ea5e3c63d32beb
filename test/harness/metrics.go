package harness

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Metric returns the sum of all series of /metrics whose text begins with prefix, as in
// `name{label="value"`, with the whole name. It returns an error if there is none.
func (a *API) Metric(ctx context.Context, prefix string) (float64, error) {
	name, _, _ := strings.Cut(prefix, "{")
	sum, found, err := a.sum(ctx, name, func(series string) bool { return strings.HasPrefix(series, prefix) })
	if err == nil && !found {
		err = fmt.Errorf("metrics: no series begins with %s", prefix)
	}
	return sum, err
}

// Sum returns the sum of the series of a metric that have all of the labels, as in `label="value"`;
// 0 if there is none.
func (a *API) Sum(ctx context.Context, metric string, labels ...string) (float64, error) {
	sum, _, err := a.sum(ctx, metric, func(series string) bool {
		name, rest, _ := strings.Cut(series, "{")
		return name == metric && !slices.ContainsFunc(labels, func(label string) bool { return !strings.Contains(rest, label) })
	})
	return sum, err
}

// AwaitHistory returns when the server has restored the history of before its start. Until then it
// is ready, and reads the past from etcd.
func (a *API) AwaitHistory(ctx context.Context) error {
	return Poll(ctx, func(ctx context.Context) (bool, error) {
		n, err := a.Metric(ctx, "strata_mirror_restoring")
		if err == nil && n > 0 {
			err = fmt.Errorf("%v restores of history are running or queued", n)
		}
		return err == nil, err
	})
}

// sum returns the sum of the matching series of one metric.
func (a *API) sum(ctx context.Context, name string, match func(series string) bool) (sum float64, found bool, err error) {
	r, err := a.DoAs(ctx, http.MethodGet, "/metrics", namesOf(name).Encode(), "", "text/plain", nil)
	if err != nil {
		return 0, false, err
	}
	if r.Code != http.StatusOK {
		return 0, false, fmt.Errorf("metrics: %w", r.Err())
	}
	return sumSeries(r.Body, match)
}

// namesOf returns the query of /metrics for the metric of a series: all metrics are 2 MB. A
// histogram's series have suffixes that the query must not have, and a counter's name may end like
// them. A server that does not know the query returns all metrics.
func namesOf(series string) url.Values {
	names := url.Values{"name[]": {series}}
	for _, suffix := range []string{"_count", "_sum", "_bucket"} {
		if histogram, ok := strings.CutSuffix(series, suffix); ok {
			names.Add("name[]", histogram)
		}
	}
	return names
}

// Metric returns the sum of the series of etcd's /metrics whose text begins with prefix, as
// API.Metric does. The etcd serves plain TCP and has one member.
func (e *Etcd) Metric(ctx context.Context, prefix string) (float64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("metrics of etcd: %s", resp.Status)
	}
	if err != nil {
		return 0, err
	}
	sum, found, err := sumSeries(body, func(series string) bool { return strings.HasPrefix(series, prefix) })
	if err == nil && !found {
		err = fmt.Errorf("metrics of etcd: no series begins with %s", prefix)
	}
	return sum, err
}

// sumSeries returns the sum of the matching series of an exposition of metrics.
func sumSeries(exposition []byte, match func(series string) bool) (sum float64, found bool, err error) {
	lines := bufio.NewScanner(bytes.NewReader(exposition))
	lines.Buffer(nil, len(exposition)+1)
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
