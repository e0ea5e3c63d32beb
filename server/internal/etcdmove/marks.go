package etcdmove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// cause returns errLockLost in place of an error that the loss of the lock, or the end of ctx, has caused.
func cause(ctx context.Context, err error) error {
	if lost := context.Cause(ctx); errors.Is(lost, errLockLost) && !errors.Is(err, errLockLost) {
		return fmt.Errorf("%w (%w)", errLockLost, err)
	}
	return err
}

// newMark returns the value of a mark. No other process, and no other call, returns the same.
func (m *mover) newMark(state etcdmoves.State, other end) string {
	return m.encode(etcdmoves.Mark{State: state, Servers: other.servers})
}

func (m *mover) encode(mark etcdmoves.Mark) string {
	mark.Resource, mark.Time, mark.By = m.resource.name.String(), time.Now().UTC(), m.holder
	value, err := json.Marshal(mark)
	if err != nil {
		panic(err) // strings and numbers only
	}
	return string(value)
}

// mark writes a mark.
func (m *mover) mark(ctx context.Context, e end, value string) error {
	if err := e.write(ctx, clientv3.OpPut(m.markKey(), value)); err != nil {
		return fmt.Errorf("mark %s in %s: %w", m.resource.name, e, err)
	}
	return nil
}

// unmark removes the mark of source with value moving after an error, which it returns. The mark of another process remains, and so does
// the moved mark of this one, with which the move has succeeded: the error is nil then. It does not need the lock.
func (m *mover) unmark(ctx context.Context, moving, moved string, err error) error {
	err = cause(ctx, err)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	key := m.markKey()
	r, failed := m.source.Txn(ctx).If(clientv3.Compare(clientv3.Value(key), "=", moving)).
		Then(clientv3.OpDelete(key)).Else(clientv3.OpGet(key)).Commit()
	if failed != nil {
		return fmt.Errorf("%w; servers may still refuse writes of %s, because its mark in %s was not removed (%w). Run the command again, or with --abort, when that etcd answers",
			err, m.resource.name, m.source, failed)
	}
	if !r.Succeeded {
		if kvs := r.Responses[0].GetResponseRange().Kvs; moved != "" && len(kvs) > 0 && string(kvs[0].Value) == moved {
			return nil
		}
	}
	return err
}

// finish marks the source as moved, unless it has changed since it was compared, or its mark is another one. After an error of etcd the
// transaction may have been committed: unmark decides, because only one of both can replace the mark.
func (m *mover) finish(ctx context.Context, moving string, source, target digest) error {
	moved := m.encode(etcdmoves.Mark{State: etcdmoves.Moved, Servers: m.target.servers, Revision: source.revision, OtherRevision: target.revision})
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.Value(m.markKey()), "=", moving)}
	for _, prefix := range m.prefixes() {
		conditions = append(conditions, clientv3.Compare(clientv3.ModRevision(prefix).WithPrefix(), "<", source.revision+1))
	}
	done, _, err := m.source.commit(ctx, conditions, []clientv3.Op{clientv3.OpPut(m.markKey(), moved)}, nil)
	switch {
	case err != nil:
		return m.unmark(ctx, moving, moved, fmt.Errorf("mark %s in %s: %w", m.resource.name, m.source, err))
	case !done:
		return m.unmark(ctx, moving, "", fmt.Errorf("%s was written after both copies were compared, or its mark was changed; the source is unchanged, and the command can be run again",
			m.resource.name))
	}
	return nil
}

// admit removes the mark of target, so that servers may write there. The source is marked as moved.
func (m *mover) admit(ctx context.Context, incoming string) error {
	key := m.markKey()
	done, _, err := m.target.commit(ctx, []clientv3.Cmp{clientv3.Compare(clientv3.Value(key), "=", incoming)}, []clientv3.Op{clientv3.OpDelete(key)}, nil)
	if err == nil && !done {
		err = errors.New("another process has changed it")
	}
	if err != nil {
		return fmt.Errorf("%s was moved, but its mark in %s was not removed, so servers refuse its writes there: %w. Run the same command again", m.resource.name, m.target, err)
	}
	return nil
}

// abort lets servers write the resource again after a move that stopped. If the copy is not complete, it removes the mark of source, whose
// lock must be free; target may have failed then: its mark keeps refusing writes there. If the copy is complete, it removes the mark of
// target, which connectTarget returns.
func (m *mover) abort(ctx context.Context, connectTarget func() (end, error), dry bool) error {
	source, err := m.surveyOne(ctx, m.source)
	if err != nil {
		return fmt.Errorf("etcd at %s: %w", m.source, err)
	}
	if mark := source.mark; mark != nil && mark.State == etcdmoves.Moved && slices.Equal(mark.Servers, m.target.servers) {
		return m.complete(ctx, connectTarget, dry)
	}
	if dry {
		source, err := m.abortable(ctx)
		if err == nil {
			m.say("%s in %s is marked as %s by %s; nothing was changed (--dry-run)", m.resource.name, m.source, source.mark.State, source.mark.By)
		}
		return err
	}
	ctx, unlock, err := m.lock(ctx, &m.source)
	if err != nil {
		return err
	}
	defer unlock()
	if source, err = m.abortable(ctx); err != nil {
		return err
	}
	key := m.markKey()
	done, _, err := m.source.commit(ctx, []clientv3.Cmp{clientv3.Compare(clientv3.Value(key), "=", source.value)}, []clientv3.Op{clientv3.OpDelete(key)}, nil)
	if err == nil && !done {
		err = errors.New("another process has changed it")
	}
	if err != nil {
		return fmt.Errorf("remove the mark of %s in %s: %w; run the command again", m.resource.name, m.source, cause(ctx, err))
	}
	m.say("aborted the move of %s: servers write it in %s again. %s keeps an incomplete copy, and refuses its writes",
		m.resource.name, m.source, m.target)
	return nil
}

// complete removes the mark of target after a move that stopped when its copy was complete. Error: there is no such mark.
func (m *mover) complete(ctx context.Context, connectTarget func() (end, error), dry bool) error {
	target, err := connectTarget()
	if err != nil {
		return err
	}
	defer target.Close()
	m.target = target
	ready := func() (side, error) {
		source, target, err := m.survey(ctx)
		if err == nil && !m.half(source, target) {
			err = fmt.Errorf("the move of %s from %s to %s has ended, and cannot be aborted; nothing was changed. Restart all API servers with --etcd-servers-overrides=%s#%s",
				m.resource.name, m.source, m.target, m.resource.override(), strings.Join(m.target.servers, ";"))
		}
		return target, err
	}
	if _, err := ready(); err != nil {
		return err
	}
	if dry {
		m.say("%s was moved to %s, where its mark still refuses writes; nothing was changed (--dry-run)", m.resource.name, m.target)
		return nil
	}
	ctx, unlock, err := m.lock(ctx, &m.source, &m.target)
	if err != nil {
		return err
	}
	defer unlock()
	marked, err := ready()
	if err == nil {
		err = m.admit(ctx, marked.value)
	}
	if err != nil {
		return cause(ctx, err)
	}
	m.say("%s was copied completely to %s, so servers write it there. Restart all API servers with --etcd-servers-overrides=%s#%s",
		m.resource.name, m.target, m.resource.override(), strings.Join(m.target.servers, ";"))
	return nil
}

// abortable returns the state of the source, and an error unless it has an unfinished move to the target.
func (m *mover) abortable(ctx context.Context) (source side, err error) {
	if source, err = m.surveyOne(ctx, m.source); err != nil {
		return source, fmt.Errorf("etcd at %s: %w", m.source, err)
	}
	switch {
	case source.mark == nil:
		return source, fmt.Errorf("%s has no unfinished move of %s; nothing was changed. Servers write it there", m.source, m.resource.name)
	case source.mark.State == etcdmoves.Moved:
		return source, fmt.Errorf("%s was moved from %s to %s; nothing was changed. Name that etcd with --to",
			m.resource.name, m.source, strings.Join(source.mark.Servers, ","))
	case source.mark.State == etcdmoves.Incoming:
		return source, fmt.Errorf("%s has an incomplete copy of %s from %s; nothing was changed. Exchange --from and --to",
			m.source, m.resource.name, strings.Join(source.mark.Servers, ","))
	case !slices.Equal(source.mark.Servers, m.target.servers):
		return source, fmt.Errorf("%s is being moved from %s to %s; nothing was changed. Name that etcd with --to",
			m.resource.name, m.source, strings.Join(source.mark.Servers, ","))
	}
	return source, nil
}
