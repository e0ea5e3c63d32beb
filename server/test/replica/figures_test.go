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

	"github.com/stratakube/strata/server/test/internal/harness"
)

// Loads of TestReplica_Figures.
const (
	figureTime   = 15 * time.Second
	figureWrites = 300 // a second
	figureProbes = 400
)

// TestReplica_Figures measures a replica beside its primary, and judges nothing but errors: consistent lists of a quiet resource while others are
// written, the time by which a watch of the replica is behind one of the primary, writes through the replica and directly, and the CPU time of
// etcd with one more replica.
func TestReplica_Figures(t *testing.T) {
	if !harness.Long() {
		t.Skip("measures; STRATA_TEST_LONG=1 runs it")
	}
	ctx := harness.Context(t, 4*time.Minute)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, front.TrustFlags()...)
	replica := e.Replica(etcd, front, []*harness.Server{primary})
	_, err := primary.API().Create(ctx, "/api/v1/namespaces/default/secrets", object{"metadata": object{"name": "quiet"}})
	harness.Check(t, err)

	direct := writeTimes(t, ctx, primary.API(), "direct")
	proxied := writeTimes(t, ctx, replica.API(), "proxied")
	t.Logf("create a ConfigMap: p50 %v directly, %v through the replica; p99 %v and %v", part(direct, 50), part(proxied, 50), part(direct, 99), part(proxied, 99))

	lags, stopWatches := watchBoth(t, ctx, primary, replica)
	stop := startWrites(t, ctx, primary, figureWrites)
	lists := listTimes(t, ctx, replica.API())
	onPrimary := listTimes(t, ctx, primary.API())
	cpuOne := cpuOver(t, ctx, etcd, figureTime)
	other := e.Replica(etcd, front, []*harness.Server{primary})
	cpuTwo := cpuOver(t, ctx, etcd, figureTime)
	stop()
	t.Logf("consistent LIST of a quiet resource beside %d writes/s: p50 %v, p99 %v on the replica; p50 %v, p99 %v on the primary", figureWrites,
		part(lists, 50), part(lists, 99), part(onPrimary, 50), part(onPrimary, 99))
	t.Logf("CPU of etcd at %d writes/s: %.1f %% of a core with one replica, %.1f %% with two", figureWrites, 100*cpuOne, 100*cpuTwo)
	behind := stopWatches(lags)
	t.Logf("a watch of the replica behind one of the primary: p50 %v, p99 %v of %d events", part(behind, 50), part(behind, 99), len(behind))
	harness.Check(t, other.Stop())
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
		watch, refused, err := s.API().Watch(ctx, configMaps, "resourceVersion="+list.Metadata.ResourceVersion)
		harness.Check(t, err)
		if refused != nil {
			t.Fatal(refused.Err())
		}
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

// cpuOver returns the CPU time of an etcd over d, in cores.
func cpuOver(t *testing.T, ctx context.Context, etcd *harness.Etcd, d time.Duration) float64 {
	t.Helper()
	before, err := etcd.CPU()
	harness.Check(t, err)
	harness.Check(t, pause(ctx, d))
	after, err := etcd.CPU()
	harness.Check(t, err)
	return (after - before).Seconds() / d.Seconds()
}
