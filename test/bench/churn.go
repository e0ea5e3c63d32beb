package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	heapBeyond   = "live heap more per revision, beyond keys and values"
	pastFailures = "reads of the past that failed"
)

// churnWorkloads let history grow while it is read.
var churnWorkloads = []Workload{{
	Name: "history-churn", Title: "history under churn, read all the time", Op: "read", Dataset: churned,
	Alone: true, Session: "churn", Runs: 1,
	Variant: "churn", Flags: map[string][]string{strataEngine: {churnFlag}},
	Run:    measureChurn,
	Wanted: []Bound{absolute(heapBeyond, 300), none(pastFailures), none(objectReads)},
}}

// churnFlag makes the bound of history larger than all writes.
const churnFlag = "--strata-history-bytes=1Gi"

// pastAtOnce bounds how many reads of one kind run at once.
const pastAtOnce = 4

// churn records writes, and reads of them. Its methods may be called concurrently.
type churn struct {
	s     *Sample
	began int64 // the revision before the first write
	order []int // of the objects that are written in turn

	mu      sync.Mutex
	written []int64            // revisions, in no order
	of      map[string][]int64 // the same, by the object's name
	bytes   int                // of keys and values, each of which has replaced one as long
	writes  []time.Duration
	pages   []time.Duration
	objects []time.Duration
	seen    []seenPast
	failed  int
	failure error // the first
}

// seenPast is an object as it was read at a revision.
type seenPast struct {
	at      int64
	name    string
	version int64
}

// measureChurn changes ConfigMaps at Sizes.ChurnRate for Sizes.Churn, while readers read a page and an object at revisions drawn from all
// written so far. The memory of a revision is the growth of the server's memory divided by the revisions.
func measureChurn(ctx context.Context, s *Sample) error {
	conn := s.Engine.Dial()
	defer conn.Close()
	c := &churn{s: s, order: s.Rand.Perm(s.Data.ConfigMaps), of: map[string][]int64{}}
	var err error
	if c.began, err = dataset.Revision(ctx, s.Etcd.Client); err != nil {
		return err
	}
	c.written = append(c.written, c.began)
	before, err := s.historyHeld(ctx, conn)
	if err != nil {
		return err
	}
	if err := s.Measure(ctx, func(ctx context.Context) error { return c.run(ctx, conn) }); err != nil {
		return err
	}
	after, err := s.historyHeld(ctx, conn)
	if err != nil {
		return err
	}
	if err := c.verify(); err != nil {
		return err
	}
	c.report(before, after)
	return nil
}

// run writes and reads.
func (c *churn) run(ctx context.Context, conn *target.Conn) error {
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return perSecond(c.s.Sizes.ChurnRate, c.s.Sizes.Churn, writesAtOnce).run(ctx, c.write) })
	reads := pace{interval: c.s.Sizes.PastInterval, duration: c.s.Sizes.Churn, atOnce: pastAtOnce}
	random := rand.New(rand.NewPCG(c.s.Rand.Uint64(), 0)) // used under c.mu
	all.Go(func() error {
		return reads.run(ctx, func(ctx context.Context, _ int) error {
			at, _ := c.draw(random)
			page := exactPath(allConfigMaps, at) + fmt.Sprintf("&limit=%d", c.s.Sizes.Page)
			return c.read(ctx, conn, page, at, min(c.s.Sizes.Page, c.s.Data.ConfigMaps), &c.pages)
		})
	})
	all.Go(func() error {
		return reads.run(ctx, func(ctx context.Context, _ int) error {
			at, name := c.draw(random)
			return c.read(ctx, conn, exactPath(configMapsPath, at)+"&fieldSelector=metadata.name%3D"+name, at, 1, &c.objects)
		})
	})
	return all.Wait()
}

// write is write number i.
func (c *churn) write(ctx context.Context, i int) error {
	// Numbers of samples are far below 1<<20.
	cm := dataset.ConfigMap(c.order[i%len(c.order)], c.s.Number+(i+1)<<20)
	value, err := dataset.Encode(cm)
	if err != nil {
		return err
	}
	began := time.Now()
	response, err := c.s.Etcd.Client.Put(ctx, dataset.ConfigMapKey(cm.Name), string(value))
	if err != nil {
		return fmt.Errorf("change an object: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writes = append(c.writes, time.Since(began))
	c.written = append(c.written, response.Header.Revision)
	c.of[cm.Name] = append(c.of[cm.Name], response.Header.Revision)
	c.bytes += len(dataset.ConfigMapKey(cm.Name)) + len(value)
	return nil
}

// draw returns one of the revisions written so far, and the name of an object.
func (c *churn) draw(random *rand.Rand) (revision int64, name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.written[random.IntN(len(c.written))], dataset.ConfigMapName(random.IntN(c.s.Data.ConfigMaps))
}

// read reads want objects at a revision, and records the objects, or the failure, and the time.
func (c *churn) read(ctx context.Context, conn *target.Conn, url string, at int64, want int, took *[]time.Duration) error {
	var body bytes.Buffer
	began := time.Now()
	err := conn.Read(ctx, target.Request{Path: url}, &body)
	elapsed := time.Since(began)
	var page pastPage
	if err == nil {
		if page, err = parsePast(url, body.Bytes()); err != nil {
			return err
		}
		if page.Metadata.ResourceVersion != at || len(page.Items) != want {
			return fmt.Errorf("LIST %s has %d objects at revision %d, want %d", url, len(page.Items), page.Metadata.ResourceVersion, want)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case err == nil:
		*took = append(*took, elapsed)
	case errors.Is(err, target.ErrStatus):
		c.failed++
		if c.failure == nil {
			c.failure = err
		}
	default:
		return err
	}
	for _, item := range page.Items {
		c.seen = append(c.seen, seenPast{at: at, name: item.Metadata.Name, version: item.Metadata.ResourceVersion})
	}
	return nil
}

// verify compares reads with writes.
func (c *churn) verify() error {
	for _, revisions := range c.of {
		slices.Sort(revisions)
	}
	for _, seen := range c.seen {
		revisions := c.of[seen.name]
		n, exact := slices.BinarySearch(revisions, seen.at) // n revisions are less
		if exact {
			n++
		}
		switch {
		case n == 0 && seen.version > c.began, n > 0 && seen.version != revisions[n-1]:
			return fmt.Errorf("list at revision %d returned %s with resource version %d; it was written at %v", seen.at, seen.name, seen.version, revisions)
		}
	}
	return nil
}

// Metrics of Strata about its history. Engines that do not have one have no row of it.
const (
	historyBytes        = "strata_mirror_history_bytes"
	clusterVersionBytes = "strata_mirror_version_bytes"
	versions            = "strata_mirror_resource_versions"
	versionBytes        = "strata_mirror_resource_version_bytes"
	oldestRevision      = "strata_mirror_resource_oldest_revision"
	representations     = "strata_representation_bytes"
)

// historyHeld is the memory of an engine when it has settled, and its own metrics about history.
type historyHeld struct {
	holds
	metrics map[string]float64
}

func (s *Sample) historyHeld(ctx context.Context, conn *target.Conn) (historyHeld, error) {
	// Encoded objects of the latest state are no history: all of them are cached, before and after.
	everything := pagesLoad{path: allConfigMaps, format: jsonFormat}
	for range 2 {
		if _, err := everything.pages(ctx, s, conn, "", nil); err != nil {
			return historyHeld{}, err
		}
	}
	held, err := s.holds(ctx)
	if err != nil {
		return historyHeld{}, err
	}
	all, err := s.Engine.Series(ctx, historyBytes, clusterVersionBytes, versions, versionBytes, oldestRevision, representations)
	if err != nil {
		return historyHeld{}, err
	}
	metrics := map[string]float64{}
	for _, series := range all {
		// Resources are named by their prefix below that of the API server.
		if resource, ok := series.Labels["resource"]; !ok || path.Base(resource) == measuredResource {
			metrics[series.Name] += series.Value
		}
	}
	return historyHeld{held, metrics}, nil
}

func (c *churn) report(before, after historyHeld) {
	s := c.s
	n := float64(len(c.writes))
	per := func(after, before uint64) float64 { return (float64(after) - float64(before)) / n }
	kept := (after.metrics[representations] - before.metrics[representations]) / n
	value := float64(c.bytes) / n
	heap, resident := per(after.Live, before.Live), per(after.resident, before.resident)
	s.Detail("%s objects, %s writes in %v; Strata with %s", grouped(s.Data.ConfigMaps), grouped(len(c.writes)), s.Sizes.Churn, churnFlag)
	s.Report("revisions", Count, n)
	s.Report("key and value that each has replaced", Bytes, value)
	s.Report("live heap more per revision", Bytes, heap)
	s.Report("  of this encoded for readers", Bytes, kept)
	s.Report(heapBeyond, Bytes, heap-kept-value)
	s.Report("resident more per revision", Bytes, resident)
	s.Report("resident more per revision, beyond keys and values", Bytes, resident-kept-value)
	s.Report("live heap before", Bytes, float64(before.Live))
	s.Report("live heap after", Bytes, float64(after.Live))
	s.Report("resident before", Bytes, float64(before.resident))
	s.Report("resident after", Bytes, float64(after.resident))
	s.Report("peak memory", Bytes, float64(s.observed.Memory.Peak))
	for _, metric := range []struct {
		name string
		unit Unit
	}{{historyBytes, Bytes}, {clusterVersionBytes, Bytes}, {versions, Count}, {versionBytes, Bytes}} {
		if now, ok := after.metrics[metric.name]; ok {
			s.Report(metric.name+", before", metric.unit, before.metrics[metric.name])
			s.Report(metric.name+", after", metric.unit, now)
		}
	}
	if oldest, ok := after.metrics[oldestRevision]; ok {
		s.Report(oldestRevision+", after the first write", Count, max(0, oldest-float64(c.began)-1))
	}
	s.Report(pastFailures, Count, float64(c.failed))
	s.Report(objectReads, Count, s.observed.ObjectReads)
	s.Report("etcd sent per revision", Bytes, s.observed.EtcdSent/n)
	for _, latencies := range []struct {
		name string
		took []time.Duration
	}{{"page of the past", c.pages}, {"object of the past", c.objects}, {"write", c.writes}} {
		slices.Sort(latencies.took)
		s.Report(latencies.name+" p50", Seconds, stats.Percentile(latencies.took, 0.5).Seconds())
		s.Report(latencies.name+" p99", Seconds, stats.Percentile(latencies.took, 0.99).Seconds())
	}
	s.Report("server cores", Count, s.observed.ServerCPU.Seconds()/s.observed.Elapsed.Seconds())
	s.Report("etcd cores", Count, s.observed.EtcdCPU.Seconds()/s.observed.Elapsed.Seconds())
	if c.failure != nil {
		s.Broken("%d reads of the past failed: %s", c.failed, firstLine(c.failure))
	}
}
