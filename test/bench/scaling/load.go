package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// paced calls op at a rate for duration, atOnce at a time at most, and returns when all calls have ended.
func paced(ctx context.Context, perSecond float64, duration time.Duration, op func(ctx context.Context, i int) error) error {
	if perSecond <= 0 {
		return nil
	}
	deadline, cancel := context.WithTimeout(ctx, duration)
	defer cancel()
	limiter := rate.NewLimiter(rate.Limit(perSecond), 1)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(atOnce)
	for i := 0; limiter.Wait(deadline) == nil && ctx.Err() == nil; i++ {
		group.Go(func() error { return op(ctx, i) })
	}
	return group.Wait()
}

// fleet is the nodes' connections and watches.
type fleet struct {
	conns   []*target.Conn
	watches []*openWatch
}

// openWatch is a watch that is reopened from time to time. One goroutine at a time uses it.
type openWatch struct {
	nodeWatch
	conn *target.Conn
	*watch
}

// connect opens the connections of n nodes and all watches of nodes and informers.
func (c *cluster) connect(ctx context.Context, n int) (*fleet, error) {
	f := &fleet{conns: make([]*target.Conn, n), watches: make([]*openWatch, 0, n*scaling.NodeWatches)}
	for i := range n {
		f.conns[i] = c.engine.DialCounting(c.traffic)
		for _, w := range nodeWatches(i) {
			f.watches = append(f.watches, &openWatch{nodeWatch: w, conn: f.conns[i]})
		}
	}
	for i, w := range informerWatches() {
		f.watches = append(f.watches, &openWatch{nodeWatch: w, conn: c.conn(i)})
	}
	return f, each(ctx, len(f.watches), func(ctx context.Context, i int) error { return c.reopen(ctx, f.watches[i]) })
}

// reopen ends a watch, if it is open, and opens it at etcd's newest revision.
func (c *cluster) reopen(ctx context.Context, w *openWatch) error {
	if w.watch != nil {
		w.stop()
	}
	revision, err := dataset.Revision(ctx, c.etcd.Client)
	if err != nil {
		return err
	}
	c.count(scaling.WatchOpen)
	w.watch, err = c.watches.start(w.conn, w.path, w.op, fmt.Sprint(revision))
	return err
}

// close ends all watches and connections.
func (f *fleet) close() {
	for _, w := range f.watches {
		if w.watch != nil {
			w.cancel()
		}
	}
	for _, w := range f.watches {
		if w.watch != nil {
			<-w.done
		}
	}
	target.CloseAll(f.conns)
}

// run runs the activity of the cluster for duration: that of Cluster.Rates.
func (c *cluster) run(ctx context.Context, f *fleet, duration time.Duration) error {
	rates, speed := c.shape.Rates(), c.shape.Speed
	group, ctx := errgroup.WithContext(ctx)
	start := func(perSecond float64, op func(ctx context.Context, i int) error) {
		group.Go(func() error { return paced(ctx, perSecond, duration, op) })
	}
	node := func(i int) *target.Conn { return f.conns[i%len(f.conns)] }
	if !c.kwok {
		start(rates[scaling.LeaseUpdate], func(ctx context.Context, i int) error { return c.renewLease(ctx, node(i), i) })
		start(rates[scaling.NodeStatus], func(ctx context.Context, i int) error { return c.reportNode(ctx, node(i), i) })
	}
	start(c.shape.Churn(), func(ctx context.Context, _ int) error { return c.replacePod(ctx, f.conns) })
	start(rates[scaling.Token]-c.shape.Churn(), func(ctx context.Context, i int) error {
		pod, err := c.livePod(i)
		if err != nil {
			return err
		}
		return c.requestToken(ctx, node(i), pod)
	})
	start(rates[scaling.Get]-2*c.shape.Churn(), func(ctx context.Context, i int) error {
		c.count(scaling.Get)
		return discard(ctx, node(i), "GET", nodePath+"/"+nodeName(i%c.shape.Nodes)+"?resourceVersion=0", 200)
	})
	start(float64(c.shape.Nodes)*speed/1000, c.listNamespace)
	order := rand.Perm(len(f.watches))
	start(rates[scaling.WatchOpen], func(ctx context.Context, i int) error {
		if i >= len(order) {
			return nil // each is reopened once at most, so that no two goroutines use one
		}
		return c.reopen(ctx, f.watches[order[i]])
	})
	return group.Wait()
}

// simulate measures a cluster of this shape.
func simulate(ctx context.Context, config config, name string, shape scaling.Cluster, kwok bool) (scaling.Check, error) {
	check := scaling.Check{Name: name, Cluster: shape}
	c, err := startCluster(ctx, config, shape)
	if err != nil {
		return check, err
	}
	defer c.close()
	c.kwok = kwok
	config.say("%s: creating %d nodes and %d pods", name, shape.Nodes, shape.Pods)
	if err := c.fill(ctx); err != nil {
		return check, err
	}
	for _, w := range informerWatches() { // informers list first
		if err := discard(ctx, c.conn(0), "GET", w.path+"&resourceVersion=0", 200); err != nil {
			return check, err
		}
	}
	if kwok {
		stop, err := c.startKwok(ctx, config)
		if err != nil {
			return check, err
		}
		defer stop()
	}
	f, err := c.connect(ctx, shape.Nodes)
	if err != nil {
		return check, err
	}
	defer f.close()
	config.say("%s: %d watches are open", name, c.watches.open.Load())
	if err := c.run(ctx, f, config.warm); err != nil {
		return check, err
	}
	began := time.Now()
	var before requestCounts
	if before, err = c.requests(ctx); err != nil {
		return check, err
	}
	check.Measured, check.Rates, err = c.during(ctx, func(ctx context.Context) error { return c.run(ctx, f, config.window) })
	if err != nil {
		return check, err
	}
	if kwok {
		after, err := c.requests(ctx)
		if err != nil {
			return check, err
		}
		after.addKwok(check.Rates, before, time.Since(began).Seconds())
		check.Measured.Sent, check.Measured.Received = 0, 0 // kwok's connections are not counted
	}
	check.Seconds = (time.Since(began) + config.warm).Seconds()
	check.Measured.Resident, check.Measured.Memory, err = c.settle(ctx)
	return check, err
}

// startKwok starts kwok's controller for all nodes and returns when it holds a lease of every node.
func (c *cluster) startKwok(ctx context.Context, config config) (stop func(), err error) {
	kubeconfig := filepath.Join(c.dir, "kwok.kubeconfig")
	if err := c.engine.WriteKubeconfig(kubeconfig); err != nil {
		return nil, err
	}
	args := []string{"--kubeconfig=" + kubeconfig, "--manage-all-nodes=true", "--node-lease-duration-seconds=40", "--cidr=10.128.0.0/10"}
	for _, dir := range []string{"node/fast", "node/heartbeat-with-lease", "pod/fast"} {
		stages, err := filepath.Glob(filepath.Join(config.stages, dir, "[np]o*.yaml")) // not kustomization.yaml
		if err != nil || len(stages) == 0 {
			return nil, fmt.Errorf("-stages %s has no stages in %s", config.stages, dir)
		}
		for _, stage := range stages {
			args = append(args, "--config="+stage)
		}
	}
	kwok, err := process.Start(process.Spec{Name: "kwok", Path: config.kwok, Log: filepath.Join(c.dir, "kwok.log"), Args: args})
	if err != nil {
		return nil, err
	}
	stop = func() { _ = kwok.Stop(syscall.SIGTERM, quiet) } // gone in any case
	err = poll(ctx, func() (bool, error) {
		if err := kwok.Ended(); err != nil {
			return false, err
		}
		leases, err := c.etcd.Client.Get(ctx, "/registry/leases/"+leaseNamespace+"/load-", countKeys...)
		return err == nil && int(leases.Count) >= c.shape.Nodes, err
	})
	if err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}
