package main

import (
	"fmt"
	"math"
	"strings"
)

// Bound is a bound on one measure of a workload: on the value of the first engine, or on its ratio
// to that of another.
type Bound struct {
	Measure string // the name of the row
	// label of the engine it is divided by, upstream's for stock too; "" means the value itself
	Of      string
	AtMost  float64 // 0 if there is only AtLeast
	AtLeast float64 // if both are 0, the value is to be 0
}

// toUpstream, absolute and none are the bounds that most workloads have.
func toUpstream(measure string, atMost float64) Bound {
	return Bound{Measure: measure, Of: upstreamEngine, AtMost: atMost}
}

func absolute(measure string, atMost float64) Bound { return Bound{Measure: measure, AtMost: atMost} }

func none(measure string) Bound { return Bound{Measure: measure} }

// isNone reports whether the value has to be 0.
func (b Bound) isNone() bool { return b.AtMost == 0 && b.AtLeast == 0 }

// reference returns the label of the engine that a bound on a ratio to upstream refers to: a stock
// kube-apiserver where the values have one of it, else upstream.
func reference(values map[string]float64) string {
	if _, measured := values[stockEngine]; measured {
		return stockEngine
	}
	return upstreamEngine
}

// divisor returns the label of the engine whose value divides that of the first engine; "" if none
// does.
func (b Bound) divisor(values map[string]float64) string {
	if b.Of == upstreamEngine {
		return reference(values)
	}
	return b.Of
}

// text formats the bound on a row, for example "≤ 1/8 × upstream".
func (b Bound) text(row Row) string {
	if b.isNone() {
		return "0"
	}
	sign, value := "≤", b.AtMost
	if value == 0 {
		sign, value = "≥", b.AtLeast
	}
	if b.Of == "" {
		return sign + " " + row.Unit.Format(value)
	}
	factor := fmt.Sprintf("%.3g", value)
	if inverse := 1 / value; value < 1 && math.Abs(inverse-math.Round(inverse)) < 1e-9 {
		factor = fmt.Sprintf("1/%.0f", inverse)
	}
	return sign + " " + factor + " × " + b.divisor(row.Values)
}

// holds reports whether the values of a row, by engine, meet the bound; known is false if one is
// missing.
func (b Bound) holds(values map[string]float64, engine string) (holds, known bool) {
	value, known := values[engine]
	if b.Of != "" {
		other, ok := values[b.divisor(values)]
		if !ok || other == 0 {
			return false, false
		}
		value /= other
	}
	if b.isNone() {
		return value == 0, known
	}
	if b.AtMost != 0 {
		return value <= b.AtMost, known
	}
	return value >= b.AtLeast, known
}

// wanted is the cell with the bounds of a row and the verdict, for example "≤ 1.6 × upstream: yes".
// Timings of a quick run are not meaningful, so for those it has no verdict.
func wanted(bounds []Bound, row Row, engine string, quick bool) string {
	var b strings.Builder
	for _, bound := range bounds {
		if bound.Measure != row.Name {
			continue
		}
		if b.Len() > 0 {
			b.WriteString("; ")
		}
		b.WriteString(bound.text(row))
		if holds, known := bound.holds(row.Values, engine); known && !quick {
			b.WriteString(map[bool]string{true: ": yes", false: ": NO"}[holds])
		}
	}
	return b.String()
}
