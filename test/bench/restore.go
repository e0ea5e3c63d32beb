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
	untilReady    = "until ready"
	untilRestored = "until history is restored"
	// revisionsBehind is how far before the start a watch can begin.
	revisionsBehind = "revisions behind that a watch can begin"
	restoredLater   = "history is restored after ready by"
	longestWrite    = "longest write beside"
)

// restoreWorkloads start engines on an etcd with a long history, beside a writer.
var restoreWorkloads = []Workload{
	{
		Name: "restore", Title: "start with a long history, values of 1 KB", Op: "start", Dataset: configMaps,
		Alone: true, Session: "restore", Starts: true, Runs: 3,
		Run:    restoreLoad{engines: 1}.run,
		Wanted: []Bound{toUpstream(untilReady, 0.35), absolute(untilReady, 4), {Measure: revisionsBehind, AtLeast: 10_000}, absolute(restoredLater, 6), absolute(longestWrite, 0.1)},
	},
}

// restoreLoad starts engines at once on an etcd that has Sizes.History revisions behind its floor,
// while a write begins every 5 ms.
type restoreLoad struct {
	engines int
}

const (
	// writeInterval is the time between two writes beside the start of an engine.
	writeInterval = 5 * time.Millisecond

	// restoredText is in the line that Strata logs when history is restored. The first of them is
	// the whole registry's.
	restoredText = "Restored history"

	// restoreLimit bounds the wait for that line, from the time at which the engine is ready. An
	// engine without restore writes none.
	restoreLimit = time.Minute
)

// depths are the shares of the history of which a watch is tried, the deepest first. The first
// omits a part for concurrent writes, which the bounds of restored history count too.
var depths = []float64{0.95, 0.9, 0.75, 0.5, 0.25, 0.1, 0.05, 0.01}

func (l restoreLoad) run(ctx context.Context, s *Sample) error {
	if err := l.makeHistory(ctx, s); err != nil {
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

	engines := make([]*target.Engine, l.engines)
	defer func() {
		for _, e := range engines {
			if e != nil {
				e.Stop()
			}
		}
	}()
	starting, startCtx := errgroup.WithContext(ctx)
	for i := range engines {
		starting.Go(func() (err error) {
			engines[i], err = s.Start(startCtx)
			return err
		})
	}
	if err := starting.Wait(); err != nil {
		return err
	}
	last := engines[0] // the last to become ready
	for _, e := range engines {
		if e.Startup.Ready > last.Startup.Ready {
			last = e
		}
	}
	depth, waited, err := deepestWatch(ctx, s, last, revision)
	if err != nil {
		return err
	}
	watching := time.Since(last.Startup.Began)
	var restored time.Duration
	if restores(last) {
		if restored, err = awaitRestored(ctx, s, engines); err != nil {
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
	memory, err := last.Memory()
	if err != nil {
		return err
	}
	s.Detail("%s revisions, %d at once", grouped(s.Sizes.History), l.engines)
	s.Report(untilReady, Seconds, last.Startup.Ready.Seconds())
	s.Report("server CPU until the first GET", Seconds, last.Startup.CPU.Seconds())
	s.Report(revisionsBehind, Count, float64(depth))
	s.Report("its first event after", Seconds, waited.Seconds())
	s.Report("until this was known", Seconds, watching.Seconds())
	if restores(last) {
		s.Report(untilRestored, Seconds, restored.Seconds())
		s.Report(restoredLater, Seconds, max(0, restored-last.Startup.Ready).Seconds())
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

// restores reports whether an engine logs that it has restored history.
func restores(e *target.Engine) bool {
	return e.Engine == strataEngine && !strings.Contains(strings.Join(e.Args, " "), "WatchHistoryRestore=false")
}

// awaitRestored returns when the last of the engines had restored the history, from its start.
func awaitRestored(ctx context.Context, s *Sample, engines []*target.Engine) (longest time.Duration, err error) {
	for _, e := range engines {
		for deadline := time.Now().Add(restoreLimit); ; {
			at, ok, err := e.LogTime(restoredText)
			if err != nil {
				return 0, err
			}
			if ok {
				longest = max(longest, at.Sub(e.Startup.Began))
				break
			}
			if time.Now().After(deadline) {
				s.Broken("no history was restored within %v", restoreLimit)
				return 0, nil
			}
			if !waitUntil(ctx, time.Now().Add(50*time.Millisecond)) {
				return 0, context.Cause(ctx)
			}
		}
	}
	return longest, nil
}

// deepestWatch returns a lower bound of the number of revisions before the one given at which a
// watch can begin, and the time to the first event of this watch; 0 if the engine has no history
// from before its start.
func deepestWatch(ctx context.Context, s *Sample, e *target.Engine, revision int64) (depth int, waited time.Duration, err error) {
	conn := e.Dial()
	defer conn.Close()
	for _, share := range depths {
		depth := int(share * float64(s.Sizes.History))
		began := time.Now()
		_, err := firstEvent(ctx, conn, watchOf(configMapsPath, "", true, revision-int64(depth)))
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

// makeHistory writes Sizes.History revisions behind a compaction, unless etcd has them.
func (l restoreLoad) makeHistory(ctx context.Context, s *Sample) error {
	const bytes = 1024
	kind := fmt.Sprintf("%d revisions, values of %d bytes", s.Sizes.History, bytes)
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
	made, err := newWrites(s, min(besideObjects, s.Data.ConfigMaps), func(i int) (string, []byte, error) {
		cm := dataset.ConfigMap(i, 1+s.Number)
		if text := cm.Data["data"]; len(text) < bytes {
			cm.Data["data"] = strings.Repeat(text, 1+bytes/len(text))[:bytes]
		}
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
	if err != nil {
		return err
	}
	return putAll(ctx, &s.Surroundings, s.Sizes.History, func(i int) (string, []byte, error) {
		i %= len(made.keys)
		return made.keys[i], []byte(made.values[i]), nil
	})
}
