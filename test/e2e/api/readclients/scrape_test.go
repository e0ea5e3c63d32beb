package readclients

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/stratakube/strata/test/harness"
)

// sample is the value of one time series of a server at one time. A histogram has two samples, with
// _count and _sum added to its name.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

// String returns the name and the labels as Prometheus writes them, with label names sorted.
func (s sample) String() string {
	var pairs []string
	for name, value := range s.labels {
		pairs = append(pairs, fmt.Sprintf("%s=%q", name, value))
	}
	slices.Sort(pairs)
	return s.name + "{" + strings.Join(pairs, ",") + "}"
}

// scrape reads the metrics with these names.
func scrape(ctx context.Context, api *harness.API, names ...string) ([]sample, error) {
	r, err := api.DoAs(ctx, http.MethodGet, "/metrics", url.Values{"name[]": names}.Encode(), "", "text/plain", nil)
	if err != nil {
		return nil, err
	}
	if r.Code != http.StatusOK {
		return nil, r.Err()
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(r.Body))
	if err != nil {
		return nil, fmt.Errorf("parse the metrics: %w", err)
	}
	var samples []sample
	for _, name := range names {
		for _, metric := range families[name].GetMetric() { // missing until the first count
			labels := map[string]string{}
			for _, pair := range metric.GetLabel() {
				labels[pair.GetName()] = pair.GetValue()
			}
			switch {
			case metric.Counter != nil:
				samples = append(samples, sample{name, labels, metric.Counter.GetValue()})
			case metric.Gauge != nil:
				samples = append(samples, sample{name, labels, metric.Gauge.GetValue()})
			case metric.Histogram != nil:
				samples = append(samples,
					sample{name + "_count", labels, float64(metric.Histogram.GetSampleCount())},
					sample{name + "_sum", labels, metric.Histogram.GetSampleSum()})
			}
		}
	}
	return samples, nil
}

// since returns the increase of each sample since before, without samples that have not increased.
func since(before, after []sample) []sample {
	was := map[string]float64{}
	for _, s := range before {
		was[s.String()] = s.value
	}
	var grown []sample
	for _, s := range after {
		if s.value -= was[s.String()]; s.value != 0 {
			grown = append(grown, s)
		}
	}
	return grown
}

// total adds up the samples with these labels.
func total(samples []sample, labels map[string]string) float64 {
	sum := 0.0
	for _, s := range samples {
		matches := true
		for name, value := range labels {
			matches = matches && s.labels[name] == value
		}
		if matches {
			sum += s.value
		}
	}
	return sum
}
