package main

import (
	"fmt"
	"image/color"
	"io"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// share is a figure as a share of that of the reference (bound.go): below 1 is better.
type share struct {
	label  string
	first  float64 // of the first engine
	limit  float64 // 0 if the limit was not measured
	wanted float64 // by the row's bound on the ratio to the reference; 0 if there is none
}

// shares returns the rows with a bound of which the reference has a value too, in the order of the
// table. Rates are inverted, so that less is better everywhere; counts, percentages and zeros,
// which have no logarithm, are left out.
func (r *Report) shares() (all []share) {
	for _, result := range r.Results {
		for _, row := range result.Rows {
			own, other, limit := row.Values[r.Engines[0]], row.Values[reference(row.Values)], row.Values["limit"]
			if own <= 0 || other <= 0 || row.Unit == Count || row.Unit == Percent || !r.figure(result, row) {
				continue
			}
			s := share{label: result.Name + ": " + row.Name, first: own / other, limit: limit / other}
			for _, bound := range result.Wanted {
				if bound.Measure == row.Name && bound.Of == upstreamEngine {
					s.wanted = max(bound.AtMost, bound.AtLeast)
				}
			}
			if row.Unit == PerSecond {
				s = share{label: s.label + ", inverted", first: invert(s.first), limit: invert(s.limit), wanted: invert(s.wanted)}
			}
			all = append(all, s)
		}
	}
	return all
}

// invert returns the reciprocal, 0 of 0.
func invert(v float64) float64 {
	if v == 0 {
		return 0
	}
	return 1 / v
}

// WriteSVG plots the figures with a bound as shares of those of a stock kube-apiserver, or of
// upstream if none was measured, on a logarithmic scale. An error if there are none.
func (r *Report) WriteSVG(w io.Writer) error {
	of := upstreamEngine
	if slices.Contains(r.Engines, stockEngine) {
		of = stockEngine
	}
	all := r.shares()
	if len(all) == 0 {
		return fmt.Errorf("no figure with a bound was measured on %s and on %s", r.Engines[0], of)
	}
	p := plot.New()
	p.X.Label.Text = "share of " + of + "'s time, CPU or memory (logarithmic; left of 1 is better)"
	p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	p.Legend.Top = true
	p.Legend.Padding = vg.Millimeter
	p.Add(plotter.NewGrid())

	labels := make([]string, len(all)) // from the bottom
	for i, s := range all {
		labels[len(all)-1-i] = s.label
	}
	series := []struct {
		name  string
		value func(share) float64
		glyph draw.GlyphStyle
	}{
		{r.Engines[0], func(s share) float64 { return s.first }, draw.GlyphStyle{Shape: draw.CircleGlyph{}, Radius: 4, Color: color.RGBA{R: 0x1f, G: 0x77, B: 0xb4, A: 0xff}}},
		{"limit", func(s share) float64 { return s.limit }, draw.GlyphStyle{Shape: draw.PlusGlyph{}, Radius: 4, Color: color.RGBA{R: 0x2c, G: 0xa0, B: 0x2c, A: 0xff}}},
		{"wanted", func(s share) float64 { return s.wanted }, draw.GlyphStyle{Shape: draw.RingGlyph{}, Radius: 3, Color: color.Gray{Y: 0x80}}},
	}
	for _, one := range series {
		var points plotter.XYs
		for i, s := range all {
			if x := one.value(s); x > 0 {
				points = append(points, plotter.XY{X: x, Y: float64(len(all) - 1 - i)})
			}
		}
		if len(points) == 0 {
			continue
		}
		scatter, err := plotter.NewScatter(points)
		if err != nil {
			return fmt.Errorf("plot %s: %w", one.name, err)
		}
		scatter.GlyphStyle = one.glyph
		p.Add(scatter)
		p.Legend.Add(one.name, scatter)
	}
	one, err := plotter.NewLine(plotter.XYs{{X: 1, Y: -0.5}, {X: 1, Y: float64(len(all)) - 0.5}})
	if err != nil {
		return fmt.Errorf("plot %s: %w", of, err)
	}
	one.Color = color.RGBA{R: 0xd6, G: 0x27, B: 0x28, A: 0xff}
	p.Add(one)
	p.Legend.Add(of, one)
	p.NominalY(labels...)
	const width, perRow, around = 28 * vg.Centimeter, 0.55 * vg.Centimeter, 3 * vg.Centimeter
	svg, err := p.WriterTo(width, around+vg.Length(len(all))*perRow, "svg")
	if err != nil {
		return fmt.Errorf("plot: %w", err)
	}
	_, err = svg.WriteTo(w)
	return err
}
