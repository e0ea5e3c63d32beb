package shards

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
	"github.com/stratakube/strata/server/test/internal/harness"
)

// move runs `strata etcd move` for leases.
func move(t *testing.T, ctx context.Context, env *harness.Env, from, to *harness.Etcd, more ...string) harness.Result {
	t.Helper()
	r, err := env.Run(ctx, "", append([]string{"etcd", "move", "leases", "--from=" + from.URL, "--to=" + to.URL}, more...)...)
	harness.Check(t, err)
	return r
}

// requireMove checks the exit code of a move, and that its output or error has a text.
func requireMove(t *testing.T, r harness.Result, code int, text string) {
	t.Helper()
	if r.Code != code || !strings.Contains(r.Stdout+r.Stderr, text) {
		t.Fatalf("exit code %d, want %d and %q:\n%s%s", r.Code, code, text, r.Stdout, r.Stderr)
	}
}

// mark writes the mark of leases to an etcd, as a move of an earlier build does, and returns its revision.
func mark(t *testing.T, ctx context.Context, etcd *harness.Etcd, m etcdmoves.Mark) int64 {
	t.Helper()
	m.Resource = "leases.coordination.k8s.io"
	value, err := json.Marshal(m)
	harness.Check(t, err)
	r, err := etcd.Client().Put(ctx, etcdmoves.Key("/registry/", "leases/"), string(value))
	harness.Check(t, err)
	return r.Header.Revision
}

// awaitCreate returns when the creation of a lease is answered with code. It creates leases whose names begin with prefix.
func awaitCreate(t *testing.T, ctx context.Context, api *harness.API, prefix string, code int) {
	t.Helper()
	n := 0
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		n++
		r, err := api.Do(ctx, http.MethodPost, leasesPath, "", named(fmt.Sprintf("%s-%d", prefix, n)))
		if err != nil {
			return false, err
		}
		return r.Code == code, r.Err()
	}))
}

// TestMove_NewMove_IsRefused begins moves: neither etcd is read or written, whatever it contains.
func TestMove_NewMove_IsRefused(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	first, second := env.Etcd(), env.Etcd()
	_, err := first.Client().Put(ctx, "/registry/leases/default/a", "1")
	harness.Check(t, err)
	revisions := func() (all [2]int64) {
		for i, etcd := range []*harness.Etcd{first, second} {
			r, err := etcd.Client().Get(ctx, "any", clientv3.WithCountOnly())
			harness.Check(t, err)
			all[i] = r.Header.Revision
		}
		return all
	}
	before := revisions()
	requireMove(t, move(t, ctx, env, first, second), 1, "cannot be moved while API servers run")
	requireMove(t, move(t, ctx, env, first, second, "--dry-run"), 1, "cannot be moved while API servers run")
	if after := revisions(); after != before {
		t.Errorf("revisions %v, want %v as before", after, before)
	}
}

// TestMove_StoppedMove_AbortLetsServersWrite brings two etcds into the states in which a killed move of an earlier build leaves them. A
// server on the source writes again after --abort of an incomplete copy, and one on the target after --abort of a complete one; then
// --delete-source deletes the old keys.
func TestMove_StoppedMove_AbortLetsServersWrite(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t) // upstream does not know the marks
	ctx := harness.Context(t, 2*testTimeout)
	env := harness.New(t)
	first, second := env.Etcd(), env.Etcd()
	server := env.APIServer(first)
	api := server.API()
	_, err := api.Create(ctx, leasesPath, named("one"))
	harness.Check(t, err)

	to, from := []string{second.URL}, []string{first.URL}
	mark(t, ctx, second, etcdmoves.Mark{State: etcdmoves.Incoming, Servers: from})
	mark(t, ctx, first, etcdmoves.Mark{State: etcdmoves.Moving, Servers: to})
	awaitCreate(t, ctx, api, "two", http.StatusServiceUnavailable)
	requireMove(t, move(t, ctx, env, first, second), 1, "add --abort or --delete-source")
	requireMove(t, move(t, ctx, env, first, second, "--delete-source", "--servers-restarted"), 1, "was not moved away")
	requireMove(t, move(t, ctx, env, first, second, "--abort"), 0, "aborted the move")
	awaitCreate(t, ctx, api, "two", http.StatusCreated)
	requireMove(t, move(t, ctx, env, first, second, "--abort"), 1, "has no unfinished move")

	harness.Check(t, server.Stop())
	old, err := first.Client().Get(ctx, "/registry/leases/", clientv3.WithPrefix())
	harness.Check(t, err)
	for _, kv := range old.Kvs {
		_, err := second.Client().Put(ctx, string(kv.Key), string(kv.Value))
		harness.Check(t, err)
	}
	mark(t, ctx, first, etcdmoves.Mark{State: etcdmoves.Moved, Servers: to, Revision: old.Header.Revision, OtherRevision: old.Header.Revision})
	server.Restart(overrides(map[string]*harness.Etcd{"coordination.k8s.io/leases": second}))
	awaitCreate(t, ctx, api, "three", http.StatusServiceUnavailable)
	requireMove(t, move(t, ctx, env, first, second, "--delete-source", "--servers-restarted"), 1, "Complete that move first, with --abort")
	requireMove(t, move(t, ctx, env, first, second, "--abort", "--dry-run"), 0, "nothing was changed")
	requireMove(t, move(t, ctx, env, first, second, "--abort"), 0, "was copied completely to")
	awaitCreate(t, ctx, api, "three", http.StatusCreated)
	requireCode(t, ctx, api, leasesPath+"/one", http.StatusOK)
	requireMove(t, move(t, ctx, env, first, second, "--abort"), 1, "has ended, and cannot be aborted")

	requireMove(t, move(t, ctx, env, first, second, "--delete-source"), 1, "add --servers-restarted")
	if n := keys(t, ctx, first.Client(), "leases/"); n != old.Count {
		t.Errorf("%d leases remain after a refused deletion, want %d", n, old.Count)
	}
	requireMove(t, move(t, ctx, env, first, second, "--delete-source", "--servers-restarted"), 0, "deleted ")
	if n := keys(t, ctx, first.Client(), "leases/"); n != 0 {
		t.Errorf("%d leases remain in the first etcd", n)
	}
	requireCode(t, ctx, api, leasesPath+"/one", http.StatusOK)
}
