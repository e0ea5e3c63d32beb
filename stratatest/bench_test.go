package stratatest

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// The benchmarks measure the time until a control plane is ready: docs/testing.md has the results.

// BenchmarkFirst starts the first control plane of a process, from the start of the strata program
// on.
func BenchmarkFirst(b *testing.B) {
	var times []time.Duration
	for b.Loop() {
		started := time.Now()
		g, err := startTestServer(b.Context(), nil)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := g.call(b.Context(), request{Start: &startRequest{}}); err != nil {
			b.Fatal(err)
		}
		times = append(times, time.Since(started))
		end(b, g)
	}
	report(b, times)
}

// BenchmarkFurther starts ten further control planes in a process, one after another: without a
// pause, and each half a second after the one before, in place of the test that uses it.
func BenchmarkFurther(b *testing.B) {
	for _, pause := range []time.Duration{0, 500 * time.Millisecond} {
		b.Run("pause="+pause.String(), func(b *testing.B) {
			var times []time.Duration
			for b.Loop() {
				g := first(b)
				for range 10 {
					time.Sleep(pause)
					started := time.Now()
					if _, err := g.call(b.Context(), request{Start: &startRequest{}}); err != nil {
						b.Fatal(err)
					}
					times = append(times, time.Since(started))
				}
				b.ReportMetric(memory(b, g), "MiB/11planes")
				end(b, g)
			}
			report(b, times)
		})
	}
}

// BenchmarkTenAtOnce starts ten further control planes in a process at the same time, and waits for
// all.
func BenchmarkTenAtOnce(b *testing.B) {
	var times []time.Duration
	for b.Loop() {
		g := first(b)
		started := time.Now()
		var starts sync.WaitGroup
		for range 10 {
			starts.Go(func() {
				if _, err := g.call(b.Context(), request{Start: &startRequest{}}); err != nil {
					b.Error(err)
				}
			})
		}
		starts.Wait()
		times = append(times, time.Since(started))
		end(b, g)
	}
	report(b, times)
}

func first(b *testing.B) *testServer {
	g, err := startTestServer(b.Context(), nil)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := g.call(b.Context(), request{Start: &startRequest{}}); err != nil {
		b.Fatal(err)
	}
	return g
}

// end ends a process as the end of the test process does.
func end(b *testing.B, g *testServer) {
	g.stdin.Close()
	if err := g.cmd.Wait(); err != nil {
		b.Error(err)
	}
}

var resident = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// memory returns the resident memory of the process in MiB, 0 where there is no /proc.
func memory(b *testing.B, g *testServer) float64 {
	text, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(g.cmd.Process.Pid), "status"))
	if err != nil {
		return 0
	}
	match := resident.FindSubmatch(text)
	if match == nil {
		b.Fatal("no VmRSS in /proc")
	}
	kib, err := strconv.ParseFloat(string(match[1]), 64)
	if err != nil {
		b.Fatal(err)
	}
	return kib / 1024
}

func report(b *testing.B, times []time.Duration) {
	slices.Sort(times)
	b.ReportMetric(times[len(times)/2].Seconds(), "s-median")
	b.ReportMetric(times[len(times)-1].Seconds(), "s-max")
	b.ReportMetric(0, "ns/op")
}
