package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

// Names of measures that have bounds.
const (
	residentPerWatch = "resident per watch"
	resumedAfterStop = "watches that go on after SIGTERM"
	resumedAfterKill = "watches that go on after kill -9"
)

// fewWorkloads measure watches on few objects, and many clients.
var fewWorkloads = []Workload{
	{
		Name: "watch-idle-memory", Title: "idle watches of one object each", Op: "watch", Dataset: fewConfigMaps, Alone: true, Runs: 3,
		// fewer would fit into memory that a server has allocated anyway
		Run:    idleLoad{watches: size{5_000, 20}}.run,
		Wanted: []Bound{absolute(residentPerWatch, 25e3)},
	},
	{
		Name: "watch-resume", Title: "watches from before a restart", Op: "watch", Dataset: fewConfigMaps, Alone: true, Starts: true, Runs: 3,
		Run:    resumeLoad{watches: size{100, 5}}.run,
		Wanted: []Bound{{Measure: resumedAfterStop, AtLeast: 100}, {Measure: resumedAfterKill, AtLeast: 100}},
	},
	{ // as after the restart of their API server
		Name: "storm", Title: "a fleet lists all pods at once, GOMEMLIMIT 1.5 GB", Op: "LIST", Dataset: fleetPods, Alone: true, Starts: true, Runs: 1,
		Run: stormLoad{clients: size{1_000, 4}, patience: span{15 * time.Minute, 20 * time.Second}}.run,
		Wanted: []Bound{
			{Measure: clientsServed, AtLeast: 100}, none(brokenAnswers), none(failedAnswers), absolute(renewalP99, 0.1), absolute(readyzP99, 0.2),
		},
	},
}

// holds is the memory of an engine after a garbage collection and a rest.
type holds struct {
	target.State
	resident uint64
}

func (s *Sample) holds(ctx context.Context) (h holds, err error) {
	if _, err = s.Engine.State(ctx); err != nil { // collects garbage
		return h, err
	}
	if err = s.rest(ctx, settled.at(s.Scale)); err != nil {
		return h, err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return h, err
	}
	h.resident = memory.Resident
	h.State, err = s.Engine.State(ctx)
	return h, err
}

// perWatch is the growth of a quantity per watch after n watches were opened.
func perWatch(after, before uint64, n int) float64 {
	return (float64(after) - float64(before)) / float64(n)
}

// idleLoad opens watches with bookmarks, each of one object by its name, of which none changes,
// and compares the server's memory before and meanwhile.
type idleLoad struct{ watches size }

func (l idleLoad) run(ctx context.Context, s *Sample) error {
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return err
	}
	n := l.watches.at(s.Scale)
	conns, err := s.Engine.DialAll(ctx, connsFor(n))
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	idle := watchSet{n: n, after: revision, path: func(i int) string {
		return watchOf(configMapsPath, "fieldSelector=metadata.name%3D"+dataset.ConfigMapName(i%s.Data.ConfigMaps), revision)
	}}
	// Allocations for the first watch of a process and for the connections are not counted.
	for _, conn := range conns {
		first, err := watchSet{n: 1, after: revision, path: idle.path}.open(ctx, []*target.Conn{conn})
		if err != nil {
			return err
		}
		first.close()
	}
	before, err := s.holds(ctx)
	if err != nil {
		return err
	}
	var open holds
	var w *watches
	err = s.Measure(ctx, func(ctx context.Context) error {
		if w, err = idle.open(ctx, conns); err != nil {
			return err
		}
		open, err = s.holds(ctx)
		return err
	})
	if w != nil {
		defer w.close()
	}
	if err != nil {
		return err
	}
	if ended := w.ended.Load(); ended > 0 {
		s.Broken("%d of %d watches were ended", ended, n)
	}
	s.Detail("%s of them over %d connections", grouped(n), len(conns))
	s.Report(residentPerWatch, Bytes, perWatch(open.resident, before.resident, n))
	s.Report("heap per watch", Bytes, perWatch(open.Heap, before.Heap, n))
	s.Report("stacks per watch", Bytes, perWatch(open.Stacks, before.Stacks, n))
	s.Report("goroutines per watch", Count, float64(open.Goroutines-before.Goroutines)/float64(n))
	s.Report("server CPU to open each", Seconds, s.observed.ServerCPU.Seconds()/float64(n))
	return nil
}

// resumeLoad restarts an engine in order, and again by killing it. Each time objects change
// before the engine ends and while it is down, and then watches continue from
// revisions that clients of the first process had seen.
type resumeLoad struct{ watches size }

func (l resumeLoad) run(ctx context.Context, s *Sample) error {
	for _, restart := range []struct {
		measure string
		end     func(*target.Engine)
	}{
		{resumedAfterStop, (*target.Engine).Stop},
		{resumedAfterKill, (*target.Engine).Kill},
	} {
		seen, latest, err := s.seenByAWatch(ctx, l.watches.at(s.Scale), restart.end)
		if err != nil {
			return err
		}
		engine, err := s.Start(ctx)
		if err != nil {
			return err
		}
		resumed, err := s.resume(ctx, engine, seen, latest)
		engine.Stop()
		if err != nil {
			return err
		}
		s.Report(restart.measure, Percent, 100*float64(resumed)/float64(len(seen)))
	}
	return nil
}

// seenByAWatch starts an engine, lets a watch see n changes, ends the engine while the
// watch is open, and changes as many objects again. It returns the revisions that the watch has
// seen, and the latest of all.
func (s *Sample) seenByAWatch(ctx context.Context, n int, end func(*target.Engine)) (seen []int64, latest int64, err error) {
	engine, err := s.Start(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer engine.Stop()
	revision, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return nil, 0, err
	}
	conn := engine.Dial()
	defer conn.Close()
	response, err := conn.Do(ctx, target.Request{Path: watchOf(configMapsPath, "", revision)})
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	changes, err := configMapWrites(s)
	if err != nil {
		return nil, 0, err
	}
	change := func() error {
		for i := range n {
			if err := changes.put(ctx, i); err != nil {
				return err
			}
		}
		return nil
	}
	if err := change(); err != nil {
		return nil, 0, err
	}
	err = wire.ReadJSONEvents(response.Body, dataset.SentKey, func(e wire.Event) error {
		if seen = append(seen, e.Revision); len(seen) == n {
			return errClosed
		}
		return nil
	})
	if !errors.Is(err, errClosed) {
		return nil, 0, fmt.Errorf("the watch ended after %d events: %w", len(seen), err)
	}
	end(engine)
	if err := change(); err != nil {
		return nil, 0, err
	}
	latest, err = dataset.Revision(ctx, s.Etcd.Client)
	return seen, latest, err
}

// resume opens a watch after each revision and returns how many deliver the next event. Any other
// event is an error.
func (s *Sample) resume(ctx context.Context, engine *target.Engine, seen []int64, latest int64) (resumed int64, err error) {
	conn := engine.Dial()
	defer conn.Close()
	var delivered atomic.Int64
	var all errgroup.Group
	for i, revision := range seen {
		all.Go(func() error {
			first, err := firstEvent(ctx, conn, watchOf(configMapsPath, "", revision))
			if errors.Is(err, errGone) {
				return nil
			}
			if err != nil {
				return err
			}
			delivered.Add(1)
			// Changes have consecutive revisions, except for writes of the server to other keys.
			if i+1 < len(seen) && first != seen[i+1] || first > latest {
				return fmt.Errorf("%w: after revision %d comes %d", errWrongEvent, revision, first)
			}
			return nil
		})
	}
	err = all.Wait()
	return delivered.Load(), err
}

// errGone: the server refused a watch because its revision is too old for it.
var errGone = errors.New("too old a resource version")

// retryPause is the Retry-After of a server that restores history.
const retryPause = time.Second

// firstEvent opens a watch and returns the revision of its first event that is no bookmark. It
// retries after 429, as clients do. The error is errGone if the server answers 410, in the status
// or, once it has begun to answer, in the stream.
func firstEvent(ctx context.Context, conn *target.Conn, path string) (revision int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	response, err := conn.Send(ctx, target.Request{Path: path})
	for err == nil && response.StatusCode == http.StatusTooManyRequests {
		response.Body.Close()
		if !waitUntil(ctx, time.Now().Add(retryPause)) {
			return 0, context.Cause(ctx)
		}
		response, err = conn.Send(ctx, target.Request{Path: path})
	}
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
	case http.StatusGone:
		return 0, errGone
	default:
		return 0, fmt.Errorf("watch %s: %w: %s", path, target.ErrStatus, response.Status)
	}
	err = wire.ReadJSONEvents(response.Body, dataset.SentKey, func(e wire.Event) error {
		if e.Type == "BOOKMARK" {
			return nil
		}
		revision = e.Revision
		return errClosed
	})
	switch {
	case errors.Is(err, errClosed):
		return revision, nil
	case err == nil:
		return 0, errors.New("the watch ended without an event")
	case strings.Contains(err.Error(), fmt.Sprintf(`\"code\":%d`, http.StatusGone)):
		// the error quotes the frame
		return 0, errGone
	}
	return 0, err
}
