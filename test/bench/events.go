package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// eventWorkloads are reads of Events.
var eventWorkloads = []Workload{{
	Name: "events", Title: "Events in memory, listed by their object", Op: "LIST", Dataset: events,
	Alone: true, Session: "events", Starts: true, Runs: 1, Timeout: 20 * time.Minute,
	Run:    measureEventsOfObjects,
	Wanted: []Bound{absolute(eventsMemory, 0.9e9), absolute(eventsMemoryListed, 0.9e9), absolute(describeLatency, 2e-3), absolute(describeAllLatency, 2e-3)},
}}

// Names of measures that have bounds.
const (
	eventsMemory       = "resident above a server that excludes events"
	eventsMemoryListed = "  after the lists, with attributes and indexes"
	describeLatency    = "LIST by object in its namespace p50"
	describeAllLatency = "LIST by object in all namespaces p50"
)

// events is the data of workloads on Events.
func events(s Sizes) dataset.Spec {
	return dataset.Spec{Events: s.Events, Namespaces: max(1, s.Events/eventsPerNamespace)}
}

const (
	// eventsPerNamespace is the number of Events in each namespace.
	eventsPerNamespace = 10_000

	// describesPerSecond is the rate of the lists beside the writes.
	describesPerSecond = 20
)

// measureEventsOfObjects starts an engine without Events in memory, as upstream's default is, and one with its defaults, and compares their
// memory. It lists the Events of objects, as kubectl describe does, first alone, and then beside writes of Events that expire.
func measureEventsOfObjects(ctx context.Context, s *Sample) error {
	without, err := s.startAndRest(ctx, "--watch-cache-sizes=events#0")
	if err != nil {
		return err
	}
	s.Engine.Stop()
	with, err := s.startAndRest(ctx)
	if err != nil {
		return err
	}
	defer func() { s.Engine.Stop() }()
	s.Detail("%s Events, %s/s written and as many expired meanwhile", grouped(s.Data.Events), grouped(s.Sizes.EventRate))
	s.Report("until ready", Seconds, s.Engine.Startup.Ready.Seconds())
	s.Report("resident at rest", Bytes, float64(with.resident))
	s.Report(eventsMemory, Bytes, float64(with.resident)-float64(without.resident))

	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	if err := s.describes(ctx, conn, false, describeLatency); err != nil {
		return err
	}
	if err := s.describes(ctx, conn, true, describeAllLatency); err != nil {
		return err
	}
	after, err := s.holds(ctx)
	if err != nil {
		return err
	}
	s.Report("resident after the lists", Bytes, float64(after.resident))
	s.Report(eventsMemoryListed, Bytes, float64(after.resident)-float64(without.resident))
	before, err := s.countEvents(ctx) // the engine may have written some of its own
	if err != nil {
		return err
	}
	if err := s.describesBesideWrites(ctx, conn); err != nil {
		return err
	}
	return s.awaitExpiry(ctx, conn, before)
}

// countEvents returns the number of Events in etcd.
func (s *Sample) countEvents(ctx context.Context) (int64, error) {
	all, err := s.Etcd.Client.Get(ctx, dataset.EventPrefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0, fmt.Errorf("count the Events in etcd: %w", err)
	}
	return all.Count, nil
}

// awaitExpiry returns when the written Events have expired, in etcd, which had so many before, and in the engine.
func (s *Sample) awaitExpiry(ctx context.Context, conn *target.Conn, before int64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*s.Sizes.EventTTL+time.Minute)
	defer cancel()
	for {
		left, err := s.countEvents(ctx)
		if err != nil {
			return err
		}
		if left <= before {
			break
		}
		select {
		case <-time.After(s.Sizes.EventTTL / 10):
		case <-ctx.Done():
			return fmt.Errorf("etcd has %d Events when the written ones must have expired, and had %d before", left, before)
		}
	}
	// A consistent LIST includes the expiry.
	list, err := doList(ctx, conn, "/api/v1/events?fieldSelector=involvedObject.name%3D"+dataset.PodName(s.Data.Events/dataset.EventsPerPod), protobufFormat)
	if err == nil && list.Objects != 0 {
		err = fmt.Errorf("the engine has %d Events of a pod of which all have expired", list.Objects)
	}
	return err
}

// startAndRest starts the engine with further flags, and returns its memory at rest.
func (s *Sample) startAndRest(ctx context.Context, args ...string) (rest holds, err error) {
	if s.Engine, err = s.Start(ctx, args...); err != nil {
		return rest, err
	}
	s.children = []*process.Child{s.Engine.Child, s.Etcd.Child}
	if rest, err = s.holds(ctx); err != nil {
		s.Engine.Stop()
	}
	return rest, err
}

// describe lists the Events of pod number i, in its namespace or in all, and verifies their number.
func (s *Sample) describe(ctx context.Context, conn *target.Conn, i int, all bool) (took time.Duration, err error) {
	namespace := dataset.PodNamespace(i, s.Data.Namespaces)
	path := "/api/v1/namespaces/" + namespace + "/events"
	if all {
		path = "/api/v1/events"
	}
	path += "?fieldSelector=involvedObject.name%3D" + dataset.PodName(i) + ",involvedObject.namespace%3D" + namespace
	began := time.Now()
	list, err := doList(ctx, conn, path, protobufFormat)
	if err == nil && list.Objects != dataset.EventsPerPod {
		err = fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, dataset.EventsPerPod)
	}
	return time.Since(began), err
}

// describes lists the Events of pods drawn at random for Sizes.Loop.
func (s *Sample) describes(ctx context.Context, conn *target.Conn, all bool, name string) error {
	pods := s.Data.Events / dataset.EventsPerPod
	var took []time.Duration
	cpu, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(s.Sizes.Loop); len(took) < 3 || time.Now().Before(deadline); {
		d, err := s.describe(ctx, conn, s.Rand.IntN(pods), all)
		if err != nil {
			return err
		}
		took = append(took, d)
	}
	end, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	first := took[0]
	slices.Sort(took)
	s.Report("  the first", Seconds, first.Seconds())
	s.Report(name, Seconds, stats.Percentile(took, 0.5).Seconds())
	s.Report("  server CPU of each, with the first", Seconds, (end-cpu).Seconds()/float64(len(took)))
	return nil
}

// describesBesideWrites lists Events by their object at a rate, while others are written with a lease and expire.
func (s *Sample) describesBesideWrites(ctx context.Context, conn *target.Conn) error {
	pods := s.Data.Events / dataset.EventsPerPod
	drawn := s.Rand.Perm(pods)
	duration := 3 * s.Sizes.EventTTL
	return s.Measure(ctx, func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return s.writeEvents(ctx, duration) })
		group.Go(func() error {
			return perSecond(describesPerSecond, duration, 1).run(ctx, func(ctx context.Context, i int) error {
				took, err := s.describe(ctx, conn, drawn[i%pods], false)
				if err == nil {
					s.Observe(took)
				}
				return err
			})
		})
		return group.Wait()
	})
}

// writeEvents puts Events with a lease, one for all of a second, as API servers do.
func (s *Sample) writeEvents(ctx context.Context, duration time.Duration) error {
	for second := range int(duration / time.Second) {
		lease, err := s.Etcd.Client.Grant(ctx, int64(s.Sizes.EventTTL/time.Second))
		if err != nil {
			return fmt.Errorf("grant a lease: %w", err)
		}
		err = perSecond(s.Sizes.EventRate, time.Second, writesAtOnce).run(ctx, func(ctx context.Context, i int) error {
			event := dataset.PodEvent(s.Data.Events+second*s.Sizes.EventRate+i, s.Data.Namespaces)
			value, err := dataset.Encode(event)
			if err == nil {
				_, err = s.Etcd.Client.Put(ctx, dataset.EventKey(event.Namespace, event.Name), string(value), clientv3.WithLease(lease.ID))
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("write Events: %w", err)
		}
	}
	return nil
}
