package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
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
		Name: "start", Title: "start on a filled etcd, then rest", Dataset: cluster, Alone: true, Fresh: true, Lived: true, Runs: 1,
		Run:    startLoad{rest: settled}.run,
		Wanted: []Bound{toUpstream(untilReadyz, 0.3), toUpstream("resident at rest", 0.3)},
	},
	{
		Name: "restore", Title: "start with a long history, values of 1 KB", Op: "start", Dataset: configMaps, Alone: true, Starts: true, Runs: 3,
		Run:    restoreLoad{history: size{200_000, 500}}.run,
		Wanted: []Bound{toUpstream(untilReady, 0.35), absolute(untilReady, 4), {Measure: revisionsBehind, AtLeast: 10_000}, absolute(restoredLater, 6), absolute(longestWrite, 0.1)},
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
	s.Report("server CPU until at rest", Seconds, cpu.Seconds())
	s.Detail("at rest: after %v", l.rest.at(s.Scale))
	s.Report("resident at rest", Bytes, float64(memory.Resident))
	s.Report("peak memory of the start", Bytes, float64(memory.Peak))
	return nil
}

// restoreLoad starts an engine on an etcd with history behind its floor, while a write begins every
// 5 ms.
type restoreLoad struct{ history size } // revisions

const (
	// writeInterval is the time between two writes beside the start of an engine.
	writeInterval = 5 * time.Millisecond

	// restoredText is in the line that Strata logs when history is restored.
	restoredText = "Restored history"

	// restoreLimit bounds the wait for that line, from the time at which the engine is ready.
	restoreLimit = 3 * time.Minute
)

// depths are the shares of the history of which a watch is tried, the deepest first. The first
// omits a part for concurrent writes, which the bounds of restored history count too.
var depths = []float64{0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01}

func (l restoreLoad) run(ctx context.Context, s *Sample) error {
	history := l.history.at(s.Scale)
	if err := makeHistory(ctx, s, history); err != nil {
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
	depth, err := deepestWatch(ctx, engine, revision, history)
	if err != nil {
		return err
	}
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
	memory, err := engine.Memory()
	if err != nil {
		return err
	}
	s.Detail("%s revisions", grouped(history))
	s.Report(untilReady, Seconds, engine.Startup.Ready.Seconds())
	s.Report(revisionsBehind, Count, float64(depth))
	if restores {
		s.Report("until history is restored", Seconds, restored.Seconds())
		s.Report(restoredLater, Seconds, max(0, restored-engine.Startup.Ready).Seconds())
	}
	s.Report(longestWrite, Seconds, longest.Seconds())
	s.Report("resident afterwards", Bytes, float64(memory.Resident))
	s.Report("peak memory", Bytes, float64(memory.Peak))
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

// awaitRestored returns the time from the start of the engine until it had restored the history, as
// its log says.
func awaitRestored(ctx context.Context, s *Sample, e *target.Engine) (time.Duration, error) {
	for deadline := time.Now().Add(restoreLimit); ; {
		log, err := e.Log()
		switch {
		case err != nil || strings.Contains(log, restoredText):
			return time.Since(e.Startup.Began), err
		case time.Now().After(deadline):
			s.Broken("no history was restored within %v", restoreLimit)
			return 0, nil
		case !waitUntil(ctx, time.Now().Add(20*time.Millisecond)):
			return 0, context.Cause(ctx)
		}
	}
}

// deepestWatch returns a lower bound of the number of revisions before the one given at which a
// watch can begin; 0 if the engine has no history from before its start.
func deepestWatch(ctx context.Context, e *target.Engine, revision int64, history int) (int, error) {
	conn := e.Dial()
	defer conn.Close()
	for _, share := range depths {
		depth := int(share * float64(history))
		_, err := firstEvent(ctx, conn, watchOf(configMapsPath, "", revision-int64(depth)))
		switch {
		case err == nil:
			return depth, nil
		case !errors.Is(err, errGone):
			return 0, err
		}
	}
	return 0, nil
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
	return dataset.PutAll(ctx, s.Etcd.Client, revisions, func(i int) (string, []byte, error) {
		i %= len(made.keys)
		return made.keys[i], []byte(made.values[i]), nil
	})
}
