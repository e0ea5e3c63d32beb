package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

// Names of measures that have bounds.
const (
	resumedAfterStop = "watches that go on after SIGTERM"
	resumedAfterKill = "watches that go on after kill -9"
)

var resumeWorkload = Workload{
	Name: "watch-resume", Title: "watches from before a restart", Op: "watch", Dataset: fewConfigMaps,
	Alone: true, Session: "resume", Starts: true, Runs: 3,
	Run:    measureResume,
	Wanted: []Bound{{Measure: resumedAfterStop, AtLeast: 100}, {Measure: resumedAfterKill, AtLeast: 100}},
}

// measureResume restarts an engine in order, and again by killing it. Each time objects change
// before the engine ends and while it is down, and then Sizes.Resumed watches continue from
// revisions that clients of the first process had seen.
func measureResume(ctx context.Context, s *Sample) error {
	for _, restart := range []struct {
		measure string
		how     string
		end     func(*target.Engine)
	}{
		{resumedAfterStop, "after SIGTERM", (*target.Engine).Stop},
		{resumedAfterKill, "after kill -9", (*target.Engine).Kill},
	} {
		seen, latest, err := s.seenByAWatch(ctx, restart.end)
		if err != nil {
			return err
		}
		began := time.Now()
		engine, err := s.Start(ctx)
		if err != nil {
			return err
		}
		ready := engine.Startup.Ready
		resumed, first, err := s.resume(ctx, engine, seen, latest)
		all := time.Since(began)
		engine.Stop()
		if err != nil {
			return err
		}
		s.Report(restart.measure, Percent, 100*float64(resumed)/float64(len(seen)))
		s.Report("ready "+restart.how, Seconds, ready.Seconds())
		s.Report("until all watches have their first event or their refusal, "+restart.how, Seconds, all.Seconds())
		s.Report("slowest first event "+restart.how, Seconds, first.Seconds())
	}
	s.Detail("%s watches", grouped(s.Sizes.Resumed))
	return nil
}

// seenByAWatch starts an engine, lets a watch see Sizes.Resumed changes, ends the engine while the
// watch is open, and changes as many objects again. It returns the revisions that the watch has
// seen, and the latest of all.
func (s *Sample) seenByAWatch(ctx context.Context, end func(*target.Engine)) (seen []int64, latest int64, err error) {
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
	response, err := conn.Do(ctx, target.Request{Path: watchOf(configMapsPath, "", true, revision)})
	if err != nil {
		return nil, 0, err
	}
	defer response.Body.Close()
	changes, err := configMapWrites(s)
	if err != nil {
		return nil, 0, err
	}
	change := func() error {
		for i := range s.Sizes.Resumed {
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
		if seen = append(seen, e.Revision); len(seen) == s.Sizes.Resumed {
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

// resume opens a watch after each revision and returns how many deliver the next event, and the
// time of the slowest of these to its first event. A watch that delivers any other event is an
// error.
func (s *Sample) resume(ctx context.Context, engine *target.Engine, seen []int64, latest int64) (resumed int, slowest time.Duration, err error) {
	conn := engine.Dial()
	defer conn.Close()
	took := make([]time.Duration, len(seen)) // 0 if the watch was refused
	var all errgroup.Group
	for i, revision := range seen {
		all.Go(func() error {
			began := time.Now()
			first, err := firstEvent(ctx, conn, watchOf(configMapsPath, "", true, revision))
			if errors.Is(err, errGone) {
				return nil
			}
			if err != nil {
				return err
			}
			took[i] = time.Since(began)
			// Changes have consecutive revisions, except for writes of the server to other keys.
			if i+1 < len(seen) && first != seen[i+1] || first > latest {
				return fmt.Errorf("%w: after revision %d comes %d", errWrongEvent, revision, first)
			}
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return 0, 0, err
	}
	for _, t := range took {
		if t > 0 {
			resumed++
		}
		slowest = max(slowest, t)
	}
	return resumed, slowest, nil
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
