package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// The probes' cluster, and their rates. They are far below the highest ones: a server that is not busy spends more on each operation, for
// example because it wakes threads more often, and so do the servers of the simulated clusters.
const (
	probeNodes     = 200
	probePods      = 4000
	probeRate      = 150.0 // of changes
	requestRate    = 450.0 // of requests: about as many as a simulated cluster sends of all kinds
	probeWatchers  = 200
	probeIdleNodes = 300
)

// prober measures one operation after the other.
type prober struct {
	*cluster
	config config
	out    *scaling.Measured
	idle   scaling.Load
	conns  []*target.Conn // of nodes
}

// measureRequestCosts measures the costs of requests.
func measureRequestCosts(ctx context.Context, config config, out *scaling.Measured) error {
	return probe(ctx, config, out, (*prober).measureRequests)
}

// measureWatchCosts measures the costs of watches and of further servers.
func measureWatchCosts(ctx context.Context, config config, out *scaling.Measured) error {
	return probe(ctx, config, out, (*prober).measureDelivery, (*prober).measureFeed, (*prober).measureWatches)
}

// probe measures costs on a cluster without other activity.
func probe(ctx context.Context, config config, out *scaling.Measured, measures ...func(*prober, context.Context) error) error {
	c, err := startCluster(ctx, config, scaling.Cluster{Nodes: probeNodes, Pods: probePods, PodLifetime: math.Inf(1), SliceEndpoints: 20, Speed: 1})
	if err != nil {
		return err
	}
	defer c.close()
	if err := c.fill(ctx); err != nil {
		return err
	}
	p := &prober{cluster: c, config: config, out: out}
	for range probeNodes {
		p.conns = append(p.conns, c.engine.DialCounting(c.traffic))
	}
	defer target.CloseAll(p.conns)
	if err := p.measureIdle(ctx); err != nil {
		return err
	}
	for _, measure := range measures {
		if err := measure(p, ctx); err != nil {
			return err
		}
	}
	return nil
}

// node returns the connection of a node.
func (p *prober) node(i int) *target.Conn { return p.conns[i%len(p.conns)] }

// measureIdle measures server and etcd without clients.
func (p *prober) measureIdle(ctx context.Context) error {
	if err := process.WaitQuiet(ctx, quiet, p.engine.Child, p.etcd.Child); err != nil {
		return err
	}
	const tries = 3 // the least of them: the server has work of its own now and then
	for try := range tries {
		load, _, err := p.during(ctx, func(ctx context.Context) error { return wait(ctx, p.config.probe) })
		if err != nil {
			return err
		}
		if try == 0 || load.Server < p.idle.Server {
			p.idle = load
		}
	}
	p.set(scaling.Idle, p.idle, 1, scaling.Load{})
	return nil
}

// wait waits for a duration.
func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// set stores the cost of one operation: load minus others, divided by rate.
func (p *prober) set(op scaling.Op, load scaling.Load, rate float64, others scaling.Load) {
	cost := scaling.Cost{
		Server:   (load.Server - others.Server) * 1e6 / rate,
		Etcd:     (load.Etcd - others.Etcd) * 1e6 / rate,
		Sent:     (load.Sent - others.Sent) / rate,
		Received: (load.Received - others.Received) / rate,
		FromEtcd: (load.FromEtcd - others.FromEtcd) / rate,
		Fsyncs:   (load.Fsyncs - others.Fsyncs) / rate,
	}
	for _, v := range []*float64{&cost.Server, &cost.Etcd, &cost.Sent, &cost.Received, &cost.FromEtcd, &cost.Fsyncs} {
		*v = max(0, math.Round(*v*100)/100)
	}
	p.out.Costs[op] = cost
	p.config.say("%-14s server %6.0f µs, etcd %6.0f µs, sent %6.0f B, received %6.0f B, from etcd %6.0f B, %.2f fsyncs (speed %.2f)",
		op, cost.Server, cost.Etcd, cost.Sent, cost.Received, cost.FromEtcd, cost.Fsyncs, p.factor)
}

// loadOf runs op at a rate and returns the load and the rate that was reached.
func (p *prober) loadOf(ctx context.Context, perSecond float64, op func(ctx context.Context, i int) error) (scaling.Load, float64, error) {
	n := int(perSecond * p.config.probe.Seconds())
	began := time.Now()
	load, _, err := p.during(ctx, func(ctx context.Context) error {
		limiter := rate.NewLimiter(rate.Limit(perSecond), 1)
		return each(ctx, n, func(ctx context.Context, i int) error {
			if err := limiter.Wait(ctx); err != nil {
				return err
			}
			return op(ctx, i)
		})
	})
	return load, float64(n) / time.Since(began).Seconds(), err
}

// measureRequests measures requests without watches.
func (p *prober) measureRequests(ctx context.Context) error {
	n := int(requestRate * p.config.probe.Seconds())
	pods := make([]*corev1.Pod, n)
	var mu sync.Mutex // guards pods
	pod := func(i int) *corev1.Pod {
		mu.Lock()
		defer mu.Unlock()
		return pods[i]
	}
	podOp := func(f func(context.Context, *target.Conn, *corev1.Pod) error) func(context.Context, int) error {
		return func(ctx context.Context, i int) error { return f(ctx, p.node(i), pod(i)) }
	}
	// The first requests of a server cost more.
	if _, _, err := p.loadOf(ctx, requestRate, func(ctx context.Context, i int) error { return p.renewLease(ctx, p.node(i), i) }); err != nil {
		return err
	}
	for _, probe := range []struct {
		op  scaling.Op
		run func(ctx context.Context, i int) error
	}{
		{scaling.LeaseUpdate, func(ctx context.Context, i int) error { return p.renewLease(ctx, p.node(i), i) }},
		{scaling.NodeStatus, func(ctx context.Context, i int) error { return p.reportNode(ctx, p.node(i), i) }},
		{scaling.PodCreate, func(ctx context.Context, i int) error {
			created, err := p.createPod(ctx, probePods+i)
			mu.Lock()
			defer mu.Unlock()
			pods[i] = created
			return err
		}},
		{scaling.PodBind, func(ctx context.Context, i int) error { return p.bind(ctx, pod(i)) }},
		{scaling.Token, podOp(p.requestToken)},
		{scaling.PodStatus, podOp(func(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
			return p.patchStatus(ctx, conn, pod, corev1.PodRunning)
		})},
		{scaling.Get, podOp(p.getPod)},
		{scaling.EventCreate, podOp(func(ctx context.Context, conn *target.Conn, pod *corev1.Pod) error {
			return p.createEvent(ctx, conn, pod, "Started")
		})},
		{scaling.PodDelete, podOp(p.deletePod)},
		{scaling.PodRemove, podOp(p.removePod)},
		{scaling.SliceUpdate, func(ctx context.Context, i int) error { return p.updateSlice(ctx, i, p.shape.SliceEndpoints) }},
		{scaling.List, p.listNamespace},
	} {
		load, rate, err := p.loadOf(ctx, requestRate, probe.run)
		if err != nil {
			return fmt.Errorf("%s: %w", probe.op, err)
		}
		p.set(probe.op, load, rate, p.idle)
	}
	return nil
}

// measureDelivery measures frames of watches: the load of changes with watches, minus that without. The changes go to etcd, not through the
// server, so that the frames are most of its work.
func (p *prober) measureDelivery(ctx context.Context) error {
	pod := func(ctx context.Context, i int) error {
		pod := p.live[i%len(p.live)].DeepCopy()
		pod.Status.StartTime = &metav1.Time{Time: time.Unix(int64(i), 0)}
		return p.put(ctx, podKey(pod), pod)
	}
	slice := func(ctx context.Context, i int) error {
		changed := newSlice(i%len(p.slices), p.shape.SliceEndpoints, i)
		changed.ObjectMeta = *p.slices[i%len(p.slices)].obj.ObjectMeta.DeepCopy()
		changed.ResourceVersion = ""
		return p.put(ctx, "/registry/endpointslices/"+sliceNamespace+"/"+changed.Name, changed)
	}
	for _, probe := range []struct {
		op      scaling.Op
		rate    float64
		watches int
		watch   func(i int) nodeWatch
		run     func(ctx context.Context, i int) error
	}{
		{scaling.DeliverPod, 2 * probeRate, probeNodes, func(i int) nodeWatch { return nodeWatches(i)[0] }, pod},
		{scaling.DeliverAll, probeRate, scaling.PodInformers, func(int) nodeWatch { return nodeWatch{"/api/v1/pods?timeoutSeconds=3600", scaling.DeliverAll} }, pod},
		{scaling.DeliverSlice, probeRate / 10, probeWatchers, func(int) nodeWatch {
			return nodeWatch{"/apis/discovery.k8s.io/v1/endpointslices?" + proxySelector, scaling.DeliverSlice}
		}, slice},
	} {
		if err := p.deliver(ctx, probe.op, probe.rate, probe.watches, probe.watch, probe.run); err != nil {
			return fmt.Errorf("%s: %w", probe.op, err)
		}
	}
	return nil
}

// deliver measures one kind of frames: it runs changes without and with watches in turn, and takes the median of the differences.
func (p *prober) deliver(ctx context.Context, op scaling.Op, perSecond float64, watches int, watch func(i int) nodeWatch, run func(ctx context.Context, i int) error) error {
	const turns = 3
	var costs []scaling.Cost
	for range turns {
		without, _, err := p.loadOf(ctx, perSecond, run)
		if err != nil {
			return err
		}
		f := &fleet{}
		for i := range watches {
			f.watches = append(f.watches, &openWatch{nodeWatch: watch(i), conn: p.node(i)})
		}
		if err := each(ctx, len(f.watches), func(ctx context.Context, i int) error { return p.reopen(ctx, f.watches[i]) }); err != nil {
			return err
		}
		frames := p.watches.frames[op].Load()
		began := time.Now()
		load, _, err := p.loadOf(ctx, perSecond, run)
		delivered := float64(p.watches.frames[op].Load()-frames) / time.Since(began).Seconds()
		f.close()
		if err != nil {
			return err
		}
		if delivered == 0 {
			return errors.New("the watches delivered nothing")
		}
		p.set(op, load, delivered, without)
		costs = append(costs, p.out.Costs[op])
	}
	slices.SortFunc(costs, func(a, b scaling.Cost) int { return cmp.Compare(a.Server, b.Server) })
	median := costs[turns/2]
	median.Etcd, median.Fsyncs, median.FromEtcd = 0, 0, 0 // etcd has no part in a delivery
	p.out.Costs[op] = median
	return nil
}

// measureFeed measures another server on the same etcd, while leases are renewed, and its share of etcd's work.
func (p *prober) measureFeed(ctx context.Context) error {
	renew := func(ctx context.Context, i int) error { return p.renewLease(ctx, p.node(i), i) }
	const perSecond = 3 * probeRate
	alone, _, err := p.loadOf(ctx, perSecond, renew)
	if err != nil {
		return err
	}
	other, err := p.startServer(ctx, p.config, "-other")
	if err != nil {
		return err
	}
	defer other.Stop()
	if err := process.WaitQuiet(ctx, quiet, other.Child); err != nil {
		return err
	}
	var used [3]time.Duration // by the other server: before, after a time without writes, after writes
	if used[0], err = other.CPU(); err != nil {
		return err
	}
	if err := wait(ctx, p.config.probe); err != nil {
		return err
	}
	if used[1], err = other.CPU(); err != nil {
		return err
	}
	load, rate, err := p.loadOf(ctx, perSecond, renew)
	if err != nil {
		return err
	}
	if used[2], err = other.CPU(); err != nil {
		return err
	}
	seconds := p.config.probe.Seconds()
	p.set(scaling.Feed,
		scaling.Load{Server: (used[2] - used[1]).Seconds() / seconds * p.factor, Etcd: load.Etcd, FromEtcd: load.FromEtcd}, rate,
		scaling.Load{Server: (used[1] - used[0]).Seconds() / seconds * p.factor, Etcd: alone.Etcd, FromEtcd: alone.FromEtcd})
	return nil
}

// measureWatches measures the opening of watches, and idle ones.
func (p *prober) measureWatches(ctx context.Context) error {
	f := &fleet{}
	for i := range probeIdleNodes {
		conn := p.engine.DialCounting(p.traffic)
		f.conns = append(f.conns, conn)
		for _, w := range nodeWatches(i) {
			f.watches = append(f.watches, &openWatch{nodeWatch: w, conn: conn})
		}
	}
	defer f.close()
	if err := each(ctx, len(f.watches), func(ctx context.Context, i int) error { return p.reopen(ctx, f.watches[i]) }); err != nil {
		return err
	}
	if err := process.WaitQuiet(ctx, quiet, p.engine.Child, p.etcd.Child); err != nil {
		return err
	}
	idle, rates, err := p.during(ctx, func(ctx context.Context) error { return wait(ctx, 65*time.Second) })
	if err != nil {
		return err
	}
	p.set(scaling.Bookmark, idle, rates[scaling.Bookmark], p.idle)
	load, rate, err := p.loadOf(ctx, probeRate, func(ctx context.Context, i int) error { return p.reopen(ctx, f.watches[i]) })
	if err != nil {
		return err
	}
	p.set(scaling.WatchOpen, load, rate, idle)
	return nil
}
