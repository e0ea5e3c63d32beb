package etcdmove

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/progress"
	"github.com/stratakube/strata/kube/etcdmoves"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// testTimeout bounds a failing test.
const testTimeout = time.Minute

// startEnd returns a running etcd.
func startEnd(t *testing.T, ctx context.Context) end {
	t.Helper()
	s, err := embedetcd.Start(ctx, embedetcd.Config{Dir: t.TempDir(), UnsafeNoFsync: true, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return end{Client: client, servers: []string{s.Endpoint()}}
}

// sameEnd returns a function that connects to the etcd of e once more.
func sameEnd(e end) func() (end, error) {
	return func() (end, error) {
		client, err := clientv3.New(clientv3.Config{Endpoints: e.servers, Logger: zap.NewNop()})
		return end{Client: client, servers: e.servers}, err
	}
}

// newMover returns a mover of leases, and its output.
func newMover(t *testing.T, source, target end) (*mover, *strings.Builder) {
	t.Helper()
	r, err := parseResource("leases")
	if err != nil {
		t.Fatal(err)
	}
	out := &strings.Builder{}
	m := &mover{source: source, target: target, prefix: "/registry/", resource: r, out: out, shown: progress.Start(out)}
	t.Cleanup(m.shown.Stop)
	return m, out
}

func put(t *testing.T, ctx context.Context, e end, key, value string) {
	t.Helper()
	if _, err := e.Put(ctx, key, value); err != nil {
		t.Fatal(err)
	}
}

// requireErr checks that err has a text, or is nil for "".
func requireErr(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" && err != nil || text != "" && (err == nil || !strings.Contains(err.Error(), text)) {
		t.Fatalf("error %v, want %q", err, text)
	}
}

// requireState checks the mark of the resource in e, "" for none, and its number of keys.
func requireState(t *testing.T, ctx context.Context, m *mover, e end, state etcdmoves.State, keys int64) {
	t.Helper()
	s, err := m.surveyOne(ctx, e)
	if err != nil {
		t.Fatal(err)
	}
	var got etcdmoves.State
	if s.mark != nil {
		got = s.mark.State
	}
	if got != state || s.keys != keys {
		t.Errorf("%s has mark %q and %d keys, want %q and %d", e, got, s.keys, state, keys)
	}
}

// TestMover_LockLost_ChangesNothing lets a second mover complete while a first one, which has marked the source, is stopped.
func TestMover_LockLost_ChangesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target := startEnd(t, ctx), startEnd(t, ctx)
	put(t, ctx, source, "/registry/leases/default/a", "1")
	stopped, _ := newMover(t, source, target)
	locked, unlock, err := stopped.lock(ctx, &stopped.source, &stopped.target)
	requireErr(t, err, "")
	defer unlock()
	moving := stopped.newMark(etcdmoves.Moving, target)
	requireErr(t, stopped.mark(locked, stopped.source, moving), "")
	for _, e := range []end{source, target} { // as after the time of the lock
		if _, err := e.Delete(ctx, etcdmoves.Lock("/registry/")); err != nil {
			t.Fatal(err)
		}
	}
	second, out := newMover(t, source, target)
	requireErr(t, second.run(ctx, false), "")
	if !strings.Contains(out.String(), "moved 1 keys") {
		t.Errorf("output %q", out)
	}

	c := &copier{source: source.Client, target: stopped.target, prefixes: stopped.prefixes(), shown: stopped.shown}
	put(t, ctx, target, "/registry/leases/default/new", "2")
	for name, err := range map[string]error{
		"write a key":     stopped.target.write(locked, clientv3.OpPut("/registry/leases/default/a", "stale")),
		"copy":            c.first(locked),
		"delete":          c.remove(locked, []string{"/registry/leases/default/new"}),
		"raise":           stopped.writeEmpty(locked, "/registry/strata/move-revision", 2),
		"mark":            stopped.mark(locked, stopped.source, moving),
		"finish":          stopped.finish(locked, moving, digest{revision: 1 << 40}, digest{}),
		"remove the mark": stopped.unmark(locked, moving, "", errLockLost),
	} {
		if !errors.Is(err, errLockLost) {
			t.Errorf("%s after the loss of the lock: %v, want errLockLost", name, err)
		}
	}
	requireState(t, ctx, second, source, etcdmoves.Moved, 1)
	requireState(t, ctx, second, target, "", 2)
	r, err := target.Get(ctx, "/registry/leases/default/a")
	if err != nil || len(r.Kvs) != 1 || string(r.Kvs[0].Value) != "1" {
		t.Errorf("the key in the target is %v (%v), want value 1", r, err)
	}
}

// TestCause_LockLost_IsNamed checks the error of an operation that ended with the lock.
func TestCause_LockLost_IsNamed(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errLockLost)
	if err := cause(ctx, ctx.Err()); !errors.Is(err, errLockLost) || !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want errLockLost", err)
	}
	if err := cause(t.Context(), context.Canceled); errors.Is(err, errLockLost) {
		t.Errorf("%v without a loss of the lock", err)
	}
}

// TestMover_StoppedMove_RunCompletesIt brings both etcds into the states in which a killed mover leaves them.
func TestMover_StoppedMove_RunCompletesIt(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target, third := startEnd(t, ctx), startEnd(t, ctx), startEnd(t, ctx)
	put(t, ctx, source, "/registry/leases/default/a", "1")
	put(t, ctx, source, "/registry/leases/default/b", "2")
	put(t, ctx, target, "/registry/leases/default/a", "an earlier value")
	put(t, ctx, target, "/registry/leases/default/deleted", "3")
	m, _ := newMover(t, source, target)
	put(t, ctx, target, m.markKey(), m.newMark(etcdmoves.Incoming, source))
	put(t, ctx, source, m.markKey(), m.newMark(etcdmoves.Moving, target))

	other, _ := newMover(t, third, source) // the keys of a source of a move are not an old copy
	put(t, ctx, third, "/registry/leases/default/c", "3")
	requireErr(t, other.run(ctx, false), "has an unfinished move")
	requireErr(t, m.run(ctx, false), "")
	requireState(t, ctx, m, source, etcdmoves.Moved, 2)
	requireState(t, ctx, m, target, "", 2)

	put(t, ctx, target, m.markKey(), m.newMark(etcdmoves.Incoming, source)) // killed after the last mark of the source
	m, out := newMover(t, source, target)
	requireErr(t, m.deleteSource(ctx, true, false), "is marked in")
	failed := func() (end, error) { return end{}, errors.New("the target has failed") }
	stopped, _ := newMover(t, source, end{servers: target.servers})
	requireErr(t, stopped.abort(ctx, failed, false), "the target has failed")
	for _, dry := range []bool{true, false} { // completes it, too
		m, _ := newMover(t, source, end{servers: target.servers})
		requireErr(t, m.abort(ctx, sameEnd(target), dry), "")
		state := etcdmoves.Incoming
		if !dry {
			state = ""
		}
		requireState(t, ctx, m, source, etcdmoves.Moved, 2)
		requireState(t, ctx, m, target, state, 2)
	}
	ended, _ := newMover(t, source, end{servers: target.servers})
	requireErr(t, ended.abort(ctx, sameEnd(target), false), "has ended, and cannot be aborted")
	put(t, ctx, target, m.markKey(), m.newMark(etcdmoves.Incoming, source))
	requireErr(t, m.run(ctx, true), "")
	requireState(t, ctx, m, target, etcdmoves.Incoming, 2)
	requireErr(t, m.run(ctx, false), "")
	if !strings.Contains(out.String(), "completed a move") {
		t.Errorf("output %q", out)
	}
	requireState(t, ctx, m, source, etcdmoves.Moved, 2)
	requireState(t, ctx, m, target, "", 2)
	requireErr(t, m.run(ctx, false), "was moved from")
}

// TestUnmark_FinishCommitted_IsNoError returns an error from a transaction that etcd has committed.
func TestUnmark_FinishCommitted_IsNoError(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source := startEnd(t, ctx)
	m, _ := newMover(t, source, end{servers: []string{"http://other"}})
	moving := m.newMark(etcdmoves.Moving, m.target)
	moved := m.newMark(etcdmoves.Moved, m.target)
	put(t, ctx, source, m.markKey(), moved)
	requireErr(t, m.unmark(ctx, moving, moved, context.DeadlineExceeded), "")
	requireState(t, ctx, m, source, etcdmoves.Moved, 0)
	put(t, ctx, source, m.markKey(), moving)
	requireErr(t, m.unmark(ctx, moving, moved, context.DeadlineExceeded), "deadline exceeded")
	requireState(t, ctx, m, source, "", 0)
}

// TestAbort_UnfinishedMove_RemovesMark aborts a move whose target has failed, and refuses it in every other state.
func TestAbort_UnfinishedMove_RemovesMark(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source := startEnd(t, ctx)
	put(t, ctx, source, "/registry/leases/default/a", "1")
	m, _ := newMover(t, source, end{servers: []string{"http://failed"}})
	failed := func() (end, error) { return end{}, errors.New("the target has failed") }
	requireErr(t, m.abort(ctx, failed, false), "has no unfinished move")
	put(t, ctx, source, m.markKey(), m.newMark(etcdmoves.Moved, end{servers: []string{"http://another"}}))
	requireErr(t, m.abort(ctx, failed, false), "Name that etcd with --to")
	for state, want := range map[etcdmoves.State]string{etcdmoves.Moved: "the target has failed", etcdmoves.Incoming: "Exchange --from and --to"} {
		put(t, ctx, source, m.markKey(), m.newMark(state, m.target))
		requireErr(t, m.abort(ctx, failed, false), want)
		requireState(t, ctx, m, source, state, 1)
	}
	put(t, ctx, source, m.markKey(), m.newMark(etcdmoves.Moving, end{servers: []string{"http://another"}}))
	requireErr(t, m.abort(ctx, failed, false), "Name that etcd with --to")
	put(t, ctx, source, m.markKey(), m.newMark(etcdmoves.Moving, m.target))
	put(t, ctx, source, etcdmoves.Lock("/registry/"), "a test")
	requireErr(t, m.abort(ctx, failed, false), "another move holds the lock (a test)")
	if _, err := source.Delete(ctx, etcdmoves.Lock("/registry/")); err != nil {
		t.Fatal(err)
	}
	requireErr(t, m.abort(ctx, failed, true), "")
	requireState(t, ctx, m, source, etcdmoves.Moving, 1)
	requireErr(t, m.abort(ctx, failed, false), "")
	requireState(t, ctx, m, source, "", 1)
}
