package stall

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// outcome is the result of one request.
type outcome struct {
	*harness.Response // without the body if the code is 200; nil after an error
	err               error
	took              time.Duration
}

// forms are the LISTs of the load, in turn: answered with bytes from memory, the last one through
// upstream's handlers.
var forms = []string{"", "limit=100", "", "labelSelector=a%3Db", "timeout=30s", "pretty=true&limit=10", "pretty=true&timeout=30s"}

// send sends perSecond consistent LISTs in each second of duration, on schedule and independently
// of earlier results, but never more than atOnce concurrently. It returns when all are sent;
// answers returns when all are answered or have waited for refusedWithin.
func (s *scene) send(ctx context.Context, perSecond, atOnce int, duration time.Duration) (answers func() []outcome) {
	outcomes := make([]outcome, int(duration.Seconds()*float64(perSecond)))
	slots := make(chan struct{}, atOnce)
	var group sync.WaitGroup
	start := time.Now()
	for i := range outcomes {
		// Even after the end of ctx: then each request fails at once with its error.
		time.Sleep(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(perSecond))))
		slots <- struct{}{}
		group.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeoutCause(ctx, refusedWithin, fmt.Errorf("no answer within %v", refusedWithin))
			defer cancel()
			began := time.Now()
			o := &outcomes[i]
			o.Response, o.err = s.load[i%clients].Do(ctx, http.MethodGet, mapsPath, forms[i%len(forms)], nil)
			o.took = time.Since(began)
			if o.err == nil && o.Code == http.StatusOK {
				o.Body = nil // there may be thousands
			}
		})
	}
	return func() []outcome {
		group.Wait()
		return outcomes
	}
}

// loop is an action that is repeated while the server is stalled.
type loop struct {
	name string
	do   func(ctx context.Context, i int) error
}

// pause is the time between two rounds of a loop, so that the loops are not the load.
const pause = 100 * time.Millisecond

// loops runs loops until stop is called, which waits for the current rounds and returns the number
// of rounds of each. An error fails the test and ends its loop.
func loops(t *testing.T, ctx context.Context, all []loop) (stop func() map[string]int) {
	done := make(chan struct{})
	var mu sync.Mutex
	var group sync.WaitGroup
	rounds := map[string]int{}
	for _, l := range all {
		group.Go(func() {
			for i := 0; ; i++ {
				if err := l.do(ctx, i); err != nil {
					t.Errorf("%s, round %d: %v", l.name, i, err)
					return
				}
				mu.Lock()
				rounds[l.name]++
				mu.Unlock()
				select {
				case <-done:
					return
				case <-time.After(pause):
				}
			}
		})
	}
	return func() map[string]int {
		close(done)
		group.Wait()
		return rounds
	}
}

// latencies are the latencies of each kind of request. They may be added concurrently.
type latencies struct {
	mu sync.Mutex
	of map[string][]time.Duration
}

// take runs f and records its latency.
func (l *latencies) take(kind string, f func() error) error {
	began := time.Now()
	err := f()
	l.add(kind, time.Since(began))
	return err
}

func (l *latencies) add(kind string, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[string][]time.Duration{}
	}
	l.of[kind] = append(l.of[kind], d)
}

// log writes the distribution of each kind to the test's log.
func (l *latencies) log(t *testing.T) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var kinds []string
	for kind := range l.of {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		took := slices.Sorted(slices.Values(l.of[kind]))
		at := func(q float64) time.Duration {
			return took[int(q*float64(len(took)-1))].Round(10 * time.Microsecond)
		}
		t.Logf("%-32s %5d requests, p50 %v, p99 %v, most %v", kind, len(took), at(.5), at(.99), at(1))
	}
}

// memory is the resident memory of the two processes, in bytes.
type memory struct{ server, etcd int64 }

func (s *scene) resident() (memory, error) {
	server, err := s.server.Resident()
	if err != nil {
		return memory{}, err
	}
	etcd, err := s.etcd.Resident()
	return memory{server, etcd}, err
}

func (m memory) String() string {
	return fmt.Sprintf("server %d MB, etcd %d MB", m.server>>20, m.etcd>>20)
}

// peak measures the memory of both processes until stop is called, which returns the peak of each.
func (s *scene) peak(t *testing.T) (stop func() memory) {
	done, result := make(chan struct{}), make(chan memory)
	go func() {
		var most memory
		for ended := false; !ended; {
			select {
			case <-done:
				ended = true
			case <-time.After(100 * time.Millisecond):
			}
			now, err := s.resident()
			if err != nil {
				t.Error(err)
				<-done
				break
			}
			most = memory{max(most.server, now.server), max(most.etcd, now.etcd)}
		}
		result <- most
	}()
	return func() memory {
		close(done)
		return <-result
	}
}
