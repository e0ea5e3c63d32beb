package etcdmove

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// lockSeconds is the time after which the lock of a command that was killed is free.
const lockSeconds = 30

var errLockLost = errors.New("the lock was lost, because an etcd did not answer in time")

// lock holds the lock in both etcds, always in the order of their endpoints, until unlock is called. The context ends with the lock.
func (m *mover) lock(ctx context.Context) (locked context.Context, unlock func(), err error) {
	locked, cancel := context.WithCancelCause(ctx)
	first, second := m.source, m.target
	if second.String() < first.String() {
		first, second = second, first
	}
	host, _ := os.Hostname()
	holder := fmt.Sprintf("process %d on %s, since %s", os.Getpid(), host, time.Now().UTC().Format(time.RFC3339Nano))
	var release []func()
	unlock = func() {
		cancel(nil)
		for _, f := range release {
			f()
		}
	}
	for _, e := range []end{first, second} {
		f, err := m.lockOne(locked, e, holder, cancel)
		if err != nil {
			unlock()
			return nil, nil, err
		}
		release = append(release, f)
	}
	return locked, unlock, nil
}

// lockOne holds the lock in one etcd. It calls lost if the lock ends before release is called.
func (m *mover) lockOne(ctx context.Context, e end, holder string, lost context.CancelCauseFunc) (release func(), err error) {
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
		Then(clientv3.OpPut(key, holder, clientv3.WithLease(lease.ID))).Else(clientv3.OpGet(key)).Commit()
	if err == nil && !r.Succeeded {
		other := "another process"
		if kvs := r.Responses[0].GetResponseRange().Kvs; len(kvs) > 0 {
			other = string(kvs[0].Value)
		}
		if other == holder { // etcds that were started alike have the same cluster ID, so that only a write can tell
			revoke()
			return nil, m.sameEtcd()
		}
		err = fmt.Errorf("another move holds the lock (%s); wait until it has ended, or %d seconds if it was killed", other, lockSeconds)
	}
	if err != nil {
		revoke()
		return nil, fmt.Errorf("lock %s: %w", e, err)
	}
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
