package replica

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// Loads of TestReplica_Figures.
const (
	figureTime   = 15 * time.Second
	figureWrites = 300 // a second, through the primary
	figureProbes = 400
	figurePairs  = 3

	unchecked = "periodic checks every few seconds would take CPU time and memory"
)

// TestReplica_Figures measures a replica beside its primary, and judges nothing but errors. Each
// part can be run alone, and the table has the rows of those that ran:
//   - latency: consistent lists of a quiet resource while others are written, the time by which a
//     watch of the replica is behind one of the primary, and writes through the replica and
//     directly
//   - etcd: its CPU time and its watches for one more replica
//   - chain: a replica that reads from the replica
//   - memory: of both with the same objects
func TestReplica_Figures(t *testing.T) {
	if !harness.Long() {
		t.Skip("measures; STRATA_TEST_LONG=1 runs it")
	}
	table := harness.NewFigures("replica", "primary")
	t.Run("latency", func(t *testing.T) { latencyFigures(t, table) })
	t.Run("etcd", func(t *testing.T) { etcdFigures(t, table) })
	t.Run("chain", func(t *testing.T) { chainFigures(t, table) })
	t.Run("memory", func(t *testing.T) { memoryFigures(t, table) })
	t.Logf("percentiles of one run, and medians of phases and of starts:\n%s", table)
}

func latencyFigures(t *testing.T, table *harness.Figures) {
	ctx := harness.Context(t, 4*time.Minute)
	e := harness.New(t).DefaultGC()
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, front.TrustFlags()...)
	replica := e.Replica(etcd, front, []*harness.Server{primary})
	_, err := primary.API().Create(ctx, "/api/v1/namespaces/default/secrets", object{"metadata": object{"name": "quiet"}})
	harness.Check(t, err)

	direct := writeTimes(t, ctx, primary.API(), "direct")
	proxied := writeTimes(t, ctx, replica.API(), "proxied")

	lags, stopWatches := watchBoth(t, ctx, primary, replica)
	stop := startWrites(t, ctx, primary, figureWrites)
	lists := listTimes(t, ctx, replica.API())
	onPrimary := listTimes(t, ctx, primary.API())
	stop()
	behind := stopWatches(lags)
	for _, percent := range []int{50, 99} {
		table.Row(fmt.Sprintf("create a ConfigMap, p%d: through the replica, and directly", percent), part(proxied, percent).String(), part(direct, percent).String())
	}
	for _, percent := range []int{50, 99} {
		table.Row(fmt.Sprintf("consistent LIST of a quiet resource beside %d writes/s, p%d", figureWrites, percent),
			part(lists, percent).String(), part(onPrimary, percent).String())
	}
	for _, percent := range []int{50, 99} {
		table.Row(fmt.Sprintf("an event of a watch after the same event on the primary, p%d of %d", percent, len(behind)), part(behind, percent).String(), "-")
	}
}

// part returns a percentile.
func part(times []time.Duration, percent int) time.Duration {
	if len(times) == 0 {
		return 0
	}
	slices.Sort(times)
	return times[min(len(times)-1, len(times)*percent/100)].Round(10 * time.Microsecond)
}

func writeTimes(t *testing.T, ctx context.Context, api *harness.API, prefix string) (times []time.Duration) {
	t.Helper()
	for i := range figureProbes {
		began := time.Now()
		_, err := api.Create(ctx, configMaps, configMap(fmt.Sprintf("%s-%d", prefix, i), map[string]string{"k": strings.Repeat("v", 1000)}))
		harness.Check(t, err)
		times = append(times, time.Since(began))
	}
	return times[figureProbes/10:] // connections are open by then
}

func listTimes(t *testing.T, ctx context.Context, api *harness.API) (times []time.Duration) {
	t.Helper()
	for range figureProbes {
		began := time.Now()
		r, err := api.Do(ctx, http.MethodGet, "/api/v1/namespaces/default/secrets", "", nil)
		harness.Check(t, err)
		if r.Code != http.StatusOK {
			t.Fatal(r.Err())
		}
		times = append(times, time.Since(began))
		harness.Check(t, pause(ctx, 5*time.Millisecond))
	}
	return times[figureProbes/10:]
}

// pause spaces requests.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// startWrites updates ConfigMaps at a rate until stop.
func startWrites(t *testing.T, ctx context.Context, to *harness.Server, rate int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	group, writing := errgroup.WithContext(ctx)
	const writers = 20
	for w := range writers {
		api := to.API()
		group.Go(func() error {
			ticker := time.NewTicker(time.Second * writers / time.Duration(rate))
			defer ticker.Stop()
			for n := 0; ; n++ {
				select {
				case <-writing.Done():
					return nil
				case <-ticker.C:
				}
				_, err := api.Patch(writing, configMaps+"/direct-"+strconv.Itoa(w), fmt.Sprintf(`{"data":{"n":"%d"}}`, n))
				if err != nil && writing.Err() == nil {
					return err
				}
			}
		})
	}
	return func() {
		cancel()
		harness.Check(t, group.Wait())
	}
}

// arrivals are the times at which events arrived, by resource version.
type arrivals struct {
	mu sync.Mutex
	at map[string]time.Time
}

func watchBoth(t *testing.T, ctx context.Context, servers ...*harness.Server) (both []*arrivals, stop func([]*arrivals) []time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var reading sync.WaitGroup
	for _, s := range servers {
		a := &arrivals{at: map[string]time.Time{}}
		both = append(both, a)
		list, err := s.API().List(ctx, configMaps, "limit=1")
		harness.Check(t, err)
		watch := harness.StartWatch(t, ctx, s.API(), configMaps, "resourceVersion="+list.Metadata.ResourceVersion)
		reading.Go(func() {
			for {
				event, err := watch.Next(ctx)
				if err != nil {
					return
				}
				a.mu.Lock()
				a.at[event.Object.Metadata.ResourceVersion] = time.Now()
				a.mu.Unlock()
			}
		})
	}
	return both, func(both []*arrivals) (behind []time.Duration) {
		cancel()
		reading.Wait()
		for version, at := range both[1].at {
			if first, ok := both[0].at[version]; ok {
				behind = append(behind, max(0, at.Sub(first)))
			}
		}
		return behind
	}
}
