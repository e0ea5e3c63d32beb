package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	clientsServed = "clients served"
	brokenAnswers = "answers broken off"
	failedAnswers = "answers with another status than 200 and 429"
	renewalP99    = "renewal of a lease, p99"
	readyzP99     = "/readyz, p99"
)

const (
	// stormLimit makes the garbage collector work hard before the memory of a machine ends.
	stormLimit = "GOMEMLIMIT=1500000000"
	// stormMemory is the resident memory at which an engine is killed, before the machine has no
	// memory left.
	stormMemory = 8 << 30
)

// stormLoad is clients of one service account, with a connection each. They list all pods at the
// same moment, and again after each refusal or broken answer. It reports how many are served, and
// the latency of the renewals of a lease and of /readyz meanwhile.
type stormLoad struct {
	clients  size
	patience span // for the answer to each client, refusals included
}

func (l stormLoad) run(ctx context.Context, s *Sample) error {
	engine, err := s.Start(ctx, stormLimit)
	if err != nil {
		return err
	}
	defer engine.Stop()
	s.Engine = engine
	limited, unlimit := context.WithCancel(ctx)
	defer unlimit()
	go engine.LimitMemory(limited, stormMemory)

	storm := &storm{path: "/api/v1/pods"}
	if storm.bytes, err = storm.size(ctx, s); err != nil {
		return err
	}
	lease, err := newLease(ctx, s)
	if err != nil {
		return err
	}
	defer lease.close(ctx)
	conns := make([]*target.Conn, l.clients.at(s.Scale))
	for i := range conns {
		conns[i] = s.Engine.DialAs(target.Agent)
		if err := conns[i].Open(ctx); err != nil {
			return err
		}
	}
	defer target.CloseAll(conns)
	if err := s.Engine.ResetPeak(); err != nil {
		return err
	}
	cpu, err := s.Engine.CPU()
	if err != nil {
		return err
	}

	beside, stopBeside := context.WithCancel(ctx)
	defer stopBeside()
	var renewals, readyz latencies
	var probes sync.WaitGroup
	probes.Go(func() { renewals.probe(beside, 100*time.Millisecond, lease.renew) })
	probes.Go(func() { readyz.probe(beside, 200*time.Millisecond, lease.readyz) })
	began := time.Now()
	waiting, stopWaiting := context.WithDeadline(ctx, began.Add(l.patience.at(s.Scale)))
	defer stopWaiting()
	var clients sync.WaitGroup
	for _, conn := range conns {
		clients.Go(func() { storm.list(waiting, engine, conn) })
	}
	clients.Wait()
	elapsed := time.Since(began)
	stopBeside()
	probes.Wait()

	s.Detail("%s clients, %s pods, %s each", grouped(len(conns)), grouped(s.Data.Pods), Bytes.Format(float64(storm.bytes)))
	s.Report(clientsServed, Percent, 100*float64(storm.served.Load())/float64(len(conns)))
	s.Report("until all are served, or are given up", Seconds, elapsed.Seconds())
	s.Report(brokenAnswers, Count, float64(storm.broken.Load()))
	s.Report(failedAnswers, Count, float64(storm.failed.Load()))
	renewals.report(s, "renewal of a lease")
	readyz.report(s, "/readyz")
	if s.Engine.Ended() != nil {
		s.Broken("killed at %s of resident memory after %s of %s clients", Bytes.Format(stormMemory), grouped(int(storm.served.Load())), grouped(len(conns)))
		return nil
	}
	after, err := s.Engine.CPU()
	if err != nil {
		return err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return err
	}
	s.Report("server CPU for each served client", Seconds, (after-cpu).Seconds()/max(1, float64(storm.served.Load())))
	s.Report("peak memory", Bytes, float64(memory.Peak))
	return nil
}

// storm is the LIST of a fleet and how often it was answered.
type storm struct {
	path                            string
	bytes                           int64 // of a whole answer
	served, refused, failed, broken atomic.Int64
}

// size returns the bytes of the answer, which vary by the digits of its revision.
func (st *storm) size(ctx context.Context, s *Sample) (int64, error) {
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Read(ctx, target.Request{Path: st.path}, s.Body); err != nil {
		return 0, err
	}
	objects, err := jsonFormat.count(s.Body.Bytes())
	if err == nil && objects != s.Data.Pods {
		err = fmt.Errorf("LIST %s has %d objects, want %d", st.path, objects, s.Data.Pods)
	}
	return int64(s.Body.Len()), err
}

// list requests the list until it is answered whole, ctx is done, or the engine has ended.
func (st *storm) list(ctx context.Context, e *target.Engine, conn *target.Conn) {
	const revisionDigits = 3 // that the revision may have gained
	for ctx.Err() == nil && e.Ended() == nil {
		n, wait, err := answer(ctx, conn, target.Request{Path: st.path})
		switch {
		case wait > 0:
			st.refused.Add(1)
		case err == nil && n >= st.bytes && n <= st.bytes+revisionDigits:
			st.served.Add(1)
			return
		case errors.Is(err, target.ErrStatus):
			st.failed.Add(1)
			wait = time.Second
		case ctx.Err() == nil:
			st.broken.Add(1)
			wait = time.Second
		}
		waitUntil(ctx, time.Now().Add(wait))
	}
}

// answer sends a request and returns the bytes of a whole answer with status 200, the time after
// which a client that is refused tries again, or an error.
func answer(ctx context.Context, conn *target.Conn, r target.Request) (n int64, wait time.Duration, err error) {
	response, err := conn.Send(ctx, r)
	if err != nil {
		return 0, 0, err
	}
	defer response.Body.Close()
	n, err = io.Copy(io.Discard, response.Body)
	if response.StatusCode == http.StatusTooManyRequests {
		// without it, a client waits for a second
		seconds, _ := strconv.Atoi(response.Header.Get("Retry-After"))
		return n, time.Duration(max(1, seconds)) * time.Second, nil
	}
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%w: %s", target.ErrStatus, response.Status)
	}
	return n, 0, err
}

// lease is a lease of a node, and the node's connection.
type lease struct {
	conn *target.Conn
	path string
}

func newLease(ctx context.Context, s *Sample) (*lease, error) {
	const leases = "/apis/coordination.k8s.io/v1/namespaces/" + dataset.Namespace + "/leases"
	l := &lease{conn: s.Engine.DialAs(target.Node), path: leases + "/" + temporaryName(s, 0)}
	body := fmt.Appendf(nil, `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":%q},"spec":{"holderIdentity":"bench"}}`, temporaryName(s, 0))
	err := l.conn.Read(ctx, target.Request{Method: http.MethodPost, Path: leases, Body: body, Status: http.StatusCreated}, new(bytes.Buffer))
	return l, err
}

func (l *lease) close(ctx context.Context) {
	// The engine may have been killed; the data are copied for each run.
	_ = l.conn.Read(ctx, target.Request{Method: http.MethodDelete, Path: l.path}, new(bytes.Buffer))
	l.conn.Close()
}

func (l *lease) renew(ctx context.Context) error {
	body := fmt.Appendf(nil, `{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(metav1.RFC3339Micro))
	return l.conn.Read(ctx, target.Request{Method: http.MethodPatch, Path: l.path, Body: body, ContentType: "application/merge-patch+json"}, new(bytes.Buffer))
}

func (l *lease) readyz(ctx context.Context) error {
	return l.conn.Read(ctx, target.Request{Path: "/readyz"}, new(bytes.Buffer))
}

// latencies are those of repeated operations. Its methods may be called concurrently.
type latencies struct {
	mu     sync.Mutex
	all    []time.Duration
	failed int
}

// probeLimit bounds an operation of probe: one that takes longer has failed.
const probeLimit = 10 * time.Second

// probe does the operation at an interval, whether or not earlier ones have ended, until ctx is
// done, and returns when all have ended. A failed operation counts as one that has taken
// probeLimit.
func (l *latencies) probe(ctx context.Context, interval time.Duration, operation func(context.Context) error) {
	steady := pace{interval: interval, duration: 1 << 62, atOnce: int(probeLimit / interval)}
	_ = steady.run(ctx, func(_ context.Context, _ int) error { // no operation returns an error
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
		defer cancel()
		began := time.Now()
		err := operation(within)
		took := time.Since(began)
		l.mu.Lock()
		defer l.mu.Unlock()
		if err != nil {
			l.failed++
			took = probeLimit
		}
		l.all = append(l.all, took)
		return nil
	})
}

// report reports the latencies after all operations have ended.
func (l *latencies) report(s *Sample, name string) {
	if len(l.all) == 0 {
		return
	}
	slices.Sort(l.all)
	s.Report(name+", p50", Seconds, stats.Percentile(l.all, 0.5).Seconds())
	s.Report(name+", p99", Seconds, stats.Percentile(l.all, 0.99).Seconds())
	s.Report(name+", failed", Count, float64(l.failed))
}
