package etcdmove

import (
	"context"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// TestCopier_LeaseExpires_OtherKeysAreWritten lets leases expire between their grant in the target and the transaction with their keys.
func TestCopier_LeaseExpires_OtherKeysAreWritten(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target := startEnd(t, ctx), startEnd(t, ctx)
	m, _ := newMover(t, source, target)
	if _, unlock, err := m.lock(ctx, &m.source, &m.target); err != nil {
		t.Fatal(err)
	} else {
		defer unlock()
	}
	const prefix = "/registry/leases/"
	leased := func(name string) (lease clientv3.LeaseID) {
		t.Helper()
		granted, err := source.Grant(ctx, 3600)
		requireErr(t, err, "")
		_, err = source.Put(ctx, prefix+name, name, clientv3.WithLease(granted.ID))
		requireErr(t, err, "")
		return granted.ID
	}
	expiring := leased("expiring")
	leased("lasting")
	put(t, ctx, source, prefix+"plain", "plain")
	c := &copier{source: source.Client, target: m.target, prefixes: []string{prefix}, shown: m.shown}
	requireErr(t, c.first(ctx), "")
	requireState(t, ctx, m, target, etcdmoves.State(""), 3)

	r, err := source.Get(ctx, prefix, clientv3.WithPrefix()) // a page of a scan
	requireErr(t, err, "")
	_, err = source.Revoke(ctx, expiring)
	requireErr(t, err, "")
	for _, lease := range c.leases { // all of them, though only one expired in source
		_, err = target.Revoke(ctx, lease)
		requireErr(t, err, "")
	}
	requireState(t, ctx, m, target, etcdmoves.State(""), 1)
	requireErr(t, c.write(ctx, r.Kvs), "")
	requireState(t, ctx, m, target, etcdmoves.State(""), 2)
	var kvs []*mvccpb.KeyValue
	for _, kv := range r.Kvs {
		if string(kv.Key) == prefix+"expiring" {
			kvs = append(kvs, kv)
		}
	}
	requireErr(t, c.write(ctx, kvs), "") // expired keys only
	if _, err := c.pass(ctx); err != nil {
		t.Error(err)
	}
	requireState(t, ctx, m, target, etcdmoves.State(""), 2)
	got, err := target.Get(ctx, prefix+"lasting")
	requireErr(t, err, "")
	if len(got.Kvs) != 1 || got.Kvs[0].Lease == 0 {
		t.Errorf("the key with a lease is %v, want one with a lease", got.Kvs)
	}
}
