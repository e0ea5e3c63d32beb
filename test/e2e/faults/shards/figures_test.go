package shards

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// Load of TestShards_Figures.
const (
	figureWriters = 48
	figurePairs   = 3
	figureTime    = 8 * time.Second
	figureWarmUp  = 2 * time.Second
)

// TestShards_Figures measures creates of events, leases and ConfigMaps, a third each, through an
// API server with one etcd and through one with three, and puts of the same size without an API
// server. It judges nothing but errors. All etcds sync to the same disk. Only the servers of the
// present phase have load.
func TestShards_Figures(t *testing.T) {
	if !harness.Long() {
		t.Skip("measures; STRATA_TEST_LONG=1 runs it")
	}
	ctx := harness.Context(t, 5*time.Minute)
	env := harness.New(t)
	var all [2]*sharded // with one etcd, and with three
	for i := range all {
		all[i] = newSharded(env, 1+2*i)
		all[i].run(t, ctx, figureWarmUp, all[i].creates)
	}
	var creates, puts [2][]rates
	for pair, second := range harness.Phases(figurePairs) {
		i := 0
		if second {
			i = 1
		}
		creates[i] = append(creates[i], all[i].run(t, ctx, figureTime, all[i].creates))
		puts[i] = append(puts[i], all[i].run(t, ctx, figureTime/2, all[i].puts))
		t.Logf("pair %d, %d etcds: creates %.2f, puts %.2f", pair+1, len(all[i].etcds), creates[i][pair], puts[i][pair])
	}
	table := harness.NewFigures("one etcd", "three etcds", "three / one")
	row := func(name, format string, of [2][]rates, value func(rates) float64) {
		one, three, ratio := compared(of, value)
		cell := "-"
		if ratio > 0 {
			cell = fmt.Sprintf("%.2f", ratio)
		}
		table.Row(name, fmt.Sprintf(format, one), fmt.Sprintf(format, three), cell)
	}
	row("creates per second through the API server", "%.0f", creates, func(r rates) float64 { return r.Writes })
	row("CPU of the API server, cores", "%.2f", creates, func(r rates) float64 { return r.Server })
	row("CPU of the etcds together, cores", "%.2f", creates, func(r rates) float64 { return r.Etcds })
	row("CPU of the clients, cores", "%.2f", creates, func(r rates) float64 { return r.Client })
	row("fsyncs of the logs per second, together", "%.0f", creates, func(r rates) float64 { return r.Syncs })
	row("mean time of an fsync, ms", "%.2f", creates, func(r rates) float64 { return r.SyncTime })
	row("puts per second without an API server", "%.0f", puts, func(r rates) float64 { return r.Writes })
	row("CPU of the etcds together, cores", "%.2f", puts, func(r rates) float64 { return r.Etcds })
	row("fsyncs of the logs per second, together", "%.0f", puts, func(r rates) float64 { return r.Syncs })
	row("mean time of an fsync, ms", "%.2f", puts, func(r rates) float64 { return r.SyncTime })
	t.Logf("%d writers, medians of %d phases of %v, and of the ratios of their pairs:\n%s", figureWriters, figurePairs, figureTime, table)
}

// compared returns the medians of a value of the phases with one etcd and with three, and that of
// the ratios of pairs of them.
func compared(of [2][]rates, value func(rates) float64) (one, three, ratio float64) {
	var ones, threes, ratios []float64
	for i := range of[0] {
		a, b := value(of[0][i]), value(of[1][i])
		ones, threes = append(ones, a), append(threes, b)
		if a > 0 {
			ratios = append(ratios, b/a)
		}
	}
	return harness.Median(ones), harness.Median(threes), harness.Median(ratios)
}

// rates are the measurements of a phase, per second of it.
type rates struct {
	Writes                float64
	Server, Etcds, Client float64 // cores
	Syncs, SyncTime       float64 // fsyncs of the write-ahead logs; milliseconds each
}

// sharded is an API server with its etcds.
type sharded struct {
	server  *harness.Server
	api     *harness.API
	etcds   []*harness.Etcd
	clients []*clientv3.Client
	names   atomic.Int64
}

// newSharded starts an API server with n etcds that sync, 1 or 3.
func newSharded(env *harness.Env, n int) *sharded {
	s := &sharded{}
	for range n {
		etcd := env.SyncedEtcd()
		s.etcds, s.clients = append(s.etcds, etcd), append(s.clients, etcd.Client())
	}
	flags := []string{harness.Unchecked("periodic checks every few seconds would take CPU time")}
	if n == 3 {
		flags = append(flags, overrides(map[string]*harness.Etcd{"/events": s.etcds[1], "coordination.k8s.io/leases": s.etcds[2]}))
	}
	s.server = env.APIServer(s.etcds[0], flags...)
	s.api = s.server.API()
	return s
}

// creates writes an object of each kind.
func (s *sharded) creates(ctx context.Context) (n int64, err error) {
	name := fmt.Sprintf("figure-%d", s.names.Add(1))
	data := named(name)
	data["data"] = object{"text": strings.Repeat("v", 300)}
	lease := named(name)
	lease["spec"] = object{"holderIdentity": name, "leaseDurationSeconds": 40}
	for _, create := range []struct {
		path   string
		object object
	}{{mapsPath, data}, {eventsPath, event(name)}, {leasesPath, lease}} {
		r, err := s.api.Do(ctx, http.MethodPost, create.path, "", create.object)
		if err != nil {
			return n, err
		}
		if r.Code != http.StatusCreated {
			return n, fmt.Errorf("create in %s: %w", create.path, r.Err())
		}
		n++
	}
	return n, nil
}

// puts writes a key of about the size of an object to each etcd in turn, three in all. No server
// reads these keys.
func (s *sharded) puts(ctx context.Context) (n int64, err error) {
	key := fmt.Sprintf("/figures/%d", s.names.Add(1))
	for i := range int64(3) {
		if _, err := s.clients[int(i)%len(s.clients)].Put(ctx, fmt.Sprintf("%s/%d", key, i), strings.Repeat("v", 500)); err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// run makes figureWriters clients call write for d, and returns the rates.
func (s *sharded) run(t *testing.T, ctx context.Context, d time.Duration, write func(context.Context) (int64, error)) rates {
	t.Helper()
	before, began := s.used(t, ctx), time.Now()
	writing, stop := context.WithCancel(ctx)
	defer stop()
	// a deadline would be sent to etcd, which may report it first
	defer time.AfterFunc(d, stop).Stop()
	group, groupCtx := errgroup.WithContext(writing)
	var written atomic.Int64
	for range figureWriters {
		group.Go(func() error {
			for groupCtx.Err() == nil {
				n, err := write(groupCtx)
				written.Add(n)
				if err != nil && groupCtx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	harness.Check(t, group.Wait())
	seconds := time.Since(began).Seconds()
	after := s.used(t, ctx)
	r := rates{Writes: float64(written.Load()) / seconds, Syncs: (after.syncs - before.syncs) / seconds}
	r.Server = (after.server - before.server).Seconds() / seconds
	r.Etcds = (after.etcds - before.etcds).Seconds() / seconds
	r.Client = (after.client - before.client).Seconds() / seconds
	if n := after.syncs - before.syncs; n > 0 {
		r.SyncTime = 1000 * (after.syncTime - before.syncTime) / n
	}
	return r
}

// used are sums since the start of the processes.
type used struct {
	server, etcds, client time.Duration // CPU time
	syncs, syncTime       float64       // syncTime in seconds
}

func (s *sharded) used(t *testing.T, ctx context.Context) (u used) {
	t.Helper()
	var err error
	u.server, err = s.server.CPU()
	harness.Check(t, err)
	for _, etcd := range s.etcds {
		cpu, err := etcd.CPU()
		harness.Check(t, err)
		u.etcds += cpu
		for name, sum := range map[string]*float64{"count": &u.syncs, "sum": &u.syncTime} {
			value, err := etcd.Metric(ctx, "etcd_disk_wal_fsync_duration_seconds_"+name)
			harness.Check(t, err)
			*sum += value
		}
	}
	var own syscall.Rusage
	harness.Check(t, syscall.Getrusage(syscall.RUSAGE_SELF, &own))
	u.client = time.Duration(own.Utime.Nano() + own.Stime.Nano())
	return u
}
