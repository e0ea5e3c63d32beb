// Package replica tests `strata replica` from outside: reads from memory, everything else through the primaries, and nothing written.
package replica

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 3 * time.Minute

// env is shared by the tests of the package; its servers are started by the first test that uses them.
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

// scene is a primary and a replica on one etcd.
type scene struct {
	etcd             *harness.Etcd
	front            *harness.FrontProxy
	primary, replica *harness.Server
	tokenFile        string
	auditLog         string // of the primary
}

// newScene starts the servers of the tests that do not stop any.
var newScene = sync.OnceValue(func() *scene {
	s := &scene{etcd: env.Etcd(), front: env.FrontProxy(), tokenFile: env.WriteFile("tokens.csv", []byte(tokens)),
		auditLog: filepath.Join(env.Dir("audit"), "audit.log")}
	s.primary = env.APIServer(s.etcd, append(s.front.TrustFlags(), "--token-auth-file="+s.tokenFile,
		"--audit-policy-file="+env.WriteFile("audit.yaml", []byte(auditPolicy)), "--audit-log-path="+s.auditLog, "--audit-log-mode=blocking")...)
	s.replica = env.Replica(s.etcd, s.front, []*harness.Server{s.primary}, "--token-auth-file="+s.tokenFile)
	return s
})

func open(t *testing.T) (context.Context, *scene) {
	t.Helper()
	return harness.Context(t, testTimeout), newScene()
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	harness.Check(t, err)
	return string(data)
}
