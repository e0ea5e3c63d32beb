package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	untilReadyz = "until /readyz"
	untilReady  = "until ready"
	// revisionsBehind is how far before the start a watch can begin.
	revisionsBehind = "revisions behind that a watch can begin"
	restoredLater   = "history is restored after ready by"
	longestWrite    = "longest write beside"
)

var startWorkloads = []Workload{
	{
		Name: "start", Title: "restart on a filled etcd, then rest", Dataset: configMaps, Alone: true,
		Run:    startLoad{rest: atRest}.run,
		Wanted: []Bound{toUpstream(untilReadyz, 0.35)},
	},
	{
		Name: "restore", Title: "start with a long history, values of 1 KB", Op: "start", Dataset: configMaps, Alone: true, Starts: true, Runs: 3,
		Run:    restoreLoad{history: size{200_000, 500}}.run,
		Wanted: []Bound{toUpstream(untilReady, 0.35), absolute(untilReady, 4), {Measure: revisionsBehind, AtLeast: 10_000}, absolute(restoredLater, 6), absolute(longestWrite, 0.1)},
	},
	{ // upstream's checker cannot be requested
		Name: "check", Title: "consistency check of all ConfigMaps", Op: "check", Dataset: onlyConfigMaps, Alone: true, Runs: 1,
		Run:    measureCheck,
		Wanted: []Bound{absolute("server CPU per check", 1), absolute(peakAbove, 30e6), absolute("etcd sent per check", 40e6)},
	},
}

// startLoad reports the start of the engine, which the runner started a moment ago after it had
// stopped its predecessor on the same etcd, and its memory at rest: when all is loaded and before
// the first LIST.
type startLoad struct{ rest span }

func (l startLoad) run(ctx context.Context, s *Sample) error {
	if err := s.rest(ctx, l.rest.at(s.Scale)); err != nil {
		return err
	}
	cpu, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return err
	}
	s.Report(untilReadyz, Seconds, s.Engine.Startup.Ready.Seconds())
	s.Report("until the first GET", Seconds, s.Engine.Startup.FirstGet.Seconds())
	s.Report("server CPU until then", Seconds, s.Engine.Startup.CPU.Seconds())
	s.Report("server CPU until at rest", Seconds, cpu.Seconds())
	s.Detail("at rest: after %v", l.rest.at(s.Scale))
	s.Report("resident at rest", Bytes, float64(memory.Resident))
	s.Report("peak memory of the start", Bytes, float64(memory.Peak))
	return nil
}

// measureCheck makes Strata compare memory with etcd, a few times.
func measureCheck(ctx context.Context, s *Sample) error {
	if s.Engine.Engine != strataEngine {
		return nil
	}
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(want))
	const checks = 5
	conns, err := s.opened(ctx, 1)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	return s.Measure(ctx, func(ctx context.Context) error {
		for range checks {
			began := time.Now()
			if err := checkOnce(ctx, conns[0], want, s.Body); err != nil {
				return err
			}
			s.Observe(time.Since(began))
		}
		return nil
	})
}

// checkOnce compares once, and requires that it finds no difference.
func checkOnce(ctx context.Context, conn *target.Conn, want int, body *bytes.Buffer) error {
	const path = "/debug/strata/consistency?resource=configmaps"
	if err := conn.Read(ctx, target.Request{Method: http.MethodPost, Path: path}, body); err != nil {
		return err
	}
	var answer struct {
		Items []struct {
			Status, Error string
			Keys          int
		}
	}
	if err := json.Unmarshal(body.Bytes(), &answer); err != nil {
		return fmt.Errorf("POST %s: %w", path, err)
	}
	if len(answer.Items) != 1 || answer.Items[0].Status != "success" || answer.Items[0].Keys != want {
		return fmt.Errorf("POST %s: %+v, want success with %d keys", path, answer.Items, want)
	}
	return nil
}

// restoreLoad starts an engine on an etcd with history behind its floor, while a write begins every
// 5 ms.
type restoreLoad struct{ history size } // revisions

const (
	// writeInterval is the time between two writes beside the start of an engine.
	writeInterval = 5 * time.Millisecond

	// restoredText is in the line that Strata logs when history is restored. The first of them is
	// the whole registry's.
	restoredText = "Restored history"

	// restoreLimit bounds the wait for that line, from the time at which the engine is ready.
	restoreLimit = time.Minute
)

// depths are the shares of the history of which a watch is tried, the deepest first. The first
// omits a part for concurrent writes, which the bounds of restored history count too.
var depths = []float64{0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01}

func (l restoreLoad) run(ctx context.Context, s *Sample) error {
	history := l.history.at(s.Scale)
	if err := makeHistory(ctx, s, history); err != nil {
		return err
	}
	if err := s.Etcd.ResetPeak(); err != nil {
		return err
	}
	before, err := s.Etcd.Memory()
	if err != nil {
		return err
	}
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	var longest time.Duration
	writing, stopWriting := context.WithCancel(ctx)
	var beside errgroup.Group
	beside.Go(func() (err error) {
		longest, err = l.write(writing, s)
		return err
	})
	defer func() { // unless something has failed, it has been waited for
		stopWriting()
		beside.Wait()
	}()

	engine, err := s.Start(ctx)
	if err != nil {
		return err
	}
	defer engine.Stop()
	depth, waited, err := deepestWatch(ctx, engine, revision, history)
	if err != nil {
		return err
	}
	watching := time.Since(engine.Startup.Began)
	restores := engine.Engine == strataEngine
	var restored time.Duration
	if restores {
		if restored, err = awaitRestored(ctx, s, engine); err != nil {
			return err
		}
	}
	stopWriting()
	if err := beside.Wait(); err != nil {
		return err
	}
	after, err := s.Etcd.Memory()
	if err != nil {
		return err
	}
	memory, err := engine.Memory()
	if err != nil {
		return err
	}
	s.Detail("%s revisions", grouped(history))
	s.Report(untilReady, Seconds, engine.Startup.Ready.Seconds())
	s.Report("server CPU until the first GET", Seconds, engine.Startup.CPU.Seconds())
	s.Report(revisionsBehind, Count, float64(depth))
	s.Report("its first event after", Seconds, waited.Seconds())
	s.Report("until this was known", Seconds, watching.Seconds())
	if restores {
		s.Report("until history is restored", Seconds, restored.Seconds())
		s.Report(restoredLater, Seconds, max(0, restored-engine.Startup.Ready).Seconds())
	}
	s.Report(longestWrite, Seconds, longest.Seconds())
	s.Report("resident afterwards", Bytes, float64(memory.Resident))
	s.Report("peak memory", Bytes, float64(memory.Peak))
	s.Report("etcd resident before", Bytes, float64(before.Resident))
	s.Report("etcd peak memory", Bytes, float64(after.Peak))
	return nil
}

// write puts an object every writeInterval until ctx is done and returns the time of the slowest
// put.
func (l restoreLoad) write(ctx context.Context, s *Sample) (longest time.Duration, err error) {
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return 0, err
	}
	ticker := time.NewTicker(writeInterval)
	defer ticker.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return longest, nil
		case <-ticker.C:
		}
		began := time.Now()
		if err := elsewhere.put(context.WithoutCancel(ctx), i); err != nil {
			return longest, err
		}
		longest = max(longest, time.Since(began))
	}
}

// awaitRestored returns the time from the start of the engine until it had restored the history.
func awaitRestored(ctx context.Context, s *Sample, e *target.Engine) (time.Duration, error) {
	for deadline := time.Now().Add(restoreLimit); ; {
		at, ok, err := e.LogTime(restoredText)
		switch {
		case err != nil || ok:
			return at.Sub(e.Startup.Began), err
		case time.Now().After(deadline):
			s.Broken("no history was restored within %v", restoreLimit)
			return 0, nil
		case !waitUntil(ctx, time.Now().Add(50*time.Millisecond)):
			return 0, context.Cause(ctx)
		}
	}
}

// deepestWatch returns a lower bound of the number of revisions before the one given at which a
// watch can begin, and the time to the first event of this watch; 0 if the engine has no history
// from before its start.
func deepestWatch(ctx context.Context, e *target.Engine, revision int64, history int) (depth int, waited time.Duration, err error) {
	conn := e.Dial()
	defer conn.Close()
	for _, share := range depths {
		depth := int(share * float64(history))
		began := time.Now()
		_, err := firstEvent(ctx, conn, watchOf(configMapsPath, "", revision-int64(depth)))
		switch {
		case err == nil:
			return depth, time.Since(began), nil
		case !errors.Is(err, errGone):
			return 0, 0, err
		}
	}
	return 0, 0, nil
}

// historyKey is the key whose changes are etcd's history, so that several starts share it.
const historyKey = "/bench/history"

// makeHistory writes revisions behind a compaction, unless etcd has them.
func makeHistory(ctx context.Context, s *Sample, revisions int) error {
	kind := fmt.Sprintf("%d revisions", revisions)
	mark, err := s.Etcd.Client.Get(ctx, historyKey)
	if err != nil {
		return fmt.Errorf("read %s: %w", historyKey, err)
	}
	if len(mark.Kvs) > 0 && string(mark.Kvs[0].Value) == kind {
		if _, err := s.Etcd.Client.Get(ctx, historyKey, clientv3.WithRev(mark.Kvs[0].ModRevision)); err == nil {
			return nil // it has not been compacted
		}
	}
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	if err := dataset.Compact(ctx, s.Etcd.Client, revision); err != nil {
		return err
	}
	if _, err := s.Etcd.Client.Put(ctx, historyKey, kind); err != nil {
		return fmt.Errorf("write %s: %w", historyKey, err)
	}
	made, err := configMapWrites(s)
	if err != nil {
		return err
	}
	return putAll(ctx, &s.Surroundings, revisions, func(i int) (string, []byte, error) {
		i %= len(made.keys)
		return made.keys[i], []byte(made.values[i]), nil
	})
}
