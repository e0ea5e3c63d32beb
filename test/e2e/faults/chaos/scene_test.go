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
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
	"github.com/stratakube/strata/test/harness/faulty"
	"github.com/stratakube/strata/test/harness/recorded"
)

const (
	members  = 3
	replicas = 3

	// quota of etcd's database. It is small, so that the disk fills up soon.
	quota = 48 << 20

	// ahead is the error of one replica's clock from its start on.
	ahead = 72 * time.Hour

	// requestTimeout is the client's timeout. The outcome of the request is then unknown.
	requestTimeout = 6 * time.Second

	// heal bounds the recovery time after the last fault, on a busy machine.
	heal = 150 * time.Second
)

// object is an object to write; its shape is that of the API.
type object = map[string]any

const (
	valueAnnotation = "value" // different for each write
	halfLabel       = "half"  // a or b
)

var halves = []string{"a", "b"}

// resource is a resource that clients use.
type resource struct {
	name string // name of the resource, and of its prefix below /registry/
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

// scene is the cluster in which rounds run.
type scene struct {
	env      *harness.Env
	etcd     *etcdcluster.Cluster
	client   *clientv3.Client   // of all members, bypassing all faults
	members  []*clientv3.Client // of each member, bypassing all faults
	replicas []*replica
	history  *recorded.History
	clock    *faulty.Clock // of the last replica; nil if this platform cannot set it
	lanes    [][]fault     // of a round
	rolled   int           // steps of rollMember so far

	compacted atomic.Int64 // the highest revision to which etcd was asked to compact

	mu     sync.Mutex     // leaf
	faults map[string]int // number of times played, by name
}

// replica is an API server with a separate link to each member of etcd.
type replica struct {
	n      int
	server *harness.Server
	api    *harness.API
	links  []*faulty.Link // to each member
	detour []*harness.Proxy
	boots  atomic.Int64 // incremented before and after each restart, so odd during one
}

func newScene(t *testing.T, ctx context.Context) *scene {
	t.Helper()
	e := harness.New(t)
	return newSceneOn(t, ctx, e, etcdcluster.StartWithQuota(t, e, members, quota))
}

// newSceneOn returns a scene with servers on a cluster, with further flags.
func newSceneOn(t *testing.T, ctx context.Context, e *harness.Env, etcd *etcdcluster.Cluster, flags ...string) *scene {
	t.Helper()
	s := &scene{env: e, etcd: etcd, faults: map[string]int{}, lanes: [][]fault{etcdFaults, replicaFaults}}
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
		s.replicas = append(s.replicas, s.newReplica(t, n, prepare, flags...))
	}
	ready, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for _, r := range s.replicas {
		harness.Check(t, r.server.Await(ready, "/readyz"))
	}
	return s
}

// newReplica starts an API server. See harness.Env for prepare.
func (s *scene) newReplica(t *testing.T, n int, prepare func(pid int) error, flags ...string) *replica {
	t.Helper()
	r := &replica{n: n}
	etcd := *s.etcd.Etcd()
	etcd.URL = ""
	for i := range members {
		m := s.etcd.Members[r.memberOf(i)] // each replica starts with a different member
		r.links = append(r.links, faulty.NewLink(t, s.env, m.URL))
		r.detour = append(r.detour, s.env.Proxy(m.Etcd))
		if i > 0 {
			etcd.URL += ","
		}
		etcd.URL += r.links[i].URL
	}
	flags = append([]string{
		"--disable-admission-plugins=ServiceAccount", // only clients write to their namespaces
		"--etcd-compaction-interval=0",
	}, flags...)
	if harness.Previous() != "" {
		flags = append(flags, "--strata-feature-gates=SealedContinueTokens=true")
	}
	if previous := harness.Previous(); previous != "" && n == 0 {
		t.Logf("replica 0 is %s", previous)
		r.server = s.env.StartPrevious(previous, &etcd, flags...)
	} else {
		r.server = s.env.StartAPIServerPrepared(prepare, &etcd, flags...)
	}
	r.api = r.server.API()
	return r
}

// memberOf returns the index of the member to which a link of the replica leads.
func (r *replica) memberOf(link int) int { return (r.n + link) % members }

// throughDetour routes the replica's links through its proxies, or directly to the members again.
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

// createNamespaces creates new namespaces and returns when every replica has observed them.
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
	// Admission reads namespaces from an informer cache of each replica.
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

// unchanged is the number of objects of each kind in a namespace that no client changes: lists of a
// few objects use no index.
const unchanged = 200

// fill writes the unchanged objects of a round, directly in etcd. No selector of the round selects
// them.
func (r *round) fill(t *testing.T, ctx context.Context) {
	t.Helper()
	const perTransaction = 100
	for _, res := range resources {
		for _, ns := range r.namespaces {
			for first := 0; first < unchanged; first += perTransaction {
				var ops []clientv3.Op
				for i := first; i < first+perTransaction; i++ {
					name := fmt.Sprintf("unchanged-%03d", i)
					ops = append(ops, clientv3.OpPut("/registry/"+string(keyOf(res.name, ns, name)), stored(res, ns, name, "none", fmt.Sprintf("%d-%s", r.seed, name))))
				}
				harness.Check(t, r.again(ctx, func(ctx context.Context) error {
					_, err := r.scene.client.Txn(ctx).Then(ops...).Commit()
					return err
				}))
			}
		}
	}
}

// stored returns an object as JSON, which servers decode like their own format.
func stored(res resource, ns, name, half, value string) string {
	kind := map[string]string{"configmaps": "ConfigMap", "secrets": "Secret"}[res.name]
	return fmt.Sprintf(`{"apiVersion":"v1","kind":%q,"metadata":{"name":%q,"namespace":%q,"uid":%q,"labels":{%q:%q},"annotations":{%q:%q}}}`,
		kind, name, ns, uuid.NewUUID(), halfLabel, half, valueAnnotation, value)
}

// indexed returns the number of lists with a selector for which the replicas have used an index
// since they were started.
func (s *scene) indexed(ctx context.Context) (n float64, err error) {
	for _, r := range s.replicas {
		used, err := r.api.Sum(ctx, "strata_list_plans_total", `plan="index"`)
		if err != nil {
			return 0, err
		}
		n += used
	}
	return n, nil
}

// empty deletes the objects of a round.
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

// random returns the random source of a part of a round: the same for the same seed and part.
func random(seed uint64, part int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(part))) }
