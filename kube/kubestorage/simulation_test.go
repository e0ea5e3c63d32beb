package kubestorage_test

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
)

const simSteps = 1000

// TestSimulation_Seeds_Hold runs servers on a simulated etcd: their clients read, write and watch
// while faults happen, in an order that only the seed decides. STRATA_TEST_SIMULATIONS is the
// number of seeds.
func TestSimulation_Seeds_Hold(t *testing.T) {
	prepare(t)
	seed, runs := testseed.New(t), 20
	if text := os.Getenv("STRATA_TEST_SIMULATIONS"); text != "" {
		var err error
		if runs, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex // of the next lines
	next, steps, count := 0, 0, simCount{}
	t.Run("seeds", func(seeds *testing.T) {
		for i := range runtime.GOMAXPROCS(0) {
			seeds.Run(strconv.Itoa(i), func(t *testing.T) {
				t.Parallel()
				for !seeds.Failed() {
					mu.Lock()
					run := next
					next++
					mu.Unlock()
					if run >= runs {
						return
					}
					ops := simOps(seed+uint64(run), simSteps)
					h := holds(t, seed+uint64(run), ops)
					mu.Lock()
					steps += len(ops)
					count.add(h)
					mu.Unlock()
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	t.Logf("%d runs, %d steps; %v", runs, steps, count)
	if runs < 20 {
		return // one run need not have each kind
	}
	for _, kind := range []string{"create", "update", "delete", "get", "list", "get by HTTP", "list by HTTP", "watch", "watch by HTTP", "next page", "event", "bookmark", "restore", "answer of the replica", "event of the replica"} {
		if count[kind] == 0 {
			t.Errorf("no run has a %s", kind)
		}
	}
}

// holds makes a run. If it fails, the test does, with the steps that suffice.
func holds(t *testing.T, seed uint64, ops []simOp) *simHistory {
	h := simulate(t, seed, ops, false)
	if wrong := h.judge(); len(wrong) > 0 {
		t.Logf("seed %d has %d findings, the first of which is %s", seed, len(wrong), wrong[0])
		if testing.Short() {
			t.Fatalf("repeat it without -short, and it is reduced")
		}
		least := minimal(t, seed, ops)
		t.Errorf("%s\n%d steps suffice; keep them as a file of %s:\n%s", simulate(t, seed, least, false).judge(), len(least),
			keptRuns, formatRun(seed, least))
	}
	return h
}

// simCount counts what histories have.
type simCount map[string]int

func (c simCount) add(h *simHistory) {
	for _, r := range h.Records {
		kind := r.Verb
		switch {
		case r.Err != "":
			kind += ": " + r.Err
		case r.HTTP:
			kind += " by HTTP"
		}
		c[kind]++
		if r.Err != "" {
			continue
		}
		if r.From != nil {
			c["next page"]++
		}
		if r.Server == simReplica {
			c["answer of the replica"]++
		}
	}
	for _, w := range h.Watches {
		kind := "watch"
		switch {
		case w.Err != "":
			kind += ": " + w.Err
		case w.HTTP:
			kind += " by HTTP"
		}
		c[kind]++
		for _, e := range w.Events {
			if e.Type == watch.Bookmark {
				c["bookmark"]++
			} else {
				c["event"]++
				if w.Server == simReplica {
					c["event of the replica"]++
				}
			}
		}
	}
	c["restore"] += len(h.Lineages) - 1
}

// minimal removes steps as long as the run still fails.
func minimal(t *testing.T, seed uint64, ops []simOp) []simOp {
	for size := len(ops) / 2; size > 0; size /= 2 {
		for at := 0; at+size <= len(ops); {
			fewer := slices.Delete(slices.Clone(ops), at, at+size)
			if len(simulate(t, seed, fewer, false).judge()) > 0 {
				ops = fewer
			} else {
				at += size
			}
		}
	}
	return ops
}

// keptRuns is the directory of runs that have failed, or fail with a planted bug.
const keptRuns = "testdata/simulation"

// formatRun is the seed of a run, and a line for each step.
func formatRun(seed uint64, ops []simOp) string {
	text := fmt.Sprintln(seed)
	for _, op := range ops {
		text += fmt.Sprintln(op.Do, op.Seed)
	}
	return text
}

func parseRun(text string) (seed uint64, ops []simOp, err error) {
	first, steps, _ := strings.Cut(text, "\n")
	if seed, err = strconv.ParseUint(first, 10, 64); err != nil {
		return 0, nil, err
	}
	for line := range strings.Lines(steps) {
		var name string
		var op simOp
		if _, err := fmt.Sscan(line, &name, &op.Seed); err != nil {
			return 0, nil, fmt.Errorf("%q: %w", line, err)
		}
		if op.Do = simAction(slices.Index(actionNames[:], name)); op.Do < 0 {
			return 0, nil, fmt.Errorf("no action is named %q", name)
		}
		ops = append(ops, op)
	}
	return seed, ops, nil
}

// TestParseRun_Formatted_IsTheRun: kept runs name their actions, so that another action in the list
// changes none.
func TestParseRun_Formatted_IsTheRun(t *testing.T) {
	ops := simOps(1, simSteps)
	seed, parsed, err := parseRun(formatRun(7, ops))
	if err != nil || seed != 7 || !slices.Equal(parsed, ops) {
		t.Fatalf("seed %d, %d steps, %v", seed, len(parsed), err)
	}
	for _, text := range []string{"", "x\n", "1\nwrite\n", "1\nwrites 3\n", "1\n0 3\n"} {
		if _, _, err := parseRun(text); err == nil {
			t.Errorf("%q is parsed", text)
		}
	}
}

// TestSimulation_KeptRuns_Hold repeats the runs of keptRuns.
func TestSimulation_KeptRuns_Hold(t *testing.T) {
	prepare(t)
	files, err := filepath.Glob(keptRuns + "/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			testcheck.NoError(t, err)
			seed, ops, err := parseRun(string(text))
			testcheck.NoError(t, err)
			for _, wrong := range simulate(t, seed, ops, false).judge() {
				t.Error(wrong)
			}
		})
	}
}

// TestSimulation_JudgeOfWrongAnswer_FindsIt adds an answer to the history of a run, or changes one.
func TestSimulation_JudgeOfWrongAnswer_FindsIt(t *testing.T) {
	prepare(t)
	h := simulate(t, 1, simOps(1, 100), false)
	now := h.Lineages[len(h.Lineages)-1].last
	// At the end, objects of this name are there, of another one are not.
	const there, absent = "ns0/last0", "ns0/none"
	held := int64(0)
	for _, r := range h.Records {
		if r.Key == there {
			held = r.Rev
		}
	}
	var final *simWatch
	for _, w := range h.Watches {
		if w.Final {
			final = w
		}
	}
	for name, c := range map[string]struct {
		r     *simRecord
		right bool
	}{
		"final list refused":                   {&simRecord{Verb: "list", Err: "unavailable", Final: true}, false},
		"list refused":                         {&simRecord{Verb: "list", Err: "unavailable"}, true},
		"exists, absent":                       {&simRecord{Verb: "create", Key: absent, Err: "exists"}, false},
		"exists":                               {&simRecord{Verb: "create", Key: there, Err: "exists"}, true},
		"update not found, there":              {&simRecord{Verb: "update", Key: there, Err: "not found"}, false},
		"update not found":                     {&simRecord{Verb: "update", Key: absent, Err: "not found"}, true},
		"deletion not found, there":            {&simRecord{Verb: "delete", Key: there, Err: "not found"}, false},
		"conflict with its own revision":       {&simRecord{Verb: "update", Key: there, Err: "conflict", Precondition: held}, false},
		"conflict":                             {&simRecord{Verb: "update", Key: there, Err: "conflict", Precondition: held - 1}, true},
		"conflict, absent":                     {&simRecord{Verb: "delete", Key: absent, Err: "conflict", Precondition: held}, false},
		"conflict without a precondition":      {&simRecord{Verb: "delete", Key: there, Err: "conflict"}, false},
		"created, and not in etcd":             {&simRecord{Verb: "create", Key: absent, Seq: -2, Rev: now}, false},
		"deleted, and still there":             {&simRecord{Verb: "delete", Key: there, Rev: held + 1}, false},
		"get of the future, not found":         {&simRecord{Verb: "get", Key: absent, RV: fmt.Sprint(now + 9), Err: "not found"}, false},
		"list of the newest revision, expired": {&simRecord{Verb: "list", RV: fmt.Sprint(now), Err: "expired"}, false},
		"list of no revision, expired":         {&simRecord{Verb: "list", Err: "expired"}, false},
		"list of a published revision, late":   {&simRecord{Verb: "list", RV: fmt.Sprint(now), Floor: now, Err: "too large"}, false},
	} {
		c.r.Began, c.r.Ended = now, now
		c.r.Done.Store(true)
		more := *h
		more.Records = append(slices.Clone(h.Records), c.r)
		if wrong := more.judge(); len(wrong) > 0 == c.right {
			t.Errorf("%s: the judge finds %q", name, wrong)
		}
	}
	deleted := *h
	deleted.Records = slices.DeleteFunc(slices.Clone(h.Records), func(r *simRecord) bool { return r.Verb == "delete" && r.Err == "" })
	if wrong := deleted.judge(); len(deleted.Records) == len(h.Records) || len(wrong) == 0 {
		t.Error("the judge finds no deletion that was not reported")
	}
	final.Live = false
	if len(h.judge()) == 0 {
		t.Error("the judge allows that a final watch ends")
	}
	final.Live, final.Err, final.Ended = true, "expired", now
	if len(h.judge()) == 0 {
		t.Error("the judge allows that a watch of the newest revision expires")
	}
}

// TestSimulation_SameSeed_SameHistory: a run is its seed, except that goroutines which wake at the
// same time ask etcd in any order. Two runs of about 4 of 100 seeds show that, more on a busy
// machine; two of ten runs are equal, and the first two of most seeds.
func TestSimulation_SameSeed_SameHistory(t *testing.T) {
	prepare(t)
	const seeds, most = 30, 1
	seed := testseed.New(t)
	var differ []string
	again := 0 // seeds whose first two runs differ
	for i := range uint64(seeds) {
		ops, difference := simOps(seed+i, simSteps), "no run"
		runs := []string{simulate(t, seed+i, ops, true).text()}
		for len(runs) < 10 && difference != "" {
			text := simulate(t, seed+i, ops, true).text()
			if difference = firstDifference(runs[0], text); slices.Contains(runs, text) {
				difference = ""
			}
			runs = append(runs, text)
		}
		if len(runs) > 2 {
			again++
		}
		if difference != "" {
			differ = append(differ, fmt.Sprintf("seed %d:\n%s", seed+i, difference))
		}
	}
	if again > seeds/2 {
		t.Errorf("the first two runs of %d of %d seeds differ", again, seeds)
	}
	if len(differ) > most {
		t.Fatalf("ten runs of %d of %d seeds differ:\n%s", len(differ), seeds, strings.Join(differ, ""))
	}
}

// firstDifference returns the first lines of two texts that differ.
func firstDifference(a, b string) string {
	other := strings.Split(b, "\n")
	for i, line := range strings.Split(a, "\n") {
		if i >= len(other) || line != other[i] {
			return line + "\n" + other[min(i, len(other)-1)] + "\n"
		}
	}
	return ""
}

// prepare discards the log of klog, which has a line for each slow read, and makes garbage
// collections rare, until the test's end.
func prepare(t *testing.T) {
	if testrace.Enabled {
		// 1 of 5 runs ends with SIGSEGV where synctest runs the timers of a bubble (Go 1.26.8).
		t.Skip("the race detector crashes after some 100,000 timers of a bubble")
	}
	// Traces of panics have labels until the process ends, as it may by a panic of any goroutine.
	testcheck.NoError(t, os.Setenv("GODEBUG", os.Getenv("GODEBUG")+",tracebacklabels=1"))
	before := klog.CaptureState()
	t.Cleanup(before.Restore)
	memory := debug.SetGCPercent(400) // saves a quarter of the time
	t.Cleanup(func() { debug.SetGCPercent(memory) })
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
}
