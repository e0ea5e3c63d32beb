package main

import (
	"context"
	"errors"
	"time"

	"github.com/stratakube/strata/test/bench/internal/scaling"
)

// reading has all counters of a cluster at one time.
type reading struct {
	at           time.Time
	server, etcd time.Duration // CPU time
	received     int64         // by clients
	sent         int64
	fromEtcd     float64
	fsyncs       float64
	done         scaling.Rates // counts of requests and frames
}

// read reads the counters. The CPU times are read last at the begin and first at the end of a measurement, so that it does not contain them.
func (c *cluster) read(ctx context.Context, end bool) (reading, error) {
	var r reading
	steps := []func() error{
		func() error {
			usage, err := c.etcd.Usage(ctx)
			r.fromEtcd = usage.Sent
			return err
		},
		func() error {
			series, err := c.etcd.Series(ctx, "etcd_disk_wal_fsync_duration_seconds_count")
			for _, s := range series {
				r.fsyncs += s.Value
			}
			return err
		},
		func() (err error) {
			r.server, err = c.engine.CPU()
			return err
		},
		func() (err error) {
			r.etcd, err = c.etcd.CPU()
			return err
		},
		func() error {
			r.at = time.Now()
			r.received, r.sent = c.traffic.Received.Load(), c.traffic.Sent.Load()
			r.done = scaling.Rates{}
			for op, n := range c.done {
				r.done[op] = float64(n.Load())
			}
			for op, n := range c.watches.frames {
				r.done[op] += float64(n.Load())
			}
			return nil
		},
	}
	for i := range steps {
		step := steps[i]
		if end {
			step = steps[len(steps)-1-i]
		}
		if err := step(); err != nil {
			return r, err
		}
	}
	return r, nil
}

// during runs f and returns the mean load and rates meanwhile. CPU times are at the reference speed.
func (c *cluster) during(ctx context.Context, f func(context.Context) error) (scaling.Load, scaling.Rates, error) {
	before, err := c.read(ctx, false)
	if err != nil {
		return scaling.Load{}, nil, err
	}
	meter := startSpeedometer(ctx)
	err = f(ctx)
	factor, meterErr := meter.stop()
	if err := errors.Join(err, meterErr); err != nil {
		return scaling.Load{}, nil, err
	}
	after, err := c.read(ctx, true)
	if err != nil {
		return scaling.Load{}, nil, err
	}
	c.factor = factor
	if err := c.watches.failure(); err != nil {
		return scaling.Load{}, nil, err
	}
	seconds := after.at.Sub(before.at).Seconds()
	rates := scaling.Rates{scaling.Idle: 1}
	for op, n := range after.done {
		if d := n - before.done[op]; d > 0 {
			rates[op] = d / seconds
		}
	}
	return scaling.Load{
		Server:   (after.server - before.server).Seconds() / seconds * factor,
		Etcd:     (after.etcd - before.etcd).Seconds() / seconds * factor,
		Sent:     float64(after.received-before.received) / seconds,
		Received: float64(after.sent-before.sent) / seconds,
		FromEtcd: (after.fromEtcd - before.fromEtcd) / seconds,
		Fsyncs:   (after.fsyncs - before.fsyncs) / seconds,
	}, rates, nil
}
