package loadshed

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	flowcontrol "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
)

const (
	lowLevel, highLevel = "low", "high"
	lengthLimit         = 50
	handSize            = 6
	// width is the seats of a request. The seats of the level are no multiple of it, so that
	// upstream never bounds its queues.
	width = 6
	took  = 100 * time.Millisecond // by each request
)

// server is a Shedder in front of upstream's queues, with two priority levels of the same size.
type server struct {
	*Shedder
	perSecond int // requests that a level serves
	began     time.Time

	requests sync.WaitGroup
	mu       sync.Mutex
	users    map[string]*outcome
}

// outcome are the requests of a user.
type outcome struct {
	executed, refused int
	waits             []time.Duration // of executed requests
	ended             time.Time       // the last
}

// start starts a server in the bubble of t.
func start(t *testing.T) *server {
	t.Helper()
	objects := fake.NewClientset()
	create := func(object any) {
		t.Helper()
		var err error
		switch o := object.(type) {
		case *flowcontrol.PriorityLevelConfiguration:
			_, err = objects.FlowcontrolV1().PriorityLevelConfigurations().Create(t.Context(), o, metav1.CreateOptions{})
		case *flowcontrol.FlowSchema:
			_, err = objects.FlowcontrolV1().FlowSchemas().Create(t.Context(), o, metav1.CreateOptions{})
		}
		testcheck.NoError(t, err)
	}
	for _, pl := range bootstrap.MandatoryPriorityLevelConfigurations {
		create(pl.DeepCopy())
	}
	for _, fs := range bootstrap.MandatoryFlowSchemas {
		create(fs.DeepCopy())
	}
	for i, name := range []string{lowLevel, highLevel} {
		create(newLevel(name))
		create(newSchema(name, int32(1000+i)))
	}
	factory := informers.NewSharedInformerFactory(objects, 0)
	upstream := utilflowcontrol.New(factory, objects.FlowcontrolV1(), 600)
	s := &server{Shedder: New(upstream), users: map[string]*outcome{}}

	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	var running sync.WaitGroup
	running.Go(func() { _ = upstream.Run(ctx.Done()) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
		factory.Shutdown()
		s.Close()
	})
	time.Sleep(2 * time.Second) // virtual: upstream has read its configuration

	seats := 600 * 50 / 105 // of one of the levels, which have 50 shares each, and catch-all 5
	if seats%width == 0 {
		t.Fatalf("%d seats are a multiple of %d", seats, width)
	}
	s.perSecond, s.began = seats/width*int(time.Second/took), time.Now()
	return s
}

func newLevel(name string) *flowcontrol.PriorityLevelConfiguration {
	shares, none := int32(50), int32(0)
	return &flowcontrol.PriorityLevelConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: flowcontrol.PriorityLevelConfigurationSpec{
			Type: flowcontrol.PriorityLevelEnablementLimited,
			Limited: &flowcontrol.LimitedPriorityLevelConfiguration{
				NominalConcurrencyShares: &shares, LendablePercent: &none, BorrowingLimitPercent: &none,
				LimitResponse: flowcontrol.LimitResponse{
					Type:    flowcontrol.LimitResponseTypeQueue,
					Queuing: &flowcontrol.QueuingConfiguration{Queues: 128, HandSize: handSize, QueueLengthLimit: lengthLimit},
				},
			},
		},
	}
}

// newSchema returns a schema that assigns the members of a group to the level of the same name, a
// flow for each user.
func newSchema(name string, precedence int32) *flowcontrol.FlowSchema {
	return &flowcontrol.FlowSchema{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: flowcontrol.FlowSchemaSpec{
			PriorityLevelConfiguration: flowcontrol.PriorityLevelConfigurationReference{Name: name},
			MatchingPrecedence:         precedence,
			DistinguisherMethod:        &flowcontrol.FlowDistinguisherMethod{Type: flowcontrol.FlowDistinguisherMethodByUserType},
			Rules: []flowcontrol.PolicyRulesWithSubjects{{
				Subjects: []flowcontrol.Subject{{Kind: flowcontrol.SubjectKindGroup, Group: &flowcontrol.GroupSubject{Name: name}}},
				ResourceRules: []flowcontrol.ResourcePolicyRule{{
					Verbs: []string{"*"}, APIGroups: []string{"*"}, Resources: []string{"*"}, Namespaces: []string{"*"}, ClusterScope: true,
				}},
			}},
		},
	}
}

// send sends one request of a user at a level, without waiting for its end. serve is its execution.
func (s *server) send(level, name string, serve func()) {
	s.requests.Go(func() {
		arrived := time.Now()
		var executed bool
		var waited time.Duration
		// Upstream's filter bounds the wait, by default to a quarter of a minute.
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
		defer cancel()
		s.Handle(ctx,
			utilflowcontrol.RequestDigest{
				RequestInfo: &request.RequestInfo{IsResourceRequest: true, Verb: "list", APIVersion: "v1", Resource: "pods"},
				User:        &user.DefaultInfo{Name: name, Groups: []string{level, user.AllAuthenticated}},
			},
			func(*flowcontrol.FlowSchema, *flowcontrol.PriorityLevelConfiguration, string) {},
			func() flowcontrolrequest.WorkEstimate { return flowcontrolrequest.WorkEstimate{InitialSeats: width} },
			func(bool) {},
			func() {
				executed, waited = true, time.Since(arrived)
				serve()
			})
		s.mu.Lock()
		defer s.mu.Unlock()
		o := s.users[name]
		if o == nil {
			o = &outcome{}
			s.users[name] = o
		}
		if o.ended = time.Now(); executed {
			o.executed++
			o.waits = append(o.waits, waited)
		} else {
			o.refused++
		}
	})
}

func serve() { time.Sleep(took) }

// steadily sends requests at a rate.
func (s *server) steadily(level, name string, perSecond int, duration time.Duration) {
	for range int(duration.Seconds() * float64(perSecond)) {
		s.send(level, name, serve)
		time.Sleep(time.Second / time.Duration(perSecond))
	}
}

// atOnce sends requests at the same moment.
func (s *server) atOnce(level, name string, n int) {
	for range n {
		s.send(level, name, serve)
	}
}

// forgotten fails the test unless the Shedder has no state left.
func (s *server) forgotten(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Shedder.mu.Lock()
	defer s.Shedder.mu.Unlock()
	if n := s.queued.Load(); n != 0 || len(s.levels) != 0 {
		t.Errorf("without requests, %d are queued at %d levels", n, len(s.levels))
	}
}

func TestHandle_BelowOverload_RefusesNone(t *testing.T) {
	t.Parallel()
	tests := map[string]func(s *server){
		"steady load of 95 %": func(s *server) { s.steadily(lowLevel, "user", s.perSecond*95/100, 30*time.Second) },
		"burst of 5 s of work": func(s *server) {
			s.atOnce(lowLevel, "user", 5*s.perSecond)
		},
		"three bursts of 0.9 s of work": func(s *server) {
			for range 3 {
				s.atOnce(lowLevel, "user", s.perSecond*9/10)
				time.Sleep(time.Second)
			}
		},
		"a thousand users at once": func(s *server) {
			for i := range 1000 {
				s.send(lowLevel, fmt.Sprint("user ", i), serve)
			}
		},
		"requests that execute for 5 s, fewer than the queue length limit": func(s *server) {
			for range s.perSecond/int(time.Second/took) + lengthLimit - 1 {
				s.send(lowLevel, "user", func() { time.Sleep(5 * time.Second) })
				time.Sleep(50 * time.Millisecond)
			}
		},
		"many users with some requests each, while nothing is served for 5 s": func(s *server) {
			for range handSize {
				for i := range testrace.Count(1000, 300) {
					s.send(lowLevel, fmt.Sprint("user ", i), func() { time.Sleep(time.Until(s.began.Add(5 * time.Second))) })
				}
				time.Sleep(500 * time.Millisecond)
			}
		},
	}
	for name, load := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := start(t)
				load(s)
				s.requests.Wait()
				for name, o := range s.users {
					if o.refused > 0 {
						t.Errorf("%s: %d requests refused, %d executed", name, o.refused, o.executed)
					}
				}
				s.forgotten(t)
			})
		})
	}
}

// overloaded returns how long an overload lasts: hundreds of thousands of requests are simulated in
// 20 s.
func overloaded() time.Duration {
	if testrace.Few() {
		return 5 * time.Second
	}
	return 20 * time.Second
}

// TestHandle_Overload_BacklogIsBounded: a user sends some times what the level serves, for 20 s.
// The level stays busy, the excess is refused, and the backlog at the end is as many seconds of
// work as the overload is times the capacity.
func TestHandle_Overload_BacklogIsBounded(t *testing.T) {
	t.Parallel()
	for _, times := range []int{2, 4} {
		t.Run(fmt.Sprint(times, " times"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				duration := overloaded()
				s := start(t)
				began := time.Now()
				s.steadily(lowLevel, "greedy", times*s.perSecond, duration)
				s.requests.Wait()
				o := s.users["greedy"]
				longest := slices.Max(o.waits)
				t.Logf("%d executed, %d refused, longest wait %v, drained %v after the overload", o.executed, o.refused, longest, o.ended.Sub(began)-duration)
				bound := time.Duration(times)*standing + 2*took
				if longest > bound {
					t.Errorf("a request waited for %v, want at most %v", longest, bound)
				}
				if drained := o.ended.Sub(began) - duration; drained > bound+took {
					t.Errorf("the last request ended %v after the overload, want at most %v", drained, bound+took)
				}
				if served := int(o.ended.Sub(began).Seconds() * float64(s.perSecond)); o.executed < served*95/100 {
					t.Errorf("%d requests executed, want at least 95 %% of %d", o.executed, served)
				}
				s.forgotten(t)

				s.atOnce(lowLevel, "greedy", s.perSecond) // after the overload: a burst
				refused := o.refused
				s.requests.Wait()
				if o.refused != refused {
					t.Errorf("%d requests of a burst after the overload were refused", o.refused-refused)
				}
			})
		})
	}
}

// TestHandle_Overload_OtherFlowsAreServed: neither a user with few requests at the overloaded level
// nor one at another level is refused.
func TestHandle_Overload_OtherFlowsAreServed(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		duration := overloaded()
		s := start(t)
		var senders sync.WaitGroup
		senders.Go(func() { s.steadily(lowLevel, "greedy", 3*s.perSecond, duration) })
		senders.Go(func() { s.steadily(lowLevel, "modest", s.perSecond/10, duration) })
		senders.Go(func() { s.steadily(highLevel, "other", s.perSecond/2, duration) })
		senders.Wait()
		s.requests.Wait()
		if s.users["greedy"].refused == 0 {
			t.Error("no request of the overload was refused")
		}
		for _, name := range []string{"modest", "other"} {
			o := s.users[name]
			longest := slices.Max(o.waits)
			t.Logf("%s: %d executed, longest wait %v", name, o.executed, longest)
			if o.refused > 0 || longest > standing {
				t.Errorf("%s: %d refused, longest wait %v", name, o.refused, longest)
			}
		}
		s.forgotten(t)
	})
}

// TestHandle_OverloadByManyUsers_BacklogIsBounded: no user alone sends more than the level serves.
func TestHandle_OverloadByManyUsers_BacklogIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	if testrace.Few() {
		t.Skip("hundreds of thousands of requests: not under the race detector")
	}
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const users, duration = 40, 20 * time.Second
		s := start(t)
		began := time.Now()
		var senders sync.WaitGroup
		for i := range users {
			senders.Go(func() { s.steadily(lowLevel, fmt.Sprint("user ", i), 2*s.perSecond/users, duration) })
		}
		senders.Wait()
		s.requests.Wait()
		for name, o := range s.users {
			if drained := o.ended.Sub(began) - duration; drained > 5*time.Second {
				t.Errorf("%s: the last request ended %v after the overload", name, drained)
			}
			if o.refused == 0 || o.executed == 0 {
				t.Errorf("%s: %d refused, %d executed", name, o.refused, o.executed)
			}
		}
		s.forgotten(t)
	})
}

func TestMetrics_Overload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := start(t)
		before := metric(t, "strata_requests_refused_total")
		release := make(chan struct{})
		for range 2 * s.perSecond {
			s.send(lowLevel, "greedy", func() { <-release })
		}
		time.Sleep(standing)
		if n := metric(t, "strata_flows_overloaded"); n != 0 {
			t.Errorf("%v flows are overloaded after %v", n, standing)
		}
		time.Sleep(time.Millisecond)
		if n := metric(t, "strata_flows_overloaded"); n != 1 {
			t.Errorf("%v flows are overloaded, want 1", n)
		}
		s.atOnce(lowLevel, "greedy", 3)
		synctest.Wait()
		if n := metric(t, "strata_requests_refused_total") - before; n != 3 {
			t.Errorf("%v requests were refused, want 3", n)
		}
		close(release)
		s.requests.Wait()
		if n := metric(t, "strata_flows_overloaded"); n != 0 {
			t.Errorf("%v flows are overloaded without requests", n)
		}
		s.forgotten(t)
	})
}

// metric returns the sum of a metric over its labels.
func metric(t *testing.T, name string) (sum float64) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	testcheck.NoError(t, err)
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.Metric {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func TestInstall_WithoutPriorityAndFairness_DoesNothing(t *testing.T) {
	t.Parallel()
	c := &genericapiserver.Config{}
	if Install(c); c.FlowControl != nil {
		t.Error("priority and fairness was turned on")
	}
}
