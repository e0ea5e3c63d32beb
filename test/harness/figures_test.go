package harness

import (
	"fmt"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		values []float64
		want   float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 4}, 4}, {[]float64{8, 1, 2, 4}, 3}} {
		if got := Median(c.values); got != c.want {
			t.Errorf("median of %v: %v, want %v", c.values, got, c.want)
		}
	}
}

func TestPhases_OrderChangesFromPairToPair(t *testing.T) {
	got := ""
	for pair, second := range Phases(3) {
		got += fmt.Sprintf("%d%t ", pair, second)
	}
	if want := "0false 0true 1true 1false 2false 2true "; got != want {
		t.Errorf("phases %s, want %s", got, want)
	}
}

func TestFigures_AreMarkdown(t *testing.T) {
	f := NewFigures("one", "two")
	f.Row("writes", "1", "2")
	if want := "| | one | two |\n| --- | ---: | ---: |\n| writes | 1 | 2 |\n"; f.String() != want {
		t.Errorf("table\n%swant\n%s", f, want)
	}
}
