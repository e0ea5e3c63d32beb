// Package access asks both engines, on one etcd, for what users may and may not read: users by what they may do, times
// everything that a read can say, times the forms of an answer. Both engines have to decide alike, in the same words, and
// leave the same audit events (matrix_test.go, paths_test.go, node_test.go, impersonation_test.go).
//
// That both agree is not enough: each object carries a mark that is in no other, and no answer may have a mark of an object
// that its user may not read, whatever the other engine says. So it is with continue tokens (tokens_test.go).
//
// What a server writes by itself is looked through for a text that was put into secrets (canary_test.go), and what it shows
// beside the API is asked for by those who may not see it (debug_test.go).
//
//	STRATA_TEST_LONG=1  every resource in every form, more users on odd paths, a log at -v=10, and watches that are served
//	                    when the filters of their requests have returned (APIServingWithRoutine)
package access

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// testTimeout bounds a test that has failed.
const testTimeout = 3 * time.Minute

// env is that of the whole package; its servers are started by the first test that asks for them.
var env *harness.Env

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { env = e })
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// Users. Their tokens are their names with "-token" behind them, but for nobody's and a stranger's.
const (
	admin     = "admin"     // in system:masters
	anonymous = "anonymous" // sends no token
	stranger  = "stranger"  // sends a token that nobody has
	nothing   = "nothing"   // may do nothing
	all       = "all"       // may get, list and watch everything
	inA       = "in-a"      // may get, list and watch everything in namespace a
	inB       = "in-b"      // the same in b
	oneName   = "one-name"  // may get, list and watch what is called one, in namespace a or in none
	getter    = "getter"    // may only get, in namespace a
	lister    = "lister"    // may only list, in namespace a
	watcher   = "watcher"   // may only watch, in namespace a

	nodeA        = "system:node:node-a"
	nodeB        = "system:node:node-b"
	noNode       = "no-node"          // is in the group of nodes, but not called like one
	notInGroup   = "not-in-group"     // see tokens
	impersonator = "impersonator"     // may impersonate some, in the plain way
	constrained  = "constrained"      // may impersonate some, for some requests only
	nodeAgent    = "system:node:none" // a node without an object
)

// tokenFile returns what authenticates the users.
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

// auditPolicy logs all that the tests ask for, and nothing that servers ask themselves.
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
	wires    chan *wire // connections that are not in use
}

// world is an etcd with objects of several namespaces, and servers on it.
type world struct {
	strata, upstream *engine
	etcd             *harness.Etcd
	revision         string // of all objects, at which they are unchanged
}

// newWorld is called once; the world is shared by all tests of the package.
var newWorld = sync.OnceValues(func() (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	etcd := env.Etcd()
	w := &world{etcd: etcd}
	var starting sync.WaitGroup
	starting.Go(func() { w.strata = startEngine(etcd, harness.Strata) })
	starting.Go(func() { w.upstream = startEngine(etcd, harness.Upstream) })
	starting.Wait()
	return w, w.fill(ctx)
})

// startEngine starts a server with the users, which has an audit log. Nothing that it does by itself moves the revision. In
// the long form a watch is served when the filters of its request have returned.
func startEngine(etcd *harness.Etcd, name string, more ...string) *engine {
	e := &engine{name: name, auditLog: filepath.Join(env.Dir(name), "audit.log"), wires: make(chan *wire, 64)}
	e.Server = env.APIServer(etcd, append([]string{
		"--engine=" + name,
		"--authorization-mode=Node", // beside RBAC, which every server of a test has
		"--enable-admission-plugins=NodeRestriction",
		"--disable-admission-plugins=ServiceAccount",
		"--token-auth-file=" + env.WriteFile("tokens.csv", tokenFile()),
		"--audit-policy-file=" + env.WriteFile("audit.yaml", []byte(auditPolicy)),
		"--audit-log-path=" + e.auditLog,
		"--audit-log-mode=blocking",
		"--feature-gates=APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false,APIServingWithRoutine=" + strconv.FormatBool(harness.Long()),
		"--etcd-compaction-interval=0",
	}, more...)...)
	return e
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
