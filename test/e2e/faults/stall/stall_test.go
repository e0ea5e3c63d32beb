package stall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	perSecond = 200  // consistent LISTs
	objects   = 1000 // in the list

	// refusedWithin bounds the answer to a waiting LIST: it waits for memory for 3 s, and the
	// machine may be busy. The stall lasts until all LISTs are answered, so that a LIST that waits
	// for its end exceeds it.
	refusedWithin = time.Minute
	// resumeWithin is generous too: the actual time is logged.
	resumeWithin = time.Minute
	// growth bounds the growth of a process's memory. The LISTs, if a busy machine has all 1,200 in
	// flight, cost the server about 60 MB, and as much before a collection of garbage; reading the
	// ConfigMaps for each of them would cost gigabytes.
	growth = 300 << 20
)

// While etcd delivers no events, LISTs are refused in time and cost etcd only a shared read of its
// revision; memory stays flat in both processes; reads of one object, writes and reads without
// consistency continue; and all requests succeed again when the events arrive.
func TestFeed_Stalled_RefusesListsInTime(t *testing.T) {
	strata := harness.Engine() == harness.Strata
	perSecond, stalled := perSecond, stallTime(t)
	if !strata { // for comparison: it reads all objects from etcd, so a small load suffices
		perSecond, stalled = 20, 3*time.Second
	}
	ctx := harness.Context(t, testTimeout)
	s := newScene(t, ctx)
	_, err := s.api.Create(ctx, mapsPath, configMap("updated", ""))
	harness.Check(t, err)
	renewed, err := s.api.Create(ctx, leasesPath, lease("leader", 0, ""))
	harness.Check(t, err)
	watch := s.startWatch(t, ctx)

	s.answered(t, ctx, "before the stall", perSecond)
	before, err := s.resident()
	harness.Check(t, err)

	s.stall(t, ctx)
	others := []loop{
		{"read an acknowledged write", s.readWritten},
		{"create and delete", s.createAndDelete},
		{"renew a lease", s.renew(renewed.Metadata.ResourceVersion)},
		{"read at resourceVersion=0", s.readAny},
	}
	if strata {
		others = append(others,
			loop{"ask for initial events", s.refusedWatch("sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan")},
			loop{"ask for initial events with a timeout", s.refusedWatch("timeoutSeconds=30&sendInitialEvents=true&resourceVersionMatch=NotOlderThan")},
			loop{"watch from the latest revision", s.refusedWatch("")})
	}
	s.proxy.Reset()
	began := time.Now()
	stopPeak, stopLoops := s.peak(t), loops(t, ctx, others)
	// not a limit: each is refused within that time
	answers := s.send(ctx, perSecond, perSecond*int(refusedWithin.Seconds()), stalled)
	t.Logf("during the stall: requests to etcd while LISTs are sent: %v", s.seen(began))
	lists := answers()
	rounds, peak, requests := stopLoops(), stopPeak(), s.seen(began)
	t.Logf("during the stall, until all LISTs are answered: %d ranges read from etcd", len(requests.ranges))
	s.logLists(t, "during the stall", lists)
	t.Logf("memory: before the stall %v; at most during the stall %v", before, peak)
	t.Logf("during the stall: rounds of others: %v", rounds)
	for _, l := range others {
		if rounds[l.name] == 0 {
			t.Errorf("%s: not once", l.name)
		}
	}
	if strata {
		checkRefused(t, lists)
		checkRequests(t, requests, len(lists), rounds)
		s.checkMetrics(t, ctx, len(lists), rounds["read an acknowledged write"])
		if peak.server > before.server+growth || peak.etcd > before.etcd+growth {
			t.Errorf("memory grows: before the stall %v, during the stall %v", before, peak)
		}
	}

	last, err := s.api.Update(ctx, newestPath, configMap(newest, "last"))
	harness.Check(t, err)
	s.resume(t, ctx, last, watch)
	s.answered(t, ctx, "after the stall", perSecond)
	s.took.log(t)
	if strata { // upstream reads each object from etcd
		t.Run("reads of one object", func(t *testing.T) { s.limitsReads(t, ctx) })
	}
}

// startWatch starts a watch at the current revision.
func (s *scene) startWatch(t *testing.T, ctx context.Context) *harness.Watch {
	t.Helper()
	present, err := s.api.List(ctx, mapsPath, "")
	harness.Check(t, err)
	return harness.StartWatch(t, ctx, s.api, mapsPath, "resourceVersion="+present.Metadata.ResourceVersion)
}

// answered sends LISTs for a moment without a stall, with a concurrency that a busy machine can
// serve in time, and fails the test unless all are answered.
func (s *scene) answered(t *testing.T, ctx context.Context, when string, perSecond int) {
	t.Helper()
	for attempt := 1; ; attempt++ {
		s.proxy.Reset()
		began := time.Now()
		answers := s.send(ctx, perSecond, 16, 2*time.Second)
		t.Logf("%s: requests to etcd while LISTs are sent: %v", when, s.seen(began))
		lists := answers()
		s.logLists(t, when, lists)
		paused := false
		for _, o := range lists {
			harness.Check(t, o.err)
			if isRefused(o.Response) == nil && attempt < 3 {
				paused = true // the machine, for longer than a LIST waits
			} else if o.Code != http.StatusOK {
				t.Fatalf("%s: %v", when, o.Err())
			}
		}
		if !paused {
			return
		}
	}
}

func (s *scene) logLists(t *testing.T, when string, lists []outcome) {
	codes := map[int]int{} // 0 for no answer
	for _, o := range lists {
		s.took.add("LIST "+when, o.took)
		code := 0
		if o.err == nil {
			code = o.Code
		}
		codes[code]++
	}
	t.Logf("%s: LISTs by code: %v", when, codes)
}

// resume ends the stall. It fails the test unless LISTs are answered again, including the last
// write, and watch, which was open throughout, delivers that as well.
func (s *scene) resume(t *testing.T, ctx context.Context, last harness.Object, watch *harness.Watch) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, resumeWithin, fmt.Errorf("reads do not resume within %v of the end of the stall", resumeWithin))
	defer cancel()
	s.proxy.Stall(false)
	ended := time.Now()
	for {
		r, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
		harness.Check(t, err)
		if r.Code == http.StatusOK {
			t.Logf("a LIST is answered %v after the end of the stall", time.Since(ended).Round(10*time.Microsecond))
			checkNewest(t, r, last)
			break
		}
		harness.Check(t, isRefused(r))
	}
	for {
		e, err := watch.Next(ctx)
		harness.Check(t, err)
		if e.Type == "ERROR" {
			t.Fatalf("a watch from before the stall: %d %s", e.Status.Code, e.Status.Message)
		}
		if e.Object.Metadata.Name == newest && e.Object.Metadata.ResourceVersion == last.Metadata.ResourceVersion {
			t.Logf("a watch from before the stall has caught up %v after it", time.Since(ended).Round(10*time.Microsecond))
			return
		}
	}
}

// checkRefused fails the test unless each LIST was refused with a Retry-After.
func checkRefused(t *testing.T, lists []outcome) {
	t.Helper()
	const shown = 5
	wrong := 0
	for i, o := range lists {
		err := o.err
		if err == nil {
			err = isRefused(o.Response)
		}
		if err == nil {
			continue
		}
		if wrong++; wrong <= shown {
			t.Errorf("LIST %d, after %v: %v", i, o.took, err)
		}
	}
	if wrong > shown {
		t.Errorf("%d of %d LISTs were not refused as they should", wrong, len(lists))
	}
}

// isRefused returns an error unless the answer is 429 with a Retry-After.
func isRefused(r *harness.Response) error {
	if r.Code == http.StatusOK {
		return fmt.Errorf("200, although memory is behind")
	}
	if status := r.Status(); r.Code != http.StatusTooManyRequests || status.Code != http.StatusTooManyRequests {
		return fmt.Errorf("not 429: %w", r.Err())
	}
	if seconds, err := strconv.Atoi(r.Header.Get("Retry-After")); err != nil || seconds < 1 {
		return fmt.Errorf("429 with Retry-After %q", r.Header.Get("Retry-After"))
	}
	return nil
}

// checkRequests fails the test if LISTs have cost etcd more than reads of its revision and progress
// requests.
func checkRequests(t *testing.T, requests etcdRequests, lists int, rounds map[string]int) {
	t.Helper()
	if n := len(requests.ranges); n > 0 {
		t.Errorf("%d ranges were read from etcd, the first %s", n, requests.ranges[0])
	}
	others := 0
	for _, n := range rounds {
		others += n
	}
	// A round of the loops is a few requests, each of which may read a few objects, such as the
	// namespace.
	const perRound, once = 10, 100
	if limit := int64(others*perRound + once); requests.keys > limit {
		t.Errorf("%d reads of one key, want at most %d, for other clients", requests.keys, limit)
	}
	if limit := int64(lists + others*perRound + once); requests.revisions > limit {
		t.Errorf("%d reads of the revision, want at most %d: one for a LIST, the others for other clients", requests.revisions, limit)
	}
	const progress = 15 // per second: every 100 ms, and some at once
	if limit := int64(requests.span.Seconds()*progress + once); requests.watch > limit {
		t.Errorf("%d requests for progress in %v, want at most %d", requests.watch, requests.span, limit)
	}
}

// checkMetrics fails the test unless the metrics count refused LISTs and GETs answered by etcd, and
// show that memory is behind.
func (s *scene) checkMetrics(t *testing.T, ctx context.Context, lists, gets int) {
	t.Helper()
	const reads = `apiserver_watch_cache_consistent_read_total{fallback="%v",group="",resource="configmaps",success="%v"}`
	for _, want := range []struct {
		series  string
		atLeast int
	}{
		{fmt.Sprintf(reads, false, false), lists},
		{fmt.Sprintf(reads, true, true), gets},
		{"strata_mirror_revision_lag{", 1},
	} {
		n, err := s.api.Metric(ctx, want.series)
		harness.Check(t, err)
		if n < float64(want.atLeast) {
			t.Errorf("%s is %v, want at least %d", want.series, n, want.atLeast)
		}
	}
	failed := fmt.Sprintf(reads, true, false)
	if n, err := s.api.Metric(ctx, failed); err == nil && n != 0 {
		// the series is missing until the first count
		t.Errorf("%s is %v, want 0", failed, n)
	}
}

// checkNewest fails the test unless the list has the last written version of the object, and all
// others.
func checkNewest(t *testing.T, r *harness.Response, last harness.Object) {
	t.Helper()
	l, err := r.List()
	harness.Check(t, err)
	if len(l.Items) < objects {
		t.Errorf("%d items after the stall, want %d and more", len(l.Items), objects)
	}
	for _, o := range l.Items {
		if o.Metadata.Name == newest && o.Metadata.ResourceVersion == last.Metadata.ResourceVersion {
			return
		}
	}
	t.Errorf("the first LIST after the stall, at %s, lacks the object written at %s", l.Metadata.ResourceVersion, last.Metadata.ResourceVersion)
}

// readWritten updates an object and reads its own write.
func (s *scene) readWritten(ctx context.Context, i int) error {
	const path = mapsPath + "/updated"
	value := strconv.Itoa(i)
	err := s.took.take("PUT during the stall", func() error {
		_, err := s.api.Update(ctx, path, configMap("updated", value))
		return err
	})
	if err != nil {
		return err
	}
	return s.took.take("GET during the stall", func() error {
		o, err := s.api.Get(ctx, path, "")
		if err == nil && o.Data["value"] != value {
			err = fmt.Errorf("read %q after writing %q", o.Data["value"], value)
		}
		return err
	})
}

// createAndDelete creates an object, reads it, deletes it and reads that it does not exist.
func (s *scene) createAndDelete(ctx context.Context, i int) error {
	name := fmt.Sprintf("churn-%d", i)
	path := mapsPath + "/" + name
	err := s.took.take("POST during the stall", func() error {
		_, err := s.api.Create(ctx, mapsPath, configMap(name, ""))
		return err
	})
	if err != nil {
		return err
	}
	if _, err := s.api.Get(ctx, path, ""); err != nil {
		return err
	}
	if err := s.took.take("DELETE during the stall", func() error { return s.api.Delete(ctx, path) }); err != nil {
		return err
	}
	r, err := s.api.Do(ctx, http.MethodGet, path, "", nil)
	if err == nil && r.Code != http.StatusNotFound {
		err = fmt.Errorf("get of a deleted object: %w", r.Err())
	}
	return err
}

// renew acts as a leader: it reads its lease, which no other client has changed since, and writes
// it.
func (s *scene) renew(resourceVersion string) func(context.Context, int) error {
	const path = leasesPath + "/leader"
	return func(ctx context.Context, i int) error {
		return s.took.take("renewal (GET, PUT) during the stall", func() error {
			o, err := s.api.Get(ctx, path, "")
			if err != nil {
				return err
			}
			if o.Metadata.ResourceVersion != resourceVersion {
				return fmt.Errorf("resourceVersion is %s, want %s", o.Metadata.ResourceVersion, resourceVersion)
			}
			o, err = s.api.Update(ctx, path, lease("leader", i+1, resourceVersion))
			resourceVersion = o.Metadata.ResourceVersion
			return err
		})
	}
}

// readAny reads without consistency.
func (s *scene) readAny(ctx context.Context, _ int) error {
	err := s.took.take("LIST at 0 during the stall", func() error {
		r, err := s.api.Do(ctx, http.MethodGet, mapsPath, "resourceVersion=0", nil)
		if err != nil {
			return err
		}
		if n := bytes.Count(r.Body, []byte(`"name":"map-`)); r.Code != http.StatusOK || n < objects {
			return fmt.Errorf("list at 0: %d with %d of %d items", r.Code, n, objects)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return s.took.take("GET at 0 during the stall", func() error {
		_, err := s.api.Get(ctx, mapsPath+"/map-0000", "resourceVersion=0")
		return err
	})
}

// refusedWatch requests a watch that starts with consistent initial events, and returns an error
// unless it is refused before it starts.
func (s *scene) refusedWatch(query string) func(context.Context, int) error {
	return func(ctx context.Context, _ int) error {
		ctx, cancel := context.WithTimeoutCause(ctx, refusedWithin, fmt.Errorf("no answer within %v", refusedWithin))
		defer cancel()
		return s.took.take("WATCH during the stall", func() error {
			w, refused, err := s.api.Watch(ctx, mapsPath, query)
			if err != nil {
				return err
			}
			if refused == nil {
				w.Close()
				return errors.New("the watch begins")
			}
			return isRefused(refused)
		})
	}
}
