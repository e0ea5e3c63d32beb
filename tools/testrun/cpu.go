package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	// sampleInterval bounds the processor time of a package that a sampler misses. A program that
	// measures exactly, for -exec of go test, would disable go's cache of results.
	sampleInterval = 500 * time.Millisecond
	// ticksPerSecond is the unit of times in /proc/PID/stat: Linux has one for all architectures.
	ticksPerSecond = 100
)

// sampler measures the processor time of the test programs of a go command, with the processes that
// they start. Without /proc it finds none.
type sampler struct {
	proc      string // the directory of processes
	goCommand int    // its process id
	programs  map[int]*testProgram
}

// testProgram is a running or ended test program.
type testProgram struct {
	dir   string // in which go test started it: that of the package
	ticks int
}

// run samples until stop is closed.
func (s *sampler) run(stop <-chan struct{}) {
	ticker := time.NewTicker(sampleInterval)
	defer ticker.Stop()
	for {
		s.sample()
		select {
		case <-ticker.C:
		case <-stop:
			return
		}
	}
}

// sample adds up the time of each test program and its descendants. A sum never exceeds the true
// one, which never decreases.
func (s *sampler) sample() {
	all := readProcesses(s.proc)
	sums := map[int]int{}
	for pid, p := range all {
		for at := pid; at != 0; at = all[at].parent {
			if all[at].parent == s.goCommand {
				sums[at] += p.ticks
				break
			}
		}
	}
	for pid, ticks := range sums {
		if s.programs[pid] == nil {
			dir := filepath.Join(s.proc, strconv.Itoa(pid))
			exe, err := os.Readlink(filepath.Join(dir, "exe"))
			if err != nil || !strings.HasSuffix(exe, ".test") {
				continue // a compiler or a linker, or it has ended
			}
			cwd, err := os.Readlink(filepath.Join(dir, "cwd"))
			if err != nil {
				continue
			}
			s.programs[pid] = &testProgram{dir: cwd}
		}
		s.programs[pid].ticks = max(s.programs[pid].ticks, ticks)
	}
}

// seconds returns the processor time of the test program that ran in a directory, or 0.
func (s *sampler) seconds(dir string) (sum float64) {
	for _, p := range s.programs {
		if p.dir == dir {
			sum += float64(p.ticks) / ticksPerSecond
		}
	}
	return sum
}

// runningProcess is a process in /proc.
type runningProcess struct {
	parent int
	ticks  int // user and system time of the process and of its ended children
}

// readProcesses reads parents before their children, which have larger numbers: a process that ends
// meanwhile may be missing, but is never counted twice.
func readProcesses(proc string) map[int]runningProcess {
	entries, _ := os.ReadDir(proc)
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	all := map[int]runningProcess{}
	for _, pid := range pids {
		text, err := os.ReadFile(filepath.Join(proc, strconv.Itoa(pid), "stat"))
		if err != nil {
			continue
		}
		// The name of the command, in parentheses, may have any character. See proc(5) for the
		// fields.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		const state, parent, userTime, times = 3, 4, 14, 4
		if len(fields) <= userTime-state+times {
			continue
		}
		number := func(field int) int {
			n, _ := strconv.Atoi(string(fields[field-state]))
			return n
		}
		p := runningProcess{parent: number(parent)}
		for i := range times {
			p.ticks += number(userTime + i)
		}
		all[pid] = p
	}
	return all
}
