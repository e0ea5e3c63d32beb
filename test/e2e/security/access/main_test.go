// Package access compares both engines, on one etcd, in the reads that they allow to users: users
// with different rights, times all options of a read, times the forms of an answer. Both engines
// have to make the same decision, with the same message, and leave the same audit events
// (matrix_test.go, paths_test.go, node_test.go, impersonation_test.go).
//
// Agreement of both is not enough: each object carries a unique mark, and no answer may contain a
// mark of an object that its user may not read, whether or not the other engine returns it. The
// same holds for continue tokens (tokens_test.go).
//
// The output of a server is searched for a text that was put into secrets (canary_test.go), and the
// pages that it serves beside the API are requested by users without permission (debug_test.go).
//
//	STRATA_TEST_LONG=1  every resource in every form, more users on odd paths, a log at -v=10, and watches that are served
//	                    when the filters of their requests have returned (APIServingWithRoutine)
package access

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test, and the start of the servers before the first one.
const testTimeout = 10 * time.Minute

// env is shared by the whole package; its servers are started by the first test that uses them.
var env *harness.Env

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { env = e })
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// Users. A user's token is the name followed by "-token"; anonymous has none, and stranger's is in
// no token file.
const (
	admin     = "admin"     // in system:masters
	anonymous = "anonymous" // sends no token
	stranger  = "stranger"  // sends an unknown token
	nothing   = "nothing"   // may do nothing
	all       = "all"       // may get, list and watch all objects
	inA       = "in-a"      // may get, list and watch all objects in namespace a
	inB       = "in-b"      // the same in b
	// may get, list and watch objects named one, in namespace a or cluster-scoped
	oneName = "one-name"
	getter  = "getter"  // may only get, in namespace a
	lister  = "lister"  // may only list, in namespace a
	watcher = "watcher" // may only watch, in namespace a

	nodeA = "system:node:node-a"
	nodeB = "system:node:node-b"
	// is in the group of nodes, but its name is not that of a node
	noNode       = "no-node"
	notInGroup   = "not-in-group"     // see tokens
	impersonator = "impersonator"     // may impersonate some users, in the plain way
	constrained  = "constrained"      // may impersonate some users, for some requests only
	nodeAgent    = "system:node:none" // a node without an object
)

// tokenFile returns the token file that authenticates the users.
func tokenFile() []byte {
	var text strings.Builder
	fmt.Fprintf(&text, "%s,admin,admin,system:masters\n", tokenOf(admin))
	for _, name := range []string{nothing, all, inA, inB, oneName, getter, lister, watcher, impersonator, constrained} {
		fmt.Fprintf(&text, "%s,%s,%s\n", tokenOf(name), name, name)
	}
	for _, name := range []string{nodeA, nodeB, noNode, nodeAgent} {
		fmt.Fprintf(&text, "%s,%s,%s,system:nodes\n", tokenOf(name), name, name)
	}
	fmt.Fprintf(&text, "%s,%s,not-in-group\n", tokenOf(notInGroup), nodeA)
	return []byte(text.String())
}

func tokenOf(user string) string {
	if user == anonymous {
		return ""
	}
	return strings.ReplaceAll(user, ":", "-") + "-token"
}

// auditPolicy logs all requests of the tests and none that servers send to themselves.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- {level: None, users: [system:apiserver]}
- {level: Request}
`

// engine is one API server under test.
type engine struct {
	*harness.Server
	name     string
	auditLog string
	wires    chan *wire // idle connections
}

// world is an etcd with objects of several namespaces, and servers on it.
type world struct {
	strata, upstream *engine
	etcd             *harness.Etcd
	front            *harness.FrontProxy // trusted by strata
	revision         string              // of all objects, after the last write
}

// newWorld is called once; the world is shared by all tests of the package.
var newWorld = sync.OnceValues(func() (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	etcd := env.Etcd()
	w := &world{etcd: etcd, front: env.FrontProxy()}
	var starting sync.WaitGroup
	starting.Go(func() { w.strata = startEngine(etcd, harness.Strata, w.front.TrustFlags()...) })
	starting.Go(func() { w.upstream = startEngine(etcd, harness.Upstream) })
	starting.Wait()
	return w, w.fill(ctx)
})

// startEngine starts a server with the users and an audit log. The server does not advance the
// revision by itself. In the long form a watch is served when the filters of its request have
// returned.
func startEngine(etcd *harness.Etcd, name string, more ...string) *engine {
	e := newEngine(name, filepath.Join(env.Dir(name), "audit.log"))
	e.Server = env.APIServer(etcd, slices.Concat([]string{"--engine=" + name}, e.flags(), more)...)
	return e
}

func newEngine(name, auditLog string) *engine {
	return &engine{name: name, auditLog: auditLog, wires: make(chan *wire, 64)}
}

// flags returns the flags of every server of the package.
func (e *engine) flags() []string {
	return []string{
		"--authorization-mode=Node", // beside RBAC, which every server of a test has
		"--enable-admission-plugins=NodeRestriction",
		"--disable-admission-plugins=ServiceAccount",
		"--token-auth-file=" + env.WriteFile("tokens.csv", tokenFile()),
		"--audit-policy-file=" + env.WriteFile("audit.yaml", []byte(auditPolicy)),
		"--audit-log-path=" + e.auditLog,
		"--audit-log-mode=blocking",
		"--feature-gates=APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false,APIServingWithRoutine=" + strconv.FormatBool(harness.Long()),
		"--etcd-compaction-interval=0", "--etcd-healthcheck-timeout=1m", "--etcd-readycheck-timeout=1m",
	}
}

// each returns both engines, upstream's first.
func (w *world) each() []*engine { return []*engine{w.upstream, w.strata} }

// open returns the world, or ends the test.
func open(t *testing.T) *world {
	t.Helper()
	w, err := newWorld()
	harness.Check(t, err)
	return w
}
