package restart

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
	"github.com/stratakube/strata/test/harness/recorded"
)

const (
	gizmoGroup   = "restart.example.com"
	gizmosInEtcd = "/registry/" + gizmoGroup + "/gizmos/"

	// informerToken is the bearer token of the clients whose requests are audited.
	informerToken = "informer-token"
)

// scene is a control plane of two API servers, or three in the long form, behind a balancer, on an
// etcd of three members.
type scene struct {
	etcd     *etcdcluster.Cluster
	servers  []*harness.Server
	audits   []string // each server's audit log
	balancer *harness.Balancer
	history  *recorded.History
	api      *harness.API // the administrator's, through the balancer
}

// newScene starts a scene. Its history begins when the custom resource is served.
func newScene(t *testing.T, ctx context.Context) *scene {
	t.Helper()
	e := harness.New(t)
	s := &scene{etcd: etcdcluster.Start(t, e, 3)}
	policy := e.WriteFile("policy.yaml", []byte(`apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, users: [informer], verbs: [list, watch]}
- {level: None}
`))
	tokens := e.WriteFile("tokens.csv", []byte("admin-token,admin,admin,system:masters\n"+informerToken+",informer,informer,system:masters\n"))
	flags := slices.Clone(serverFlags)
	if harness.Long() {
		flags = append(flags, "--etcd-compaction-interval="+compactionInterval.String())
	}
	for range harness.Pick(2, 3) {
		audit := filepath.Join(e.Dir("audit"), "audit.log")
		s.audits = append(s.audits, audit)
		s.servers = append(s.servers, e.StartAPIServer(s.etcd.Etcd(), append(flags,
			"--token-auth-file="+tokens, "--audit-policy-file="+policy, "--audit-log-path="+audit)...))
	}
	for _, server := range s.servers {
		harness.Check(t, server.Await(ctx, "/readyz"))
	}
	s.balancer = e.Balancer(s.servers...)
	s.api = s.servers[0].APIFor(harness.OwnConnections(s.balancer.Config))
	createGizmos(t, ctx, s.servers)
	s.history = recorded.Follow(t, ctx, s.etcd.Client(), "/registry/")
	return s
}

// createGizmos creates a custom resource, if it does not exist, and returns when all servers serve
// it.
func createGizmos(t *testing.T, ctx context.Context, servers []*harness.Server) {
	t.Helper()
	var apis []*harness.API
	for _, s := range servers {
		apis = append(apis, s.API())
	}
	harness.Check(t, harness.Define(ctx, gizmoGroup, "gizmos", "Gizmo", nil, apis...))
}

// config returns a client configuration whose requests are audited, with separate connections to
// the balancer.
func (s *scene) config() *rest.Config {
	config := s.servers[0].ConfigFor(informerToken)
	config.Host = s.balancer.URL
	return harness.OwnConnections(config)
}

// restartOne stops a server with SIGTERM and starts it again.
func (s *scene) restartOne(t *testing.T, i int) {
	t.Helper()
	harness.Check(t, s.servers[i].Stop())
	s.servers[i].Restart()
}

// restartAll stops all servers at once, by SIGTERM or by SIGKILL, and starts them again, with more
// flags.
func (s *scene) restartAll(t *testing.T, ctx context.Context, kill bool, flags ...string) {
	t.Helper()
	var stopping sync.WaitGroup
	for _, server := range s.servers {
		stopping.Go(func() {
			if kill {
				server.Kill()
			} else if err := server.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
	stopping.Wait()
	for _, server := range s.servers {
		server.StartAgain(flags...)
	}
	for _, server := range s.servers {
		harness.Check(t, server.Await(ctx, "/readyz"))
	}
}

// audited has the informers' requests according to the audit logs of all servers.
type audited struct {
	lists   int            // LISTs and watches with initial events
	watches int            // other watches
	gone    int            // of both, answered with 410
	codes   map[int]int    // of all requests
	paths   map[string]int // the lists by path
}

// audit reads the audit logs. A request is logged before it is answered, and the log survives a
// killed server.
func (s *scene) audit(t *testing.T) audited {
	t.Helper()
	a := audited{codes: map[int]int{}, paths: map[string]int{}}
	seen := map[string]bool{}
	for _, path := range s.audits {
		file, err := os.Open(path)
		harness.Check(t, err)
		lines := bufio.NewScanner(file)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var event struct {
				AuditID        string
				Verb           string
				RequestURI     string
				ResponseStatus struct{ Code int }
			}
			if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
				continue // a partial line of a killed server
			}
			if event.ResponseStatus.Code == http.StatusGone {
				a.gone++
			}
			if seen[event.AuditID] { // a watch is logged at its start and at its end
				continue
			}
			seen[event.AuditID] = true
			a.codes[event.ResponseStatus.Code]++
			u, err := url.Parse(event.RequestURI)
			harness.Check(t, err)
			if event.Verb == "list" && u.Query().Get("continue") == "" || u.Query().Get("sendInitialEvents") == "true" {
				a.lists++
				a.paths[u.Path]++
			} else if event.Verb == "watch" {
				a.watches++
			}
		}
		harness.Check(t, lines.Err())
		harness.Check(t, file.Close())
	}
	return a
}
