package chunks

import (
	"context"
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
)

// churn is the load of TestHistory_ContinuousWrites_StaysReadable.
type churn struct {
	objects, namespaces int
	writes              int // per second; 0 for as many as possible
	duration            time.Duration
	writers             int
}

// listAnswer is a list's answer at a revision.
type listAnswer struct {
	path, revision string
	form           form
	digest         [sha256.Size]byte
	items          int
}

func digest(items []string) [sha256.Size]byte {
	return sha256.Sum256([]byte(strings.Join(items, "\n")))
}

// TestHistory_ContinuousWrites_StaysReadable writes continuously and repeats earlier lists at
// exactly their revisions: whole and in pages. All of them can still be read, from memory, and the
// process grows by no more than the history requires.
func TestHistory_ContinuousWrites_StaysReadable(t *testing.T) {
	harness.OnlyStrata(t)
	c := churn{objects: 5000, namespaces: 50, duration: 8 * time.Second, writers: 4}
	if harness.Long() {
		c = churn{objects: 150_000, namespaces: 50, writes: 1000, duration: 5 * time.Minute, writers: 8}
	}
	ctx := harness.Context(t, testTimeout+2*c.duration)
	const historyBytes, kept = 1 << 30, 64 << 20
	env := harness.New(t).DefaultGC()
	s := &scene{env: env, etcd: env.Etcd()}
	s.client = s.etcd.Client()
	value := strings.Repeat("v", 300)
	for i := range c.namespaces {
		s.fill(t, ctx, maps, fmt.Sprintf("churn-%02d", i), value, c.objects/c.namespaces)
	}
	r := s.start(fmt.Sprintf("--strata-history-bytes=%d", historyBytes), fmt.Sprintf("--strata-representation-bytes=%d", kept))
	s.replicas = []*replica{r}
	for _, f := range []form{forms[0], forms[2]} {
		_, err := r.fetch(ctx, f, maps.path(""), "")
		harness.Check(t, err)
	}
	metric := func(name string) float64 {
		return harness.Must[float64](t)(r.api.Metric(ctx, "strata_mirror_"+name+"{"))
	}
	resident := harness.Must[int64](t)(r.Resident())
	held := metric("history_bytes")
	r.proxy.Reset()

	// Each goroutine reports its failure here, and stops.
	working, stop := context.WithTimeout(ctx, c.duration)
	defer stop()
	var mu sync.Mutex
	var moments []listAnswer
	var group sync.WaitGroup
	seed, drawn := testseed.New(t), uint64(0)
	work := func(f func(rnd *rand.Rand) error) {
		drawn++
		rnd := rand.New(rand.NewPCG(seed, drawn))
		group.Go(func() {
			for working.Err() == nil {
				if err := f(rnd); err != nil && working.Err() == nil {
					t.Error(err)
					stop()
				}
			}
		})
	}
	var writes atomic.Int64
	begun := time.Now()
	for range c.writers {
		work(func(rnd *rand.Rand) error {
			n := writes.Add(1)
			if c.writes > 0 {
				due := begun.Add(time.Duration(n) * time.Second / time.Duration(c.writes))
				select {
				case <-time.After(time.Until(due)):
				case <-working.Done():
					return nil
				}
			}
			namespace, name := fmt.Sprintf("churn-%02d", rnd.IntN(c.namespaces)), fmt.Sprintf("object-%06d", rnd.IntN(c.objects/c.namespaces))
			op := maps.put(namespace, name, fmt.Sprint(n)+value)
			if rnd.IntN(20) == 0 {
				op = maps.delete(namespace, name)
			}
			_, err := s.client.Do(working, op)
			return err
		})
	}
	// Record the current lists.
	work(func(rnd *rand.Rand) error {
		m := listAnswer{path: maps.path(fmt.Sprintf("churn-%02d", rnd.IntN(c.namespaces))), form: forms[2*rnd.IntN(2)]}
		if rnd.IntN(50) == 0 {
			m.path = maps.path("")
		}
		p, err := r.fetch(working, m.form, m.path, "")
		if err != nil {
			return err
		}
		m.revision, m.digest, m.items = p.ResourceVersion, digest(p.items), len(p.items)
		mu.Lock()
		moments = append(moments, m)
		mu.Unlock()
		select {
		case <-time.After(10 * time.Millisecond):
		case <-working.Done():
		}
		return nil
	})
	again := func(ctx context.Context, rnd *rand.Rand, m listAnswer) error {
		query := "resourceVersionMatch=Exact&resourceVersion=" + m.revision
		var items []string
		if rnd.IntN(3) == 0 {
			var revision string
			var err error
			if items, revision, err = walk(ctx, m.form, m.path, query, 1+m.items/(1+rnd.IntN(5)), always(r)); err != nil {
				return err
			}
			if revision != m.revision {
				return fmt.Errorf("requested %s, got %s", m.revision, revision)
			}
		} else {
			p, err := r.fetch(ctx, m.form, m.path, query)
			if err != nil {
				return err
			}
			if p.ResourceVersion != m.revision {
				return fmt.Errorf("requested %s, got %s", m.revision, p.ResourceVersion)
			}
			items = p.items
		}
		if digest(items) != m.digest {
			return fmt.Errorf("%s at %s: %d items differ from the expected %d", m.path, m.revision, len(items), m.items)
		}
		return nil
	}
	var reads atomic.Int64
	for range 2 {
		work(func(rnd *rand.Rand) error {
			mu.Lock()
			var m listAnswer
			if n := len(moments); n > 0 {
				m = moments[rnd.IntN(n)]
			}
			mu.Unlock()
			if m.path == "" {
				return nil
			}
			reads.Add(1)
			return again(working, rnd, m)
		})
	}
	var fromEtcd []string
	count := func() {
		fromEtcd = append(fromEtcd, r.objectReads(maps)...)
		r.proxy.Reset()
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	most := resident
	for working.Err() == nil {
		select {
		case <-tick.C:
			count()
			most = max(most, harness.Must[int64](t)(r.Resident()))
		case <-working.Done():
		}
	}
	group.Wait()
	if t.Failed() {
		return
	}
	rnd := rand.New(rand.NewPCG(seed, 0))
	for i := 0; i < len(moments); i += 1 + len(moments)/200 {
		harness.Check(t, again(ctx, rnd, moments[i]))
	}
	count()
	if len(fromEtcd) > 0 {
		t.Errorf("%d requests to etcd for objects: %q", len(fromEtcd), fromEtcd[:min(5, len(fromEtcd))])
	}
	after := harness.Must[int64](t)(r.Resident())
	history := metric("history_bytes") - held
	t.Logf("%d objects, %d revisions written (%.0f/s), %d moments, read again %d times; resident %d MiB at the start, %d at the end, %d at most; history holds %.0f MiB",
		c.objects, writes.Load(), float64(writes.Load())/c.duration.Seconds(), len(moments), reads.Load(), resident>>20, after>>20, most>>20, history/(1<<20))
	if len(moments) < 20 || reads.Load() < 20 || history == 0 {
		t.Error("too few revisions or reads for a result")
	}
	// The garbage collector allows the heap to double; 300 bytes per revision are for trees and
	// events.
	if bound := 2*(int64(history)+300*writes.Load()+kept) + 256<<20; most-resident > bound {
		t.Errorf("the process has grown by %d MiB, want %d at most", (most-resident)>>20, bound>>20)
	}
}
