// Package replica tests `strata replica` from outside: reads from memory, everything else through
// the primaries, and nothing written.
//
// Most tests share one etcd, one primary and one replica (scene). A test that stops, stalls or
// restarts a replica, or that needs flags of its own, starts a replica on them. A primary that
// stops is a server of the test process in front of the shared one (front).
package replica

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// env is shared by the tests of the package; its servers are started by the first test that uses
// them.
var env *harness.Env

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { env = e })
}

// Users, whose token is the name followed by "-token".
const tokens = `admin-token,admin,admin,system:masters
reader-token,reader,reader-uid,"readers,others"
nothing-token,nothing,nothing
`

// auditPolicy logs the requests of users.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- {level: None, users: [system:apiserver]}
- {level: Metadata, omitStages: [RequestReceived]}
`

// encryption stores Secrets encrypted.
const encryption = `{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration", "resources": [{"resources": ["secrets"], "providers": [{"aescbc": {"keys": [
	{"name": "key1", "secret": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="}]}}]}]}`

// scene is a primary and a replica on one etcd. Tests stop neither; each has a namespace or names
// of its own.
type scene struct {
	etcd             *harness.Etcd       // for its root user
	readOnly         *harness.Etcd       // the same, for the user of replicas
	front            *harness.FrontProxy // trusted by the primary
	clients          *harness.FrontProxy // whose certificate is to the primary that of a client
	feed             *harness.Feed       // of the replica
	primary, replica *harness.Server
	keys             string   // flag for the keys of Secrets
	flags            []string // of replicas without --delegate-auth
	auditLog         string   // of the primary
}

// newScene starts the servers.
var newScene = sync.OnceValues(func() (*scene, error) {
	ca := env.Authority()
	s := &scene{etcd: env.EtcdTLS(ca), front: env.FrontProxy(), clients: env.FrontProxy(), feed: env.Feed(),
		keys:     "--encryption-provider-config=" + env.WriteFile("encryption.json", []byte(encryption)),
		auditLog: filepath.Join(env.Dir("audit"), "audit.log")}
	s.readOnly = s.etcd.As(ca.Issue("replica"))
	s.flags = []string{"--token-auth-file=" + env.WriteFile("tokens.csv", []byte(tokens)), s.keys}
	if err := addUsers(s.etcd.Client()); err != nil {
		return nil, err
	}
	s.primary = env.APIServer(s.etcd, slices.Concat(s.front.TrustFlags(), s.flags, []string{"--client-ca-file=" + s.clients.AuthorityFile(),
		"--audit-policy-file=" + env.WriteFile("audit.yaml", []byte(auditPolicy)), "--audit-log-path=" + s.auditLog, "--audit-log-mode=blocking"})...)
	s.replica = env.Replica(s.readOnly, s.front, []*harness.Server{s.primary}, append(s.feed.Flags(), s.flags...)...)
	s.replica.AwaitProgress("")
	return s, nil
})

// addUsers enables authentication of etcd: the common name of a client's certificate is its user.
// The user of replicas has only the rights of docs/replicas.md.
func addUsers(client *clientv3.Client) error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	return errors.Join(
		second(client.RoleAdd(ctx, "root")),
		second(client.UserAdd(ctx, "root", "unused")),
		second(client.UserGrantRole(ctx, "root", "root")),
		second(client.UserAdd(ctx, "etcd-client", "unused")),
		second(client.UserGrantRole(ctx, "etcd-client", "root")),
		second(client.RoleAdd(ctx, "reader")),
		second(client.RoleGrantPermission(ctx, "reader", "/registry/", clientv3.GetPrefixRangeEnd("/registry/"), clientv3.PermissionType(clientv3.PermRead))),
		second(client.RoleGrantPermission(ctx, "reader", "compact_rev_key", "", clientv3.PermissionType(clientv3.PermRead))),
		second(client.UserAdd(ctx, "replica", "unused")),
		second(client.UserGrantRole(ctx, "replica", "reader")),
		second(client.AuthEnable(ctx)),
	)
}

// second returns the error of a call.
func second[T any](_ T, err error) error { return err }

func open(t *testing.T) (context.Context, *scene) {
	t.Helper()
	s, err := newScene()
	harness.Check(t, err)
	return harness.Context(t, testTimeout), s
}

// start starts a replica that ends with the test, and returns when it is ready.
func (s *scene) start(t *testing.T, etcd *harness.Etcd, primaries []string, flags ...string) *harness.Server {
	t.Helper()
	r := s.launch(t, etcd, primaries, flags...)
	harness.Check(t, r.Await(harness.Context(t, testTimeout), "/readyz"))
	r.AwaitProgress("")
	return r
}

// launch is start without the wait.
func (s *scene) launch(t *testing.T, etcd *harness.Etcd, primaries []string, flags ...string) *harness.Server {
	r := env.ReplicaOf(etcd, s.front, primaries, slices.Concat(flags, s.flags)...)
	endWith(t, r)
	return r
}

// endWith stops a replica at the end of the test, after a last check of its memory.
func endWith(t *testing.T, r *harness.Server) {
	t.Cleanup(func() {
		if err := errors.Join(r.RequireConsistent(), r.Stop()); err != nil {
			t.Error(err)
		}
	})
}

// maps returns the path of the ConfigMaps of a new namespace.
func (s *scene) maps(ctx context.Context, t *testing.T) string {
	t.Helper()
	return "/api/v1/namespaces/" + harness.Namespace(t, ctx, s.primary.API(), harness.NewName("test")) + "/configmaps"
}

// copyTo writes the stored objects to another etcd, on which no server has run: without leases, so
// that only its clients change it.
func (s *scene) copyTo(ctx context.Context, t *testing.T, etcd *clientv3.Client) {
	t.Helper()
	stored, err := s.etcd.Client().Get(ctx, "/registry/", clientv3.WithPrefix())
	harness.Check(t, err)
	for _, kv := range stored.Kvs {
		put(ctx, t, etcd, string(kv.Key), string(kv.Value))
	}
}

// put writes to etcd, and repeats a write that fails: its members may elect another leader. It
// returns the last revision.
func put(ctx context.Context, t *testing.T, etcd *clientv3.Client, key, value string) (revision int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		written, err := etcd.Put(ctx, key, value)
		if err == nil {
			revision = written.Header.Revision
		}
		return err == nil, err
	}))
	return revision
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Check(t, err)
	return string(data)
}
