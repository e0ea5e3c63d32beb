package replica

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/harness"
)

const (
	// objectsEnv is the number of ConfigMaps of the measurement of memory, in place of
	// memoryObjects.
	objectsEnv    = "STRATA_TEST_OBJECTS"
	memoryObjects = 300_000

	memoryStarts = 3
	memoryAge    = time.Minute
	quietTimeout = 30 * time.Second
)

// memoryFigures measures the memory of a replica and of its primary with the same ConfigMaps of 1
// KB, a minute after each is ready. The objects are in etcd before both start.
func memoryFigures(t *testing.T, table *harness.Figures) {
	n := memoryObjects
	if text := os.Getenv(objectsEnv); text != "" {
		n = harness.Must[int](t)(strconv.Atoi(text))
	}
	ctx := harness.Context(t, 12*time.Minute)
	e := harness.New(t).DefaultGC()
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, append(front.TrustFlags(), harness.Unchecked(unchecked))...)
	harness.Check(t, primary.Stop())
	fillMaps(t, ctx, etcd.Client(), n)

	var replica *harness.Server
	var held [2][]atRest // of the replica, and of the primary
	for start := range memoryStarts {
		primary.Restart()
		primaryReady := time.Now()
		if replica == nil {
			replica = e.Replica(etcd, front, []*harness.Server{primary}, harness.Unchecked(unchecked))
		} else {
			replica.Restart()
		}
		replicaReady := time.Now()
		held[1] = append(held[1], memoryAtRest(t, ctx, primary, n, primaryReady))
		held[0] = append(held[0], memoryAtRest(t, ctx, replica, n, replicaReady))
		t.Logf("start %d: replica: %v; primary: %v", start+1, held[0][start], held[1][start])
		harness.Check(t, replica.Stop())
		harness.Check(t, primary.Stop())
	}
	row := func(name string, value func(atRest) int64) {
		var medians [2]float64
		for i, starts := range held {
			var values []float64
			for _, m := range starts {
				values = append(values, float64(value(m))/1e6)
			}
			medians[i] = harness.Median(values)
		}
		table.Row(fmt.Sprintf("%s, %d ConfigMaps of 1 KB", name, n), fmt.Sprintf("%.0f MB, %.2f of the primary's", medians[0], medians[0]/medians[1]), fmt.Sprintf("%.0f MB", medians[1]))
	}
	row("resident memory at rest, a minute after the start", func(m atRest) int64 { return m.resident })
	row("resident memory after a garbage collection", func(m atRest) int64 { return m.after.Resident })
	row("live heap", func(m atRest) int64 { return m.after.Live })
}

// atRest is the memory of a server a minute after it was ready, in bytes, and after a garbage
// collection.
type atRest struct {
	resident int64
	after    harness.Held
}

func (m atRest) String() string {
	return fmt.Sprintf("resident %.1f MB; after a collection: live %.1f MB, %v", float64(m.resident)/1e6, float64(m.after.Live)/1e6, m.after)
}

// memoryAtRest returns the memory of a server that serves n ConfigMaps, memoryAge after it was
// ready, once it is quiet.
func memoryAtRest(t *testing.T, ctx context.Context, s *harness.Server, n int, ready time.Time) (m atRest) {
	t.Helper()
	api := s.API()
	list, err := api.List(ctx, configMaps, "limit=1")
	harness.Check(t, err)
	if left := list.Metadata.RemainingItemCount; left == nil || *left < int64(n)-1 {
		t.Fatalf("%s does not serve %d ConfigMaps: metadata %+v", s.URL, n, list.Metadata)
	}
	harness.Check(t, pause(ctx, time.Until(ready.Add(memoryAge))))
	harness.Check(t, process.WaitQuiet(ctx, quietTimeout, s.Child))
	m.resident, err = s.Resident()
	harness.Check(t, err)
	m.after, err = s.Held(ctx, api)
	harness.Check(t, err)
	return m
}

// fillMaps writes n ConfigMaps to etcd, many per transaction: through the API it would take
// minutes.
func fillMaps(t *testing.T, ctx context.Context, etcd *clientv3.Client, n int) {
	t.Helper()
	const atOnce, writers = 100, 4 // etcd accepts 128 operations in a transaction
	group, ctx := errgroup.WithContext(ctx)
	for w := range writers {
		group.Go(func() error {
			for first := w * atOnce; first < n; first += writers * atOnce {
				var ops []clientv3.Op
				for i := first; i < min(first+atOnce, n); i++ {
					value, err := storedMap(i, "0")
					if err != nil {
						return err
					}
					ops = append(ops, clientv3.OpPut(mapKey(i), value))
				}
				if _, err := etcd.Txn(ctx).Then(ops...).Commit(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	harness.Check(t, group.Wait())
}
