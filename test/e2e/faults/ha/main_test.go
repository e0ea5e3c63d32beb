// Package ha tests `strata up --ha`: every process of the control plane is ended in turn, by
// SIGKILL and by SIGTERM, while informers, elected controllers, readers and writers use the two
// balancers.
//
// Clients record their events, a client of etcd records the history, and watchcheck compares the
// two.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG  1 for the long form: each process, by both signals
package ha

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/test/harness"
)

func TestMain(m *testing.M) {
	harness.SilenceKlog()
	harness.Main(m, func(e *harness.Env) { env = e })
}

const (
	configMaps = "configmaps"
	secrets    = "secrets"
	namespace  = "default"
)

// object is an object to write; its shape is that of the API.
type object = map[string]any

// The control plane of the tests, and its environment. The first test starts it.
var (
	env    *harness.Env
	shared *scene
)

// scene is a control plane of `strata up --ha`.
type scene struct {
	up       *harness.Server
	dir      string // the data directory
	servers  *rest.Config
	replicas *rest.Config
	etcd     *clientv3.Client
	members  []string // client URLs of etcd-1 and so on
}

// startScene returns the control plane, which runs.
func startScene(t *testing.T) *scene {
	t.Helper()
	harness.OnlyStrata(t)
	if shared != nil {
		return shared
	}
	s := &scene{dir: filepath.Join(env.Dir("ha"), "data")}
	s.start()
	s.servers = s.context(t, "strata")
	s.replicas = s.context(t, "strata-replicas")

	var layout struct{ Etcd []struct{ Port int } }
	data, err := os.ReadFile(filepath.Join(s.dir, "ha", "layout.json"))
	harness.Check(t, err)
	harness.Check(t, json.Unmarshal(data, &layout))
	for _, m := range layout.Etcd {
		s.members = append(s.members, fmt.Sprintf("https://127.0.0.1:%d", m.Port))
	}
	pki := filepath.Join(s.dir, "pki")
	info := transport.TLSInfo{CertFile: filepath.Join(pki, "etcd-client.pem"), KeyFile: filepath.Join(pki, "etcd-client.pem"), TrustedCAFile: filepath.Join(pki, "etcd-ca.crt")}
	tlsConfig, err := info.ClientConfig()
	harness.Check(t, err)
	s.etcd, err = clientv3.New(clientv3.Config{Endpoints: s.members, DialTimeout: 10 * time.Second, Logger: zap.NewNop(), TLS: tlsConfig})
	harness.Check(t, err)
	env.AtEnd(func() { s.etcd.Close() })
	shared = s
	return s
}

// start starts `strata up --ha` in the data directory.
func (s *scene) start() { s.up = env.UpIn(s.dir, "--ha", "--controllers=none") }

// context returns the administrator's connection of a context in the kubeconfig, without a rate
// limit.
func (s *scene) context(t *testing.T, name string) *rest.Config {
	t.Helper()
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
		&clientcmd.ClientConfigLoadingRules{ExplicitPath: filepath.Join(s.dir, "kubeconfig")},
		&clientcmd.ConfigOverrides{CurrentContext: name}).ClientConfig()
	harness.Check(t, err)
	config.QPS = -1
	config.WarningHandler = rest.NoWarnings{}
	return config
}

// leader returns the name of the process that leads etcd, which is none of others.
func (s *scene) leader(t *testing.T, ctx context.Context, others ...string) (name string) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		for i, url := range s.members {
			ctx, cancel := context.WithTimeout(ctx, time.Second)
			status, err := s.etcd.Status(ctx, url)
			cancel()
			name = fmt.Sprintf("etcd-%d", i+1)
			if err == nil && status.Leader == status.Header.MemberId && !slices.Contains(others, name) {
				return true, nil
			}
		}
		return false, fmt.Errorf("no member leads")
	}))
	return name
}

// followElections returns a function that returns the changes of etcd's term until then as faults:
// a leader that is busy for a second is replaced without a signal.
func (s *scene) followElections(t *testing.T, ctx context.Context) (faults func() []fault) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	var all []fault
	var following sync.WaitGroup
	following.Go(func() {
		term, since := uint64(0), time.Now() // since is the beginning of the round before
		for ctx.Err() == nil {
			began := time.Now()
			for _, url := range s.members {
				asking, done := context.WithTimeout(ctx, time.Second)
				status, err := s.etcd.Status(asking, url)
				done()
				if err != nil || status.RaftTerm <= term || status.Leader == 0 {
					continue
				}
				if term != 0 {
					all = append(all, fault{process: "etcd", signal: "election", leader: true, began: since, settled: time.Now()})
				}
				term = status.RaftTerm
			}
			since = began
			harness.Pause(ctx, 100*time.Millisecond)
		}
	})
	return func() []fault {
		cancel()
		following.Wait()
		return all
	}
}

// pids returns the ids of the processes of the control plane by name.
func (s *scene) pids(t *testing.T) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.dir, "ha", "*.pid"))
	harness.Check(t, err)
	pids := map[string]int{}
	for _, file := range files {
		data, err := os.ReadFile(file)
		harness.Check(t, err)
		pids[strings.TrimSuffix(filepath.Base(file), ".pid")], err = strconv.Atoi(strings.TrimSpace(string(data)))
		harness.Check(t, err)
	}
	return pids
}

// end sends the signal of f to its process, and returns when another one is ready in its place.
func (s *scene) end(t *testing.T, ctx context.Context, f *fault) {
	t.Helper()
	pid := s.pids(t)[f.process]
	if pid == 0 {
		t.Fatalf("no process is %s", f.process)
	}
	signal := syscall.SIGKILL
	if f.signal == term {
		signal = syscall.SIGTERM
	}
	printed := len(s.up.Lines())
	f.began = time.Now()
	harness.Check(t, syscall.Kill(pid, signal))
	settled := []string{fmt.Sprintf("%s: process %d ended", f.process, pid)}
	want := append(settled, f.process+": ready, process")
	if !strings.HasPrefix(f.process, "etcd-") {
		// The balancer prints only changes, and may have left a slow process out before.
		returns := "balancer: " + f.process + " gets connections"
		settled = []string{"balancer: no new connections to " + f.process, returns}
		want = append(want, returns)
	}
	if f.leader {
		s.leader(t, ctx, f.process)
	} else {
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return slices.ContainsFunc(s.up.Lines()[printed:], func(line string) bool {
				return slices.ContainsFunc(settled, func(text string) bool { return strings.Contains(line, text) })
			}), fmt.Errorf("no line has any of %q", settled)
		}))
	}
	f.settled = time.Now()
	for _, text := range want {
		_, _, err := s.up.WaitLine(ctx, printed, text)
		harness.Check(t, err)
	}
	f.ended = time.Now()
}
