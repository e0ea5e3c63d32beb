// Package etcdmove implements `strata etcd move`, which ends moves of resources from one etcd cluster to another. A move while servers run
// is unsafe (errUnsafe), so the command begins none; mover.run is used by tests only, and is removed with the marks.
//
//	lock both ─▶ raise target's revision ─▶ copy, while servers write ─▶ mark source: servers refuse writes ─▶ copy the rest
//	          ─▶ compact target ─▶ compare hashes ─▶ mark source as moved ─▶ remove mark of target ─▶ unlock
//
// The keys of the source remain until a second command deletes them, and until then the move can be reversed. An error at any point
// leaves the source complete, and without the mark, unless it is the moved one. A process that ends at any point leaves marks that
// another run completes, or that abort removes:
//
//	source    target      state
//	-         -           not begun
//	-         incoming    copying; target refuses writes
//	moving    incoming    copying the rest; both refuse writes
//	moved     incoming    complete; a run removes the mark of target
//	moved     -           ended
package etcdmove

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/stratakube/strata/internal/progress"
	"github.com/stratakube/strata/kube/etcdmoves"
)

const (
	// quietTime is the time without a write after the mark before the copy is final. A server checks the mark before the transaction of
	// a write, so a transaction that is on its way to etcd for longer could be committed after the comparison; docs/etcd-shards.md has
	// the consequences. A guess: the deadline of a request is longer, and etcd answers in milliseconds.
	quietTime = 5 * time.Second
	// quietPatience bounds the wait for it.
	quietPatience = 30 * time.Second
	// quietPoll is the time between two passes meanwhile.
	quietPoll = 500 * time.Millisecond
	// margin is the distance of the target's revision above the source's at the end: servers that still run on the source return its
	// revisions to clients, and as long as source advances by fewer, each such revision is compacted in target.
	margin = 10_000
	// busyPasses bounds the passes before the mark.
	busyPasses = 5
	// compareAttempts bounds the comparisons, between which keys may expire.
	compareAttempts = 10
	// cleanupTimeout bounds the removal of marks after a failure.
	cleanupTimeout = 5 * time.Second
)

// end is one of the two etcds.
type end struct {
	*clientv3.Client
	servers      []string
	lock         string // its key
	lockRevision int64  // at which the lock was created; 0 before
}

func (e end) String() string { return strings.Join(e.servers, ",") }

// mover moves one resource. It is used once, by one goroutine.
type mover struct {
	source, target end
	prefix         string // of all keys, with slashes at both ends
	resource       resource
	holder         string // names this process in the lock and in marks
	out            io.Writer
	shown          *progress.Steps
}

func (m *mover) prefixes() (all []string) {
	for _, p := range m.resource.paths {
		all = append(all, m.prefix+p)
	}
	return all
}

func (m *mover) say(format string, args ...any) { fmt.Fprintf(m.out, format+"\n", args...) }

// side is the state of the resource in one etcd before a command.
type side struct {
	keys     int64
	revision int64
	newest   int64           // the highest revision of a change of a key
	mark     *etcdmoves.Mark // nil if there is none
	value    string          // the mark as stored
	changed  []string        // keys with changes after the mark's revision, some of them
}

func (m *mover) markKey() string { return etcdmoves.Key(m.prefix, m.resource.paths[0]) }

// survey reads the state of both etcds. Error: one does not answer.
func (m *mover) survey(ctx context.Context) (source, target side, err error) {
	if source, err = m.surveyOne(ctx, m.source); err != nil {
		return source, target, fmt.Errorf("etcd at %s: %w", m.source, err)
	}
	if target, err = m.surveyOne(ctx, m.target); err != nil {
		return source, target, fmt.Errorf("etcd at %s: %w", m.target, err)
	}
	return source, target, nil
}

func (m *mover) surveyOne(ctx context.Context, e end) (s side, err error) {
	r, err := e.Get(ctx, m.markKey())
	if err != nil {
		return s, err
	}
	s.revision = r.Header.Revision
	if len(r.Kvs) > 0 {
		mark, err := etcdmoves.Parse(r.Kvs[0].Value)
		if err != nil {
			return s, fmt.Errorf("%w; look at the key %s", err, m.markKey())
		}
		s.mark, s.value = &mark, string(r.Kvs[0].Value)
	}
	_, err = scan(ctx, e.Client, m.prefixes(), keysOnlyPage, func(kvs []*mvccpb.KeyValue) error {
		s.keys += int64(len(kvs))
		for _, kv := range kvs {
			s.newest = max(s.newest, kv.ModRevision)
			if s.mark != nil && s.mark.State == etcdmoves.Moved && kv.ModRevision > s.mark.Revision && len(s.changed) < 5 {
				s.changed = append(s.changed, string(kv.Key))
			}
		}
		return nil
	}, clientv3.WithKeysOnly())
	return s, err
}

// sameEtcd is the error of one etcd in both flags.
func (m *mover) sameEtcd() error {
	return fmt.Errorf("%s and %s are the same etcd; name another one with --to", m.source, m.target)
}

// check returns an error if a move could lose data.
func (m *mover) check(source, target side) error {
	switch {
	case source.mark != nil && source.mark.State == etcdmoves.Moved:
		return fmt.Errorf("%s was moved from %s to %s at %s; move it from there", m.resource.name, m.source,
			strings.Join(source.mark.Servers, ","), source.mark.Time.Format(time.RFC3339))
	case source.mark != nil && source.mark.State == etcdmoves.Incoming:
		return fmt.Errorf("%s has an incomplete copy of %s from %s; move it from there", m.source, m.resource.name, strings.Join(source.mark.Servers, ","))
	case source.keys == 0:
		return fmt.Errorf("%s has no keys of %s below %s; check the name, --from and --etcd-prefix (a resource without objects needs no move)",
			m.source, m.resource.name, strings.Join(m.prefixes(), " and "))
	case target.mark != nil && target.mark.State == etcdmoves.Moving:
		return fmt.Errorf("%s has an unfinished move of %s to %s, so its keys are not an old copy; nothing was copied. Run that move again, or abort it with --abort",
			m.target, m.resource.name, strings.Join(target.mark.Servers, ","))
	case target.keys > 0 && target.mark == nil:
		return fmt.Errorf("%s already has %d keys of %s; nothing was copied. Compare both etcds, and delete the keys in the one whose objects are not needed",
			m.target, target.keys, m.resource.name)
	case len(target.changed) > 0:
		return fmt.Errorf("%s has keys of %s that were written after it was moved away, such as %s; nothing was copied. A server still used this etcd: copy those objects, and delete the keys",
			m.target, m.resource.name, strings.Join(target.changed, ", "))
	}
	return nil
}

// plan prints the result of the survey.
func (m *mover) plan(source, target side) {
	m.say("%s: %d keys in %s (revision %d) to %s (revision %d)", m.resource.name, source.keys, m.source, source.revision, m.target, target.revision)
	if target.keys > 0 {
		m.say("%s has %d keys of an earlier copy, which will be replaced", m.target, target.keys)
	}
	if distance := m.goal(source.revision) - target.revision; distance > 0 {
		m.say("%d empty writes will raise the revision of %s above that of %s", distance, m.target, m.source)
	}
}

func (m *mover) goal(source int64) int64 { return source + margin }

// half reports whether a move has ended, except for the removal of the target's mark: the source is marked as moved first.
func (m *mover) half(source, target side) bool {
	return source.mark != nil && source.mark.State == etcdmoves.Moved && slices.Equal(source.mark.Servers, m.target.servers) &&
		target.mark != nil && target.mark.State == etcdmoves.Incoming && slices.Equal(target.mark.Servers, m.source.servers)
}

// ready reads the state of both etcds and returns an error if a move could lose data.
func (m *mover) ready(ctx context.Context) (source, target side, err error) {
	if source, target, err = m.survey(ctx); err == nil && !m.half(source, target) {
		err = m.check(source, target)
	}
	return source, target, err
}

// run moves the resource; with dry it prints the numbers only.
func (m *mover) run(ctx context.Context, dry bool) (err error) {
	if slices.ContainsFunc(m.source.servers, func(s string) bool { return slices.Contains(m.target.servers, s) }) {
		return m.sameEtcd()
	}
	source, target, err := m.ready(ctx)
	if err != nil {
		return err
	}
	if m.half(source, target) {
		m.say("%s was moved, except that its mark in %s still refuses writes there; the mark is removed", m.resource.name, m.target)
	} else {
		m.plan(source, target)
	}
	if dry {
		m.say("nothing was changed (--dry-run)")
		return nil
	}
	ctx, unlock, err := m.lock(ctx, &m.source, &m.target)
	if err != nil {
		return err
	}
	defer unlock()
	// Another process may have moved it before the lock.
	if source, target, err = m.ready(ctx); err != nil {
		return err
	}
	if m.half(source, target) {
		if err := m.admit(ctx, target.value); err != nil {
			return cause(ctx, err)
		}
		m.say("completed a move of %s that had stopped after its last copy", m.resource.name)
		m.next()
		return nil
	}
	return m.move(ctx, int(source.keys))
}

// move copies the keys under the lock.
func (m *mover) move(ctx context.Context, keys int) (err error) {
	defer m.shown.Stop()
	began := time.Now()
	defer func() {
		if err != nil {
			err = cause(ctx, err)
		}
	}()
	if err := m.raise(ctx, m.goal); err != nil {
		return err
	}
	incoming := m.newMark(etcdmoves.Incoming, m.source)
	if err := m.mark(ctx, m.target, incoming); err != nil {
		return err
	}
	c := &copier{source: m.source.Client, target: m.target, prefixes: m.prefixes(), shown: m.shown}
	if err := m.copyWhileBusy(ctx, c, keys); err != nil {
		return err
	}
	d, err := m.settle(ctx, c)
	if err != nil {
		return err
	}
	if err := m.admit(ctx, incoming); err != nil {
		return err
	}
	m.shown.Stop()
	m.say("moved %d keys, %d bytes, in %s; SHA-256 %s on both sides", d.keys, d.bytes, time.Since(began).Round(100*time.Millisecond), d.sum[:16])
	m.next()
	return nil
}

// settle copies the rest while servers refuse writes, and marks the source as moved. After an error the source has no mark, or the
// error names its mark.
func (m *mover) settle(ctx context.Context, c *copier) (d digest, err error) {
	moving := m.newMark(etcdmoves.Moving, m.target)
	if err := m.mark(ctx, m.source, moving); err != nil {
		return d, m.unmark(ctx, moving, "", err)
	}
	if err := m.awaitQuiet(ctx, c); err != nil {
		return d, m.unmark(ctx, moving, "", err)
	}
	if err := m.raise(ctx, m.goal); err != nil {
		return d, m.unmark(ctx, moving, "", err)
	}
	if err := m.compact(ctx); err != nil {
		return d, m.unmark(ctx, moving, "", err)
	}
	d, copied, err := m.compare(ctx, c)
	if err != nil {
		return d, m.unmark(ctx, moving, "", err)
	}
	return d, m.finish(ctx, moving, d, copied)
}

// next prints the commands that follow a move.
func (m *mover) next() {
	command := fmt.Sprintf("strata etcd move %s --from=%s --to=%s", m.resource.override(), m.source, m.target)
	m.say(`
Writes of %[1]s are refused until the API servers use the other etcd. Restart all of them with

  --etcd-servers-overrides=%[2]s#%[3]s

in addition to their other overrides. The old keys remain in %[4]s. To go back, run this command and
restart the servers without that override:

  strata etcd move %[2]s --from=%[5]s --to=%[4]s

To delete the old keys once all API servers run with the override:

  %[6]s --delete-source --servers-restarted`, m.resource.name, m.resource.override(), strings.Join(m.target.servers, ";"), m.source, m.target, command)
}

// copyWhileBusy copies all keys, and the changes of the meantime, while servers may write.
func (m *mover) copyWhileBusy(ctx context.Context, c *copier, keys int) error {
	for attempt := 0; ; attempt++ {
		m.shown.Next("copying %s", m.resource.name)
		m.shown.Of(keys)
		err := c.first(ctx)
		if err == nil {
			break
		}
		if !errors.Is(err, rpctypes.ErrCompacted) || attempt == compactedRestarts {
			return fmt.Errorf("copy %s: %w; the source is unchanged, and the command can be run again", m.resource.name, err)
		}
	}
	for range busyPasses {
		m.shown.Next("copying changes of %s", m.resource.name)
		done, err := c.pass(ctx)
		if err != nil {
			return fmt.Errorf("copy changes of %s: %w; the source is unchanged, and the command can be run again", m.resource.name, err)
		}
		if done.none() {
			return nil
		}
	}
	return nil
}

// awaitQuiet copies the last changes. It returns when there was none for quietTime. Error: writes continue, so that a server does not know the mark.
func (m *mover) awaitQuiet(ctx context.Context, c *copier) error {
	m.shown.Next("waiting until %s has had no write for %s", m.resource.name, quietTime)
	began, quiet := time.Now(), time.Now()
	var last changes
	err := wait.PollUntilContextTimeout(ctx, quietPoll, quietPatience, true, func(ctx context.Context) (bool, error) {
		done, err := c.pass(ctx)
		if err != nil {
			return false, err
		}
		if !done.none() {
			last, quiet = done, time.Now()
		}
		return time.Since(quiet) >= quietTime, nil
	})
	if err != nil && ctx.Err() == nil && time.Since(began) >= quietPatience {
		return fmt.Errorf("%s is still written (%d keys written and %d deleted at last); the source is unchanged. Stop its writers, such as kube-apiservers of Kubernetes, and run the command again",
			m.resource.name, last.written, last.deleted)
	}
	return err
}

// compare returns the content of the resource in both etcds when it is the same. Keys may expire between the two reads.
func (m *mover) compare(ctx context.Context, c *copier) (source, target digest, err error) {
	for range compareAttempts {
		m.shown.Next("comparing %s", m.resource.name)
		if source, err = hash(ctx, m.source.Client, m.prefixes(), m.shown); err != nil {
			return source, target, err
		}
		if target, err = hash(ctx, m.target.Client, m.prefixes(), m.shown); err != nil {
			return source, target, err
		}
		if source.same(target) {
			return source, target, nil
		}
		if done, err := c.pass(ctx); err != nil {
			return source, target, err
		} else if !done.none() {
			return source, target, fmt.Errorf("%s was written while both copies were compared; the source is unchanged, and the command can be run again", m.resource.name)
		}
	}
	return source, target, fmt.Errorf("the copies of %s differ; the source is unchanged. Check that no other program writes to %s", m.resource.name, m.target)
}
