package robustness

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/validate"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest"

	"github.com/stratakube/strata/mirror/driver"
)

// validateTimeout bounds the search for a linearization; 10,000 operations take about a second.
const validateTimeout = 5 * time.Minute

// TestMirror_PassesEtcdValidators runs etcd's validators on reads and watches of a mirror, beside
// writes, compactions and interruptions of its feed.
func TestMirror_PassesEtcdValidators(t *testing.T) { requireRobust(t, 10_000) }

// TestMirror_PassesEtcdValidators_LongHistory is TestMirror_PassesEtcdValidators with 100,000
// operations, in histories of 20,000: time and memory of the search for a linearization are
// quadratic in the length of a history. One history of 100,000 takes 3 minutes and 7 GB.
func TestMirror_PassesEtcdValidators_LongHistory(t *testing.T) {
	for i := range 5 {
		t.Run(strconv.Itoa(i), func(t *testing.T) { requireRobust(t, 20_000) })
	}
}

func requireRobust(t *testing.T, operations int) {
	started := time.Now()
	h := record(t, operations, nil)
	t.Logf("%d operations in %.1f s: %d requests that wrote; %v", operations, time.Since(started).Seconds(), h.writes, h.counts)

	// None of the validators' parts may pass for lack of input.
	few := operations / 100
	for what, n := range map[string]int{
		"writes": h.writes, "latest reads": h.counts.present, "reads of a revision": h.counts.past,
		"events": h.counts.events, "events in the revision of the event before": h.counts.atomic, "progress notifications": h.counts.marks,
	} {
		if n < few {
			t.Errorf("%d %s, want at least %d", n, what, few)
		}
	}
	if h.counts.resumed < 5 {
		t.Errorf("%d watches resumed, want at least 5", h.counts.resumed)
	}

	started = time.Now()
	lg := zaptest.NewLogger(t, zaptest.Level(zapcore.ErrorLevel))
	result := validate.ValidateAndReturnVisualize(lg, validate.Config{}, h.reports, h.persisted, validateTimeout)
	for part, r := range map[string]validate.Result{
		"assumptions": result.Assumptions, "linearization": result.Linearization.Result, "watch": result.Watch, "serializable": result.Serializable,
	} {
		if r.Status != validate.Success { // the empty status means that a part was skipped
			t.Errorf("%s: %q %s", part, r.Status, r.Message)
		}
	}
	t.Logf("validated in %.1f s", time.Since(started).Seconds())
}

// defect is a fault that is planted between the mirror and the record, or between etcd and the
// mirror.
type defect struct {
	name   string
	found  string // part of the validators' error
	kind   kind
	events func([]*clientv3.Event) []*clientv3.Event // changes an answer of a watch
	feed   func(driver.Batch) driver.Batch           // changes the batches that the mirror receives
}

// kind is a defect of a reader.
type kind int

const (
	_ kind = iota
	readsWithoutWait
	readsRevisionBefore
	startsOneLate
	announcesProgress
	splitsRevisions
)

func (d *defect) is(k kind) bool { return d != nil && d.kind == k }

// sometimes changes one of ten answers that are long enough.
func sometimes(least int, change func([]*clientv3.Event) []*clientv3.Event) func([]*clientv3.Event) []*clientv3.Event {
	return func(events []*clientv3.Event) []*clientv3.Event {
		if len(events) < least || rand.IntN(10) > 0 {
			return events
		}
		return change(events)
	}
}

var defects = []defect{
	{name: "a key whose changes the feed loses", found: "linearization: Failure: illegal", feed: func(b driver.Batch) driver.Batch {
		b.Changes = slices.DeleteFunc(slices.Clone(b.Changes), func(c driver.Change) bool { return string(c.Key) == keys[0] })
		return b
	}},
	{name: "latest reads that do not wait for their revision", found: "linearization: Failure: illegal", kind: readsWithoutWait,
		feed: func(b driver.Batch) driver.Batch {
			time.Sleep(5 * time.Millisecond) // the lag that the read has to wait out
			return b
		}},
	{name: "reads of the revision before", found: "serializable: Failure: response didn't match", kind: readsRevisionBefore},
	{name: "watches that begin one revision late", found: "watch: Failure: broke Resumable", kind: startsOneLate},
	{name: "progress that sets the published revision", found: "watch: Failure: broke Bookmarkable", kind: announcesProgress},
	{name: "revisions that are split", found: "watch: Failure: broke Atomic", kind: splitsRevisions},
	{name: "events that are lost", found: "watch: Failure: broke Reliable", events: sometimes(2, func(events []*clientv3.Event) []*clientv3.Event {
		return events[:len(events)-1]
	})},
	{name: "events that are repeated", found: "watch: Failure: broke Unique", events: sometimes(1, func(events []*clientv3.Event) []*clientv3.Event {
		return append(events, events[len(events)-1])
	})},
	{name: "events out of order", found: "watch: Failure: broke Ordered", events: sometimes(2, func(events []*clientv3.Event) []*clientv3.Event {
		slices.Reverse(events)
		return events
	})},
	{name: "wrong previous values", found: "watch: Failure: incorrect event prevValue", events: sometimes(1, func(events []*clientv3.Event) []*clientv3.Event {
		for _, e := range events {
			if e.PrevKv != nil {
				e.PrevKv.Version++
			}
		}
		return events
	})},
}

// TestEtcdValidators_DetectPlantedDefects proves that the validators check the recorded operations.
func TestEtcdValidators_DetectPlantedDefects(t *testing.T) {
	for _, d := range defects {
		t.Run(d.name, func(t *testing.T) {
			h := record(t, 1500, &d)
			var result validate.RobustnessResult
			withoutOutput(t, func() {
				result = validate.ValidateAndReturnVisualize(zap.NewNop(), validate.Config{}, h.reports, h.persisted, time.Minute)
			})
			if err := result.Error(); err == nil || !strings.Contains(err.Error(), d.found) {
				t.Errorf("the validators' error is %v, want %q (%v)", err, d.found, h.counts)
			}
		})
	}
}

// withoutOutput calls f without standard output, where the validators print the events that a watch
// lacks.
func withoutOutput(t *testing.T, f func()) {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	defer func(stdout *os.File) { os.Stdout = stdout }(os.Stdout)
	os.Stdout = null
	f()
}
