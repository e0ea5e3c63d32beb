package main

import (
	"fmt"
	"strconv"
)

// Unit is the unit in which a quantity is shown.
type Unit string

// The units. In JSON a quantity is a number in the unit named.
const (
	Seconds   Unit = "s"
	Bytes     Unit = "B"
	Count     Unit = ""
	PerSecond Unit = "/s"
	Percent   Unit = "%"
)

// Format shows a quantity with two or three significant digits and a prefix that suits its size
// (decimal, also for bytes).
func (u Unit) Format(v float64) string {
	switch u {
	case Seconds:
		switch {
		case v == 0:
			return "0 s"
		case v < 0.000_999_5:
			return digits(v*1e6) + " µs"
		case v < 0.999_5:
			return digits(v*1e3) + " ms"
		}
		return digits(v) + " s"
	case Bytes:
		switch {
		case v < 999.5:
			return grouped(int(v+0.5)) + " B"
		case v < 999.5e3:
			return digits(v/1e3) + " kB"
		case v < 999.5e6:
			return digits(v/1e6) + " MB"
		}
		return digits(v/1e9) + " GB"
	case PerSecond:
		return digits(v) + "/s"
	case Percent:
		return digits(v) + " %"
	}
	return digits(v)
}

// digits shows two or three significant digits, and all digits of the integer part.
func digits(v float64) string {
	switch {
	case v >= 99.95:
		return grouped(int(v + 0.5))
	case v >= 9.995:
		return strconv.FormatFloat(v, 'f', 1, 64)
	case v >= 0.0995 || v == 0:
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return strconv.FormatFloat(v, 'f', 3, 64)
}

// grouped shows an integer with a comma before each third digit.
func grouped(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%s,%03d", grouped(n/1000), n%1000)
}
