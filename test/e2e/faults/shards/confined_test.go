package shards

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// load writes and reads the objects of one path, and watches them.
type load struct {
	path     string
	object   func(name string) object
	sessions recorded.Sessions

	mu     sync.Mutex // guards the fields below
	failed int        // requests that failed
	slow   time.Duration
	rounds int // a write and a read that saw it
}

// run creates objects, and gets and lists each of them at once, until ctx ends. A read that does
// not see an accepted write is an error.
func (l *load) run(t *testing.T, ctx context.Context, api *harness.API) {
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("o-%d", i)
		began := time.Now()
		created, err := api.Create(ctx, l.path, l.object(name))
		var read harness.Object
		var list *harness.List
		if err == nil {
			read, err = api.Get(ctx, l.path+"/"+name, "")
		}
		if err == nil {
			list, err = api.List(ctx, l.path, "")
		}
		if ctx.Err() != nil {
			return
		}
		l.mu.Lock()
		if took := time.Since(began); err != nil {
			l.failed++
		} else {
			l.rounds++
			l.slow = max(l.slow, took)
		}
		l.mu.Unlock()
		if err != nil {
			continue
		}
		if read.Metadata.ResourceVersion != created.Metadata.ResourceVersion || !slices.Contains(list.Names(), name) {
			t.Errorf("%s: a read after the write of %s does not see it", l.path, name)
		}
	}
}

func (l *load) counts() (rounds, failed int, slow time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rounds, l.failed, l.slow
}

// reset forgets failures and times.
func (l *load) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rounds, l.failed, l.slow = 0, 0, 0
}

// watch records a watch from the present until ctx ends. The returned function waits for its end,
// and returns an error if the server ended it.
func (l *load) watch(t *testing.T, ctx context.Context, api *harness.API) (ended func() error) {
	t.Helper()
	list, err := api.List(ctx, l.path, "")
	harness.Check(t, err)
	session := l.sessions.Begin(harness.Revision(t, list.Metadata.ResourceVersion))
	w, r, err := api.Watch(ctx, l.path, "allowWatchBookmarks=true&timeoutSeconds=600&resourceVersion="+list.Metadata.ResourceVersion)
	harness.Check(t, err)
	if w == nil {
		t.Fatal(r.Err())
	}
	result := make(chan error, 1)
	go func() {
		for {
			e, err := w.Next(ctx)
			if err != nil {
				if ctx.Err() != nil {
					err = nil
				}
				result <- err
				return
			}
			session.Add(e)
		}
	}()
	return func() error { return <-result }
}

// confinesFaults kills, and then pauses, the etcd of events under load of all resources. Reads and
// writes of the others continue, no watch ends, and afterwards the watches of each etcd have met
// their guarantees.
func (s *scene) confinesFaults(t *testing.T, ctx context.Context) {
	api, events := s.api, s.events
	histories := map[*load]*recorded.History{}
	prefixes := []string{"/registry/configmaps/", "/registry/events/", "/registry/leases/"}
	all := []*load{{path: mapsPath, object: named}, {path: eventsPath, object: event}, {path: leasesPath, object: named}}
	for i, etcd := range []*harness.Etcd{s.rest, s.events, s.leases} {
		histories[all[i]] = recorded.Follow(t, ctx, etcd.Client(), prefixes[i])
	}
	loading, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	var watches []func() error
	for _, l := range all {
		watches = append(watches, l.watch(t, loading, api))
		group.Go(func() { l.run(t, loading, api) })
	}
	for name, fault := range map[string]struct{ begin, end func() }{
		"killed": {events.Kill, events.Start},
		"paused": {events.Pause, events.Continue},
	} {
		fault.begin()
		for _, l := range []*load{all[0], all[2]} {
			l.reset()
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, "/readyz", "", nil)
			return err == nil && r.Code != http.StatusOK && strings.Contains(string(r.Body), "[-]etcd-override-"), err
		}))
		for _, l := range []*load{all[0], all[2]} {
			harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
				rounds, _, _ := l.counts()
				return rounds >= 50, fmt.Errorf("%d rounds of %s", rounds, l.path)
			}))
			rounds, failed, slow := l.counts()
			t.Logf("%s, while the etcd of events is %s: %d rounds, the slowest took %v", l.path, name, rounds, slow)
			if failed > 0 {
				t.Errorf("%d requests of %s failed while the etcd of events was %s", failed, l.path, name)
			}
		}
		requireCode(t, ctx, api, "/livez", http.StatusOK)
		fault.end()
		harness.Check(t, s.server.Await(ctx, "/readyz"))
		before, _, _ := all[1].counts()
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			rounds, _, _ := all[1].counts()
			return rounds > before+10, nil
		}))
	}
	stop()
	group.Wait()
	for i, ended := range watches {
		if err := ended(); err != nil {
			t.Errorf("the watch of %s: %v", all[i].path, err)
		}
	}
	for i, l := range all {
		history, err := histories[l].Now(ctx)
		harness.Check(t, err)
		sessions, err := l.sessions.Recorded(0)
		harness.Check(t, err)
		// the server's lease is elsewhere
		watched := func(key string, _ any) bool { return strings.HasPrefix(key, "default/") }
		harness.Check(t, history.Under(prefixes[i]).View(watched).Check(sessions))
	}
}

// TestUp_Shards_AreInTheDataDirectory starts `strata up` with three etcds, restarts it, and tries
// another number.
func TestUp_Shards_AreInTheDataDirectory(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	data := filepath.Join(env.Dir("up"), "data")
	s := env.UpIn(data, "--etcd-shards=3")
	for path, o := range map[string]object{mapsPath: named("one"), eventsPath: event("one"), leasesPath: named("one")} {
		_, err := s.API().Create(ctx, path, o)
		harness.Check(t, err)
	}
	harness.Check(t, s.Stop())
	for flag, want := range map[string]string{"--etcd-shards=2": "has 3; omit the flag to start it unchanged, or move resources between stopped etcds", "--etcd-shards=4": "is not between 1 and 3"} {
		r, err := env.Run(ctx, "", "up", "--data-dir="+data, "--secure-port=0", flag)
		harness.Check(t, err)
		if r.Code != 2 || !strings.Contains(r.Stderr, want) {
			t.Errorf("%s: exit code %d, want 2 and %q:\n%s", flag, r.Code, want, r.Stderr)
		}
	}
	s = env.UpIn(data)
	for _, path := range []string{mapsPath, eventsPath, leasesPath} {
		requireCode(t, ctx, s.API(), path+"/one", http.StatusOK)
	}
	for _, dir := range []string{"etcd", "etcd-events", "etcd-leases"} {
		found, err := filepath.Glob(filepath.Join(data, dir, "member", "snap", "db"))
		harness.Check(t, err)
		if len(found) != 1 {
			t.Errorf("no database in %s", dir)
		}
	}
}
