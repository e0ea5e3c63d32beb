package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/bench/internal/target"
)

func TestKEP2340Table_FormatsMeasurements(t *testing.T) {
	run := func(lists int) []Observation {
		o := Observation{Latencies: slices.Repeat([]time.Duration{2 * time.Millisecond}, lists)}
		o.Figures = append(o.Figures, Figure{handled, PerSecond, float64(lists)})
		for _, name := range []string{serverCoresP50, serverCoresP90, serverCoresP99, etcdCoresP50, etcdCoresP90, etcdCoresP99} {
			o.Figures = append(o.Figures, Figure{name, Count, 0.25})
		}
		return []Observation{o}
	}
	r := &Report{Engines: []string{"strata", "upstream", "limit"}}
	engines := []target.EngineSpec{{Label: "strata", Engine: strataEngine}, {Label: "upstream", Engine: upstreamEngine}}
	for _, w := range slices.Concat(getWorkloads[:1], kepWorkloads, kepLargeWorkloads, kepDisabledWorkloads) {
		lists := 1
		if w.Name == "kep-baseline" {
			lists = 0
		}
		result := summarize(w, r.Engines, map[string][]Observation{"strata": run(lists), "upstream": run(lists)}, nil)
		result.Flags = w.flags(engines)
		r.Results = append(r.Results, result)
	}
	var b bytes.Buffer
	if err := r.WriteMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	const cores = " 0.25 | 0.25 | 0.25 | 0.25 | 0.25 | 0.25 |"
	for _, want := range []string{
		"| Baseline | strata | 0.00/s |" + cores + " - | - | - |  |\n|  | upstream | 0.00/s |" + cores + " - | - | - |  |\n| Enabled Large Objects | strata |",
		"| Disabled Large Objects | strata | 1.00/s |" + cores + " 2.00 ms | 2.00 ms | 2.00 ms | --strata-feature-gates=ConsistentListFromCache=false |\n",
		"|  | upstream | 1.00/s |" + cores + " 2.00 ms | 2.00 ms | 2.00 ms | --watch-cache-sizes=configmaps#0 |\n| Enabled Small Objects | strata |",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("%q is missing in\n%s", want, b.String())
		}
	}
	r.Results = r.Results[:1]
	if _, body := r.kepTable(); len(body) > 0 {
		t.Errorf("rows without a measurement: %q", body)
	}
}
