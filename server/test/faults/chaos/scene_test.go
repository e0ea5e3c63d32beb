package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/etcdcluster"
	"github.com/stratakube/strata/server/test/internal/faulty"
	"github.com/stratakube/strata/server/test/internal/harness"
	"github.com/stratakube/strata/server/test/internal/recorded"
)

const (
	members  = 3
	replicas = 3

	// quota of etcd's database. It is small, so that a disk can be full soon.
	quota = 48 << 20

	// ahead is by how much the clock of one replica is wrong from its start on.
	ahead = 72 * time.Hour

	// requestTimeout is when a client gives up. What has become of the request is not known then.
	requestTimeout = 6 * time.Second

	// heal bounds how long anything may take to be well again when nothing is broken any longer.
	heal = 90 * time.Second
)

// object is an object to write; its shape is that of the API.
type object = map[string]any

const (
	valueAnnotation = "value" // different for each write
	halfLabel       = "half"  // a or b
)

var halves = []string{"a", "b"}

// resource is one that clients use.
type resource struct {
	name string // of the resource, and below /registry/
	api  string // path of the group and version
}

var resources = []resource{{"configmaps", "/api/v1"}, {"secrets", "/api/v1"}}

// path returns the path of a namespace's objects; of all objects if it is "".
func (r resource) path(namespace string) string {
	if namespace == "" {
		return r.api + "/" + r.name
	}
	return r.api + "/namespaces/" + namespace + "/" + r.name
}

// scene is what rounds take place in.
type scene struct {
	env      *harness.Env
	etcd     *etcdcluster.Cluster
	client   *clientv3.Client   // of all members, past everything that is broken
	members  []*clientv3.Client // of each member, likewise
	replicas []*replica
	history  *recorded.History
	clock    *faulty.Clock // of the last replica; nil if it cannot be set here

	compacted atomic.Int64 // the highest revision that etcd was asked to compact to

	mu     sync.Mutex     // leaf
	faults map[string]int // played, by name
}

// replica is an API server with a way of its own to each member of etcd.
type replica struct {
	n      int
	server *harness.Server
	api    *harness.API
	links  []*faulty.Link // to each member
	detour []*harness.Proxy
	boots  atomic.Int64 // odd while it is started again
}

func newScene(t *testing.T, ctx context.Context) *scene {
	t.Helper()
	e := harness.New(t)
	s := &scene{env: e, etcd: etcdcluster.StartWithQuota(t, e, members, quota), faults: map[string]int{}}
	s.client = s.etcd.Client()
	for _, m := range s.etcd.Members {
		s.members = append(s.members, m.Client())
	}
	s.history = recorded.Follow(t, ctx, s.client, "/registry/")
	if err := faulty.ClockError(); err != nil {
		t.Logf("all replicas have the right time: %v", err)
	} else {
		s.clock = &faulty.Clock{}
		s.clock.Shift(ahead)
		e.AtEnd(s.clock.Close)
	}
	for n := range replicas {
		var prepare func(pid int) error
		if n == replicas-1 && s.clock != nil {
			prepare = s.clock.Prepare
		}
		s.replicas = append(s.replicas, s.newReplica(t, n, prepare))
	}
	ready, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for _, r := range s.replicas {
		harness.Check(t, r.server.Await(ready, "/readyz"))
	}
	return s
}

// newReplica starts an API server. It may be prepared as harness.Env says.
func (s *scene) newReplica(t *testing.T, n int, prepare func(pid int) error, flags ...string) *replica {
	t.Helper()
	r := &replica{n: n}
	etcd := *s.etcd.Etcd()
	etcd.URL = ""
	for i := range members {
		m := s.etcd.Members[r.memberOf(i)] // each replica begins with another one
		r.links = append(r.links, faulty.NewLink(t, s.env, m.URL))
		r.detour = append(r.detour, s.env.Proxy(m.Etcd))
		if i > 0 {
			etcd.URL += ","
		}
		etcd.URL += r.links[i].URL
	}
	r.server = s.env.StartAPIServerPrepared(prepare, &etcd, append([]string{
		"--disable-admission-plugins=ServiceAccount", // nobody but clients writes to their namespaces
		"--etcd-compaction-interval=0",
	}, flags...)...)
	r.api = r.server.API()
	return r
}

// memberOf returns the index of the member that a link of the replica leads to.
func (r *replica) memberOf(link int) int { return (r.n + link) % members }

// throughDetour makes the replica's ways lead over its proxies, or straight to the members again.
func (s *scene) throughDetour(r *replica, on bool) error {
	for i, l := range r.links {
		to := s.etcd.Members[r.memberOf(i)].URL
		if on {
			to = r.detour[i].URL()
		}
		if err := l.Lead(to); err != nil {
			return err
		}
		l.Reset()
	}
	return nil
}

// played counts a fault.
func (s *scene) played(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[name]++
}

// createNamespaces creates new namespaces, which every replica knows when it returns.
func (s *scene) createNamespaces(t *testing.T, ctx context.Context, prefix string, all []*replica) (names []string) {
	t.Helper()
	for i := range 2 {
		name := fmt.Sprintf("%s-%d", prefix, i)
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := s.replicas[0].api.Do(ctx, http.MethodPost, "/api/v1/namespaces", "", object{"metadata": object{"name": name}})
			if err != nil {
				return false, err
			}
			return r.Code/100 == 2 || r.Code == http.StatusConflict, r.Err()
		}))
		names = append(names, name)
	}
	// Admission asks a cache of each replica whether a namespace exists.
	for _, r := range all {
		for _, name := range names {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				resp, err := r.api.Do(ctx, http.MethodPost, resources[0].path(name), "dryRun=All", object{"metadata": object{"name": "probe"}})
				if err != nil {
					return false, err
				}
				return resp.Code/100 == 2, resp.Err()
			}))
		}
	}
	return names
}

// empty deletes what a round has left.
func (r *round) empty(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, res := range resources {
		for _, ns := range r.namespaces {
			harness.Check(t, r.again(ctx, func(ctx context.Context) error {
				_, err := r.scene.client.Delete(ctx, "/registry/"+res.name+"/"+ns+"/", clientv3.WithPrefix())
				return err
			}))
		}
	}
}

// random returns what part of a round draws from: the same for a seed and a part.
func random(seed uint64, part int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(part))) }
