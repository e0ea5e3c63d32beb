package etcdmove

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// lockSeconds is the time after which the lock of a command that was killed is free.
const lockSeconds = 30

var errLockLost = errors.New("the lock was lost, because this process or an etcd was too slow; run the command again: it continues, or names the other move")

// lock holds the lock in some etcds, always in the order of their endpoints, until unlock is called. The context ends with the lock. A
// process that was stopped notices the loss late, so every write has the condition that the lock is held (end.commit).
func (m *mover) lock(ctx context.Context, ends ...*end) (locked context.Context, unlock func(), err error) {
	locked, cancel := context.WithCancelCause(ctx)
	slices.SortFunc(ends, func(a, b *end) int { return strings.Compare(a.String(), b.String()) })
	host, _ := os.Hostname()
	m.holder = fmt.Sprintf("process %d on %s, since %s", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339Nano))
	var release []func()
	unlock = func() {
		cancel(nil)
		for _, f := range release {
			f()
		}
	}
	for _, e := range ends {
		f, err := m.lockOne(locked, e, cancel)
		if err != nil {
			unlock()
			return nil, nil, err
		}
		release = append(release, f)
	}
	return locked, unlock, nil
}

// lockOne holds the lock in one etcd. It calls lost if the lock ends before release is called.
func (m *mover) lockOne(ctx context.Context, e *end, lost context.CancelCauseFunc) (release func(), err error) {
	lease, err := e.Grant(ctx, lockSeconds)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", e, err)
	}
	revoke := func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		_, _ = e.Revoke(ctx, lease.ID) // without an answer it expires
	}
	key := etcdmoves.Lock(m.prefix)
	r, err := e.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).
		Then(clientv3.OpPut(key, m.holder, clientv3.WithLease(lease.ID))).Else(clientv3.OpGet(key)).Commit()
	if err == nil && !r.Succeeded {
		other := "another process"
		if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
			other = string(kvs[0].Value)
		}
		if other == m.holder { // etcds that were started alike have the same cluster ID, so that only a write can tell
			revoke()
			return nil, m.sameEtcd()
		}
		err = fmt.Errorf("another move holds the lock (%s); wait until it has ended, or %d seconds if it was killed", other, lockSeconds)
	}
	if err != nil {
		revoke()
		return nil, fmt.Errorf("lock %s: %w", e, err)
	}
	e.lock, e.lockRevision = key, r.Header.Revision
	alive, err := e.KeepAlive(ctx, lease.ID)
	if err != nil {
		revoke()
		return nil, fmt.Errorf("lock %s: %w", e, err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for range alive {
		}
		lost(errLockLost) // no effect after unlock
	}()
	return func() {
		<-ended // the context has ended
		revoke()
	}, nil
}

// commit commits a transaction if the lock is held and the conditions are true; else it returns the responses of otherwise. It is the only
// way of a write while the lock is held. Error: errLockLost if the lock is not held, and nothing was written.
func (e end) commit(ctx context.Context, conditions []clientv3.Cmp, then, otherwise []clientv3.Op) (done bool, others []*pb.ResponseOp, err error) {
	held := clientv3.Compare(clientv3.CreateRevision(e.lock), "=", e.lockRevision)
	r, err := e.Txn(ctx).If(append([]clientv3.Cmp{held}, conditions...)...).Then(then...).
		Else(append([]clientv3.Op{clientv3.OpGet(e.lock)}, otherwise...)...).Commit()
	if err != nil || r.Succeeded {
		return err == nil, nil, err
	}
	if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != e.lockRevision {
		return false, nil, errLockLost
	}
	return false, r.Responses[1:], nil
}

// write commits operations if the lock is held, and returns an error if it is not.
func (e end) write(ctx context.Context, ops ...clientv3.Op) error {
	_, _, err := e.commit(ctx, nil, ops, nil)
	return err
}
