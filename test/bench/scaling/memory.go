package main

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Numbers of objects of the measurement of memory: enough that a kind is more than the variation of the collector.
const (
	memoryPods      = 30_000
	memoryNodes     = 2_000
	memorySlices    = 4_000
	memoryEvents    = 50_000
	memoryRevisions = 40_000
	memoryWatchers  = 400 // nodes with their watches
)

// measureMemory measures the coefficients of memory: it adds one kind after the other to a server.
func measureMemory(ctx context.Context, config config, out *scaling.Measured) error {
	c, err := startCluster(ctx, config, scaling.Cluster{Nodes: memoryNodes, Pods: memoryPods, PodLifetime: math.Inf(1), SliceEndpoints: 20, Speed: 1})
	if err != nil {
		return err
	}
	defer c.close()
	k := &out.Memory
	if _, k.Base, err = c.settle(ctx); err != nil {
		return err
	}
	if k.EtcdBase, err = c.etcdMemory(); err != nil {
		return err
	}
	if err := c.fillNamespaces(ctx); err != nil {
		return err
	}
	g := &grower{cluster: c, config: config, last: k.Base}
	if err := g.growPods(ctx, k); err != nil {
		return err
	}
	if err := g.grow(ctx, "node", &k.Node, memoryNodes, c.fillAllNodes); err != nil {
		return err
	}
	if err := g.grow(ctx, "slice", &k.Slice, memorySlices, func(ctx context.Context) error {
		return then(c.fillSlices(ctx, memorySlices), func() error { return discard(ctx, c.conn(0), "GET", slicePath+"?resourceVersion=0", 200) })
	}); err != nil {
		return err
	}
	before, err := c.stored(ctx)
	if err != nil {
		return err
	}
	if err := g.grow(ctx, "event", &k.Event, memoryEvents, c.fillEvents); err != nil {
		return err
	}
	after, err := c.stored(ctx)
	if err != nil {
		return err
	}
	k.StoredRest = math.Round((after - before) / memoryEvents)
	var f *fleet
	if err := g.grow(ctx, "watch", &k.Watch, memoryWatchers*scaling.NodeWatches, func(ctx context.Context) (err error) {
		f, err = c.connect(ctx, memoryWatchers)
		return err
	}); err != nil {
		return err
	}
	f.close()
	if _, g.last, err = c.settle(ctx); err != nil {
		return err
	}
	return g.grow(ctx, "revision", &k.Revision, memoryRevisions, c.changePods)
}

// grower adds objects to a server and measures its live memory.
type grower struct {
	*cluster
	config config
	last   float64 // live bytes before the next kind
}

// grow runs fill, which adds n of one kind, and stores the live bytes of each.
func (g *grower) grow(ctx context.Context, name string, coefficient *float64, n int, fill func(context.Context) error) error {
	if err := fill(ctx); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	_, now, err := g.settle(ctx)
	*coefficient = math.Round(max(0, (now-g.last)/float64(n)))
	g.config.say("memory of a %-8s %8.0f B", name, *coefficient)
	g.last = now
	return err
}

// growPods adds pods, and measures etcd too.
func (g *grower) growPods(ctx context.Context, k *scaling.Memory) error {
	etcd, err := g.etcdMemory()
	if err != nil {
		return err
	}
	stored, err := g.stored(ctx)
	if err != nil {
		return err
	}
	if err := g.grow(ctx, "pod", &k.Pod, memoryPods, func(ctx context.Context) error {
		return then(g.fillPods(ctx, memoryPods), func() error { return discard(ctx, g.conn(0), "GET", "/api/v1/pods?resourceVersion=0", 200) })
	}); err != nil {
		return err
	}
	etcdAfter, err := g.etcdMemory()
	if err != nil {
		return err
	}
	storedAfter, err := g.stored(ctx)
	k.EtcdPod, k.StoredPod = math.Round((etcdAfter-etcd)/memoryPods), math.Round((storedAfter-stored)/memoryPods)
	return err
}

// then calls next if err is nil.
func then(err error, next func() error) error {
	if err != nil {
		return err
	}
	return next()
}

func (c *cluster) etcdMemory() (float64, error) {
	memory, err := c.etcd.Memory()
	return float64(memory.Resident), err
}

// stored is the number of bytes of etcd's database in use.
func (c *cluster) stored(ctx context.Context) (float64, error) {
	status, err := c.etcd.Client.Status(ctx, c.etcd.Endpoint)
	if err != nil {
		return 0, fmt.Errorf("status of etcd: %w", err)
	}
	return float64(status.DbSizeInUse), nil
}

func (c *cluster) fillAllNodes(ctx context.Context) error {
	return then(c.fillNodes(ctx, memoryNodes), func() error { return discard(ctx, c.conn(0), "GET", nodePath+"?resourceVersion=0", 200) })
}

// fillEvents writes Events to etcd.
func (c *cluster) fillEvents(ctx context.Context) error {
	return each(ctx, memoryEvents, func(ctx context.Context, i int) error {
		event := newEvent(c.live[i%len(c.live)], int64(i), reasons[i%len(reasons)])
		event.UID, event.CreationTimestamp = types.UID(uuid.NewString()), metav1.Now()
		return c.put(ctx, "/registry/events/"+event.Namespace+"/"+event.Name, event)
	})
}

// changePods writes changed pods to etcd.
func (c *cluster) changePods(ctx context.Context) error {
	return each(ctx, memoryRevisions, func(ctx context.Context, i int) error {
		pod := c.live[i%(memoryRevisions/8)].DeepCopy() // each changes 8 times
		pod.Status.StartTime = &metav1.Time{Time: time.Unix(int64(i), 0)}
		return c.put(ctx, podKey(pod), pod)
	})
}

// measureEtcd measures how many writes per second an etcd with fsync accepts from many clients.
func measureEtcd(ctx context.Context, config config, out *scaling.Measured) error {
	c, err := startCluster(ctx, config, scaling.Cluster{Nodes: 1, Pods: 1, PodLifetime: math.Inf(1), SliceEndpoints: 1, Speed: 1})
	if err != nil {
		return err
	}
	defer c.close()
	c.engine.Stop() // etcd alone
	l := &out.Etcd
	for _, size := range []struct {
		bytes          int
		rate, cpu, log *float64
	}{{300, &l.Small, &l.SmallCPU, &l.SmallFsync}, {4096, &l.Large, &l.LargeCPU, new(float64)}} {
		value := string(make([]byte, size.bytes))
		syncs, err := c.fsyncs(ctx)
		if err != nil {
			return err
		}
		before, err := c.etcd.CPU()
		if err != nil {
			return err
		}
		began, n := time.Now(), new(atomic.Int64)
		if err := hammer(ctx, c.etcd.Client, value, config.probe, n); err != nil {
			return err
		}
		seconds := time.Since(began).Seconds()
		after, err := c.etcd.CPU()
		if err != nil {
			return err
		}
		all, err := c.fsyncs(ctx)
		if err != nil {
			return err
		}
		written := float64(n.Load())
		*size.rate, *size.cpu = math.Round(written/seconds), math.Round((after-before).Seconds()*1e6/written)
		*size.log = math.Round((all-syncs)/written*1000) / 1000
		config.say("etcd: %.0f writes/s of %d B, %.0f µs of CPU and %.3f fsyncs each", *size.rate, size.bytes, *size.cpu, (all-syncs)/written)
	}
	series, err := c.etcd.Series(ctx, "etcd_disk_wal_fsync_duration_seconds_bucket")
	if err != nil {
		return err
	}
	l.FsyncP50 = medianBucket(series) * 1000
	return nil
}

func (c *cluster) fsyncs(ctx context.Context) (float64, error) {
	series, err := c.etcd.Series(ctx, "etcd_disk_wal_fsync_duration_seconds_count")
	sum := 0.0
	for _, s := range series {
		sum += s.Value
	}
	return sum, err
}

// etcdWriters is the number of writers of measureEtcd: etcd's group commit has enough to batch.
const etcdWriters = 256

// hammer writes value to many keys for a duration, and counts the writes.
func hammer(ctx context.Context, client *clientv3.Client, value string, duration time.Duration, n *atomic.Int64) error {
	until := time.Now().Add(duration)
	return eachOf(ctx, etcdWriters, etcdWriters, func(ctx context.Context, w int) error {
		for i := 0; time.Now().Before(until); i++ {
			if _, err := client.Put(ctx, fmt.Sprintf("/load/%d/%d", w, i%100), value); err != nil {
				return err
			}
			n.Add(1)
		}
		return nil
	})
}

// medianBucket returns the upper bound, in seconds, of the bucket with the median.
func medianBucket(buckets []target.Series) float64 {
	total, bound := 0.0, math.Inf(1)
	for _, b := range buckets {
		total = max(total, b.Value)
	}
	for _, b := range buckets {
		var le float64
		if _, err := fmt.Sscan(b.Labels["le"], &le); err == nil && b.Value >= total/2 {
			bound = min(bound, le)
		}
	}
	return bound
}
