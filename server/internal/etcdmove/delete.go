package etcdmove

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// deletable returns an error unless the keys of the source are the old copy of a finished move, and the target has the resource.
func (m *mover) deletable(source, target side) error {
	switch {
	case source.mark == nil || source.mark.State != etcdmoves.Moved:
		return fmt.Errorf("%s was not moved away from %s; nothing was deleted. Only a complete move leaves old keys", m.resource.name, m.source)
	case !slices.Equal(source.mark.Servers, m.target.servers):
		return fmt.Errorf("%s was moved from %s to %s; nothing was deleted. Name that etcd with --to", m.resource.name, m.source, strings.Join(source.mark.Servers, ","))
	case len(source.changed) > 0:
		return fmt.Errorf("%s has keys of %s that were written after the move, such as %s; nothing was deleted. A server still uses this etcd: restart it with the override, and copy those objects",
			m.source, m.resource.name, strings.Join(source.changed, ", "))
	case target.mark != nil:
		return fmt.Errorf("%s is marked in %s too (%s); nothing was deleted. Complete that move first, with --abort", m.resource.name, m.target, target.mark.State)
	case source.keys > 0 && target.keys == 0:
		return fmt.Errorf("%s has no keys of %s, and %s has %d; nothing was deleted. Check that the API servers use %s for it, and that it has its data",
			m.target, m.resource.name, m.source, source.keys, m.target)
	case target.keys < source.keys && target.newest <= source.mark.OtherRevision:
		return fmt.Errorf("%s has %d keys of %s, fewer than the %d in %s, and none was written since the move; nothing was deleted. Check that the API servers use %s for it, write one of its objects, such as by an annotation, and run the command again",
			m.target, target.keys, m.resource.name, source.keys, m.source, m.target)
	}
	return nil
}

// deleteSource deletes the old copy of a moved resource. Servers that still use it would deliver each deletion to their clients, and
// cannot be seen in etcd, because they refuse writes: the operator has to state with restarted that there are none.
func (m *mover) deleteSource(ctx context.Context, restarted, dry bool) error {
	check := func() (source side, err error) {
		source, target, err := m.survey(ctx)
		if err == nil {
			err = m.deletable(source, target)
		}
		if err == nil {
			m.say("%s: %d old keys in %s; %d keys in %s", m.resource.name, source.keys, m.source, target.keys, m.target)
		}
		return source, err
	}
	if dry {
		_, err := check()
		if err == nil {
			m.say("nothing was changed (--dry-run)")
		}
		return err
	}
	ctx, unlock, err := m.lock(ctx, &m.source, &m.target)
	if err != nil {
		return err
	}
	defer unlock()
	source, err := check()
	if err != nil {
		return err
	}
	if !restarted {
		return fmt.Errorf("a server without the override of %s would show the deletion of its objects to clients; nothing was deleted. Restart all API servers with --etcd-servers-overrides=%s#%s, and add --servers-restarted",
			m.resource.name, m.resource.override(), strings.Join(m.target.servers, ";"))
	}
	defer m.shown.Stop()
	m.shown.Next("deleting %s from %s", m.resource.name, m.source)
	m.shown.Of(int(source.keys))
	moved := clientv3.Compare(clientv3.Value(m.markKey()), "=", source.value)
	_, err = scan(ctx, m.source.Client, m.prefixes(), txnOps, func(kvs []*mvccpb.KeyValue) error {
		unchanged := []clientv3.Cmp{moved}
		var deletes []clientv3.Op
		for _, kv := range kvs {
			unchanged = append(unchanged, clientv3.Compare(clientv3.ModRevision(string(kv.Key)), "<", source.mark.Revision+1))
			deletes = append(deletes, clientv3.OpDelete(string(kv.Key)))
		}
		done, _, err := m.source.commit(ctx, unchanged, deletes, nil)
		if err == nil && !done {
			err = fmt.Errorf("a key of %s was written meanwhile; a server still uses %s", m.resource.name, m.source)
		}
		m.shown.Add(len(kvs))
		return err
	}, clientv3.WithKeysOnly())
	if err != nil {
		err = cause(ctx, err)
		return fmt.Errorf("delete %s from %s: %w", m.resource.name, m.source, err)
	}
	m.shown.Stop()
	m.say("deleted %d old keys", source.keys)
	return nil
}
