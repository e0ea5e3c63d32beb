package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// highestRate is the name of a measure that has bounds.
const highestRate = "highest rate without loss"

// highestWorkloads search the highest rate of events that one watcher receives without loss.
var highestWorkloads = []Workload{
	{
		Name: "watch-highest", Title: "watcher alone, as many events as it gets", Op: "event", Dataset: configMaps,
		Alone: true, Session: "highest", Runs: 3,
		Run:    measureHighest,
		Wanted: []Bound{{Measure: highestRate, Of: upstreamEngine, AtLeast: 5}},
	},
	{
		Name: "watch-highest-few", Title: "watcher alone, as many events as it gets, of few objects", Op: "event", Dataset: fewConfigMaps,
		Alone: true, Session: "highest", Runs: 3,
		Run:    measureHighest,
		Wanted: []Bound{{Measure: highestRate, Of: upstreamEngine, AtLeast: 5}},
	},
}

const (
	// txnKeys is the number of objects that change in one revision, so that etcd does not bound the rate.
	txnKeys = 100

	// txnsAtOnce bounds the transactions in flight: enough that etcd always has one to do.
	txnsAtOnce = 8

	// firstRate is the first rate that is tried, and rateFactor the factor to the next. Between the last sustained rate and the next one,
	// the geometric mean is tried too. If the first is not sustained, lower ones are tried, down to about leastRate.
	firstRate, leastRate, rateFactor = 4_000, 300, 1.5

	// saturated is the share of a rate that etcd must reach; below that etcd ends the search.
	saturated = 0.9
)

// rung is the result for one rate.
type rung struct {
	rate      float64 // events per second that were written
	lag       time.Duration
	sustained bool
	why       string // it was not
	saturated bool   // etcd accepts no more
}

// measureHighest raises the rate until the watcher cannot follow, and measures the highest sustained rate.
func measureHighest(ctx context.Context, s *Sample) error {
	changes, err := newStampedChanges(s)
	if err != nil {
		return err
	}
	var best rung
	tooHigh := 0.0 // rate written at the lowest rate that was not sustained
	ended := ""    // why the search ended
	why := ""      // it was not
	// A rate that fails is tried a second time: the first rate after a change may fail in a process that has just begun to follow it.
	try := func(rate float64) (r rung, err error) {
		for range 2 {
			if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
				return rung{}, err
			}
			if _, r, err = changes.climb(ctx, s, rate); err != nil {
				return rung{}, err
			}
			if r.sustained {
				if r.rate > best.rate {
					best = r
				}
				return r, nil
			}
		}
		tooHigh, why = r.rate, r.why
		return r, nil
	}
	rate := float64(firstRate)
	for ended == "" {
		r, err := try(rate)
		switch {
		case err != nil:
			return err
		case r.sustained && r.saturated:
			ended = "etcd takes no more"
		case r.sustained && tooHigh > 0: // the search began too high
			ended = why
		case r.sustained && s.Sizes.LoneMost > 0 && rate*rateFactor > s.Sizes.LoneMost:
			ended = "no higher one was tried"
		case r.sustained:
			rate *= rateFactor
		case best.rate > 0:
			ended = why
			if _, err := try(best.rate * math.Sqrt(rateFactor)); err != nil {
				return err
			}
		case rate < leastRate:
			s.Broken("at %.0f events/s %s", r.rate, r.why)
			ended = why
		default:
			rate /= rateFactor
		}
	}
	var last rung
	var serverCores, etcdCores float64
	if best.sustained {
		var w *watches
		err = s.Measure(ctx, func(ctx context.Context) error {
			w, last, err = changes.climb(ctx, s, best.rate)
			return err
		})
		if err != nil {
			return err
		}
		for _, latency := range w.streams[0].latencies {
			s.Observe(latency)
		}
		serverCores = s.observed.ServerCPU.Seconds() / s.observed.Elapsed.Seconds()
		etcdCores = s.observed.EtcdCPU.Seconds() / s.observed.Elapsed.Seconds()
	}
	s.Report(highestRate, PerSecond, best.rate)
	s.Report("  lowest that was too high (0: etcd took no more)", PerSecond, tooHigh)
	s.Report("  share of what etcd took at most", Percent, 100*best.rate/changes.fastest)
	s.Report("server cores", Count, serverCores)
	s.Report("etcd cores", Count, etcdCores)
	s.Report("behind at the end", Seconds, last.lag.Seconds())
	if !last.sustained {
		ended += "; when it was measured, " + last.why
	}
	s.Detail("%d keys a transaction, %v for each rate; then %s", txnKeys, s.Sizes.LoneStep, ended)
	return nil
}

// stampedChanges are changes of ConfigMaps that were encoded before; only the time is written into each.
type stampedChanges struct {
	client  *clientv3.Client
	keys    []string
	values  [][]byte
	stamps  []int   // offset of the time in each value
	fastest float64 // the highest rate that etcd has reached, events per second
}

// changedObjects is the number of objects that change in turn.
const changedObjects = 10_000

func newStampedChanges(s *Sample) (*stampedChanges, error) {
	n := min(changedObjects, s.Data.ConfigMaps) / txnKeys * txnKeys
	if n == 0 {
		return nil, fmt.Errorf("there are %d ConfigMaps, fewer than change at once", s.Data.ConfigMaps)
	}
	c := &stampedChanges{client: s.Etcd.Client}
	placeholder := time.Unix(0, 1_111_111_111_111_111_111) // as many digits as every time of this century has
	digits := []byte(fmt.Sprint(placeholder.UnixNano()))
	for i, index := range s.Rand.Perm(s.Data.ConfigMaps)[:n] {
		cm := dataset.StampedConfigMap(index, 1+s.Number, placeholder)
		value, err := dataset.Encode(cm)
		if err != nil {
			return nil, err
		}
		c.keys = append(c.keys, dataset.ConfigMapKey(cm.Name))
		c.values = append(c.values, value)
		c.stamps = append(c.stamps, bytes.Index(value, digits))
		if c.stamps[i] < 0 {
			return nil, fmt.Errorf("%s does not hold its time as text", cm.Name)
		}
	}
	return c, nil
}

// txn changes txnKeys objects in one revision.
func (c *stampedChanges) txn(ctx context.Context, at int) error {
	ops := make([]clientv3.Op, txnKeys)
	stamp := fmt.Sprint(time.Now().UnixNano())
	for i := range ops {
		n := (at + i) % len(c.keys)
		var value strings.Builder
		value.Grow(len(c.values[n]))
		value.Write(c.values[n][:c.stamps[n]])
		value.WriteString(stamp)
		value.Write(c.values[n][c.stamps[n]+len(stamp):])
		ops[i] = clientv3.OpPut(c.keys[n], value.String())
	}
	if _, err := c.client.Txn(ctx).Then(ops...).Commit(); err != nil {
		return fmt.Errorf("change objects: %w", err)
	}
	return nil
}

// climb writes at a rate for Sizes.LoneStep while one watcher reads, which it returns when it is closed. The rate is sustained if
// every event has arrived when a fifth of that time has passed after the last write.
func (c *stampedChanges) climb(ctx context.Context, s *Sample, rate float64) (*watches, rung, error) {
	revision, err := dataset.Revision(ctx, c.client)
	if err != nil {
		return nil, rung{}, err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	one := watchSet{n: 1, after: revision, path: func(int) string { return watchOf(allConfigMaps, "", true, revision) }, txns: true}
	w, err := one.open(ctx, []*target.Conn{conn})
	if err != nil {
		return nil, rung{}, err
	}
	defer w.close()
	var txns atomic.Int64
	began := time.Now()
	at := pace{interval: time.Duration(float64(time.Second) * txnKeys / rate), duration: s.Sizes.LoneStep, atOnce: txnsAtOnce}
	err = at.run(ctx, func(ctx context.Context, i int) error {
		txns.Add(1)
		return c.txn(ctx, i*txnKeys)
	})
	if err != nil {
		return nil, rung{}, err
	}
	writing := time.Since(began)
	written := int(txns.Load()) * txnKeys
	if err := w.drain(ctx, written, s.Sizes.LoneStep); err != nil {
		return nil, rung{}, err
	}
	r := rung{rate: float64(written) / writing.Seconds(), lag: time.Since(began) - writing}
	c.fastest = max(c.fastest, r.rate)
	r.saturated = r.rate < saturated*rate
	ended := w.ended.Load() > 0
	w.close()
	stream := w.streams[0]
	delivered := len(stream.latencies)
	switch {
	case errors.Is(stream.err, errWrongEvent):
		return nil, r, stream.err
	case delivered > written:
		return nil, r, fmt.Errorf("%w: %d events of %d changes", errWrongEvent, delivered, written)
	case ended:
		r.why = fmt.Sprintf("the watch was ended (%v)", stream.err)
	case delivered < written:
		r.why = fmt.Sprintf("%s of %s events did not arrive", grouped(written-delivered), grouped(written))
	case r.lag > s.Sizes.LoneStep/5:
		r.why = fmt.Sprintf("the last event came %s late", Seconds.Format(r.lag.Seconds()))
	default:
		r.sustained = true
	}
	return w, r, nil
}
