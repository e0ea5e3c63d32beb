package replica

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/test/harness"
)

const (
	etcdWrites  = 1000 // a second, straight to etcd
	changedMaps = 1000 // ConfigMaps that these writes change
)

// etcdFigures measures the cost of one more replica to an etcd, which already feeds a primary and a
// replica, while ConfigMaps of 1 KB change. The writes come straight from a client of etcd, so that
// no API server limits them.
func etcdFigures(t *testing.T, table *harness.Figures) {
	ctx := harness.Context(t, 8*time.Minute)
	e := harness.New(t).DefaultGC()
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, append(front.TrustFlags(), harness.Unchecked(unchecked))...)
	e.Replica(etcd, front, []*harness.Server{primary}, harness.Unchecked(unchecked))
	more := e.Replica(etcd, front, []*harness.Server{primary}, harness.Unchecked(unchecked))
	harness.Check(t, more.Stop())

	client := etcd.Client()
	for _, rate := range []int{figureWrites, etcdWrites} {
		changes := startChanges(t, ctx, client, rate)
		var without, with []etcdLoad
		for pair, second := range harness.Phases(figurePairs) {
			if !second {
				without = append(without, loadOver(t, ctx, etcd, changes))
				t.Logf("%d writes/s, pair %d, without: %.3f", rate, pair+1, without[pair])
				continue
			}
			more.Restart()
			awaitCaughtUp(t, ctx, client, more)
			with = append(with, loadOver(t, ctx, etcd, changes))
			t.Logf("%d writes/s, pair %d, with: %.3f", rate, pair+1, with[pair])
			harness.Check(t, more.Stop())
		}
		changes.stop(t)
		cpu := func(l etcdLoad) float64 { return 100 * l.Cores }
		at := fmt.Sprintf("at %.0f writes/s to etcd", harness.Median(valuesOf(with, func(l etcdLoad) float64 { return l.Writes })))
		table.Row("CPU of etcd for one more replica "+at, fmt.Sprintf("%.1f %% of a core, from %.1f to %.1f", harness.Median(differences(without, with, cpu)),
			harness.Median(valuesOf(without, cpu)), harness.Median(valuesOf(with, cpu))), "-")
		if rate == etcdWrites {
			table.Row("watch streams, and watches, of etcd for one more replica", fmt.Sprintf("%.0f, %.0f",
				harness.Median(differences(without, with, func(l etcdLoad) float64 { return l.Streams })),
				harness.Median(differences(without, with, func(l etcdLoad) float64 { return l.Watches }))), "-")
		}
	}
}

// etcdLoad are the measurements of a phase.
type etcdLoad struct {
	Cores            float64 // CPU time of etcd per second
	Writes           float64 // per second, that the client reached
	Streams, Watches float64 // at the end of the phase
}

// loadOver measures for figureTime, after about a second of writes.
func loadOver(t *testing.T, ctx context.Context, etcd *harness.Etcd, c *changes) (l etcdLoad) {
	t.Helper()
	first := c.done.Load()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		done := c.done.Load() - first
		return done >= int64(c.rate), fmt.Errorf("%d writes of %d", done, c.rate)
	}))
	written, began := c.done.Load(), time.Now()
	before, err := etcd.CPU()
	harness.Check(t, err)
	harness.Check(t, pause(ctx, figureTime))
	after, err := etcd.CPU()
	harness.Check(t, err)
	seconds := time.Since(began).Seconds()
	l.Cores, l.Writes = (after-before).Seconds()/seconds, float64(c.done.Load()-written)/seconds
	for name, value := range map[string]*float64{"etcd_debugging_mvcc_watch_stream_total": &l.Streams, "etcd_debugging_mvcc_watcher_total": &l.Watches} {
		*value, err = etcd.Metric(ctx, name)
		harness.Check(t, err)
	}
	return l
}

func valuesOf(phases []etcdLoad, of func(etcdLoad) float64) (values []float64) {
	for _, l := range phases {
		values = append(values, of(l))
	}
	return values
}

// differences returns the differences of the pairs.
func differences(without, with []etcdLoad, of func(etcdLoad) float64) (values []float64) {
	for i := range with {
		values = append(values, of(with[i])-of(without[i]))
	}
	return values
}

// awaitCaughtUp returns when a replica that is ready has received a change that is newer than its
// start.
func awaitCaughtUp(t *testing.T, ctx context.Context, etcd *clientv3.Client, replica *harness.Server) {
	t.Helper()
	value, err := storedMap(0, "newer")
	harness.Check(t, err)
	r, err := etcd.Put(ctx, mapKey(0), value)
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := replica.API().List(ctx, configMaps, "limit=1&resourceVersion=0")
		return err == nil && harness.Revision(t, list.Metadata.ResourceVersion) >= r.Header.Revision, err
	}))
}

// changes are writes of ConfigMaps to etcd at a rate.
type changes struct {
	rate   int // a second
	done   atomic.Int64
	cancel context.CancelFunc
	group  *errgroup.Group
}

// startChanges writes rate ConfigMaps a second until stop.
func startChanges(t *testing.T, ctx context.Context, etcd *clientv3.Client, rate int) *changes {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	c := &changes{rate: rate, cancel: cancel, group: new(errgroup.Group)}
	const writers, variants = 20, 2
	var values [variants][]string
	for v := range values {
		for i := range changedMaps {
			value, err := storedMap(i, strconv.Itoa(v))
			harness.Check(t, err)
			values[v] = append(values[v], value)
		}
	}
	for w := range writers {
		c.group.Go(func() error {
			ticker := time.NewTicker(time.Second * writers / time.Duration(rate))
			defer ticker.Stop()
			for n := w; ; n += writers {
				select {
				case <-ctx.Done():
					return nil
				case <-ticker.C:
				}
				i, v := n%changedMaps, n/changedMaps%variants
				if _, err := etcd.Put(ctx, mapKey(i), values[v][i]); err != nil {
					if ctx.Err() != nil {
						return nil
					}
					return err
				}
				c.done.Add(1)
			}
		})
	}
	return c
}

func (c *changes) stop(t *testing.T) {
	t.Helper()
	c.cancel()
	harness.Check(t, c.group.Wait())
}

func mapKey(i int) string { return "/registry/configmaps/default/" + mapName(i) }

func mapName(i int) string { return fmt.Sprintf("map-%06d", i) }

// storedMap returns the stored form of a ConfigMap of about 1 KB, as an API server writes it.
func storedMap(i int, variant string) (string, error) {
	var text strings.Builder
	for n := 0; text.Len() < 840; n++ {
		fmt.Fprintf(&text, "setting-%d = %x\n", n, (i*7919+n*104729)%1000003)
	}
	data, err := runtime.Encode(storageForm, &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{
			Name: mapName(i), Namespace: "default", UID: types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", i)),
			CreationTimestamp: metav1.NewTime(time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)),
		},
		Data: map[string]string{"text": text.String(), "variant": variant},
	})
	return string(data), err
}

var storageForm = protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
