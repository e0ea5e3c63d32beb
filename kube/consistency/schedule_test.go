package consistency

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// checking is a checker of resources of a mirror of the in-memory twin of etcd, in a synctest
// bubble.
type checking struct {
	*Checker
	t      *testing.T
	etcd   *memory.Store
	mirror *mirror.Mirror
}

func newChecking(t *testing.T) *checking {
	t.Helper()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	etcd := memory.New()
	m, err := mirror.New(mirror.Options{Prefix: "/registry/", Source: etcd, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	k := New(Options{VerifiesVersions: m.VerifiesVersions, Logger: log})
	t.Cleanup(k.Close)
	return &checking{k, t, etcd, m}
}

// add adds the resource with the name.
func (c *checking) add(name string) (remove func()) {
	c.t.Helper()
	r, err := c.mirror.Claim("/registry/" + name + "/")
	if err != nil {
		c.t.Fatal(err)
	}
	if err := r.WaitReady(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	return c.Add(r, schema.GroupResource{Resource: name})
}

// during returns the times of the comparisons by resource while the clock advances.
func (c *checking) during(d time.Duration) map[string][]time.Time {
	times := map[string][]time.Time{}
	for range d / time.Second {
		time.Sleep(time.Second) // of the bubble
		synctest.Wait()
		for _, r := range c.Last(nil) {
			if t := times[r.Resource]; len(t) == 0 || !t[len(t)-1].Equal(r.Time.Time) {
				times[r.Resource] = append(t, r.Time.Time)
			}
		}
	}
	return times
}

// TestSchedule_ManyResources_EachAtItsInterval adds resources at different times and removes one:
// each of the others is compared at its interval, all by one goroutine.
func TestSchedule_ManyResources_EachAtItsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChecking(t)
		const resources = 50
		c.add("r-0")
		synctest.Wait()
		before := runtime.NumGoroutine()
		var removed func()
		for i := 1; i < resources; i++ {
			removed = c.add(fmt.Sprint("r-", i))
			time.Sleep(7 * time.Second)
		}
		synctest.Wait()
		// one that runs a cleanup of other tests counts too
		if n := runtime.NumGoroutine(); n > before+2 {
			t.Errorf("%d goroutines with %d resources, %d with one", n, resources, before)
		}
		removed()
		began := time.Now()
		times := c.during(2 * time.Hour)
		if len(times) != resources-1 {
			t.Errorf("%d resources were compared, want %d", len(times), resources-1)
		}
		const longest = DefaultInterval * 3 / 2
		for name, all := range times {
			all = append(slices.DeleteFunc(all, func(at time.Time) bool { return at.Before(began) }), time.Now())
			for last := began; len(all) > 1; last, all = all[0], all[1:] {
				if gap := all[0].Sub(last); gap > longest || last != began && gap < DefaultInterval {
					t.Errorf("%s is compared after %v, want %v to %v", name, gap, DefaultInterval, longest)
				}
			}
		}
	})
}

// TestSchedule_DifferenceOnDemand_IsComparedAgainSoon: a comparison on demand that finds a
// difference brings the next one forward, and the one that finds none restores the interval.
func TestSchedule_DifferenceOnDemand_IsComparedAgainSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChecking(t)
		c.add("r")
		c.add("other")
		c.etcd.DropIf(func(ch driver.Change) bool { return strings.HasSuffix(string(ch.Key), "/lost") })
		c.etcd.Put("/registry/r/lost", "x")
		rev := c.etcd.Put("/registry/r/kept", "x")
		if err := c.mirror.Wait(t.Context(), rev); err != nil {
			t.Fatal(err)
		}
		only := schema.GroupResource{Resource: "r"}
		results, err := c.Check(context.Background(), &only)
		if err != nil || len(results) != 1 || results[0].Status != Failure {
			t.Fatalf("%+v, %v: want one difference", results, err)
		}
		found := time.Now()
		times := c.during(time.Minute)
		if again := times["r"]; len(again) == 0 || !again[len(again)-1].After(found) {
			t.Errorf("compared at %v, want again within a minute after %v", again, found)
		}
		if len(times["other"]) > 0 {
			t.Errorf("the other resource was compared at %v", times["other"])
		}
		if last := c.Last(&only); len(last) != 1 || last[0].Status != Success {
			t.Errorf("%+v, want no difference after the repair", last)
		}
		if again := c.during(DefaultInterval / 2)["r"]; len(again) > 1 {
			t.Errorf("compared at %v, want the interval of a resource without differences", again)
		}
	})
}
