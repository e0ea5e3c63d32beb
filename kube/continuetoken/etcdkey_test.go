package continuetoken

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// downKV is a client of an etcd that does not answer.
type downKV struct{ clientv3.KV }

func (downKV) Get(context.Context, string, ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	return nil, errDown
}

func (d downKV) Txn(context.Context) clientv3.Txn { return downTxn{} }

type downTxn struct{}

func (d downTxn) If(...clientv3.Cmp) clientv3.Txn      { return d }
func (d downTxn) Then(...clientv3.Op) clientv3.Txn     { return d }
func (d downTxn) Else(...clientv3.Op) clientv3.Txn     { return d }
func (downTxn) Commit() (*clientv3.TxnResponse, error) { return nil, errDown }

// TestEtcdKey_PutAtRevision_IsCompareAndSwap, and errors of etcd are returned.
func TestEtcdKey_PutAtRevision_IsCompareAndSwap(t *testing.T) {
	ctx := podtest.Context(t)
	e := etcdKey{podtest.NewKV(memory.New(), nil), "/key"}
	if data, mod, err := e.get(ctx); data != nil || mod != 0 || err != nil {
		t.Errorf("without a value: %q, %d, %v", data, mod, err)
	}
	first, ok, err := e.put(ctx, []byte("a"), 0)
	if !ok || err != nil {
		t.Fatalf("the first put: %t, %v", ok, err)
	}
	if _, ok, err := e.put(ctx, []byte("b"), 0); ok || err != nil {
		t.Errorf("a put over another: %t, %v", ok, err)
	}
	if data, mod, err := e.get(ctx); string(data) != "a" || mod != first || err != nil {
		t.Errorf("got %q, %d, %v; want a at %d", data, mod, err, first)
	}
	if second, ok, err := e.put(ctx, []byte("c"), first); !ok || second <= first || err != nil {
		t.Errorf("a put at the revision: %d, %t, %v", second, ok, err)
	}
	down := etcdKey{downKV{}, "/key"}
	_, _, errGet := down.get(ctx)
	_, ok, errPut := down.put(ctx, nil, 0)
	if !errors.Is(errGet, errDown) || !errors.Is(errPut, errDown) || ok {
		t.Errorf("etcd is down: %v, %t, %v", errGet, ok, errPut)
	}
}

// TestReadRing_EtcdFails_ReturnsItsError, without another attempt.
func TestReadRing_EtcdFails_ReturnsItsError(t *testing.T) {
	etcd := &fakeEtcd{err: errDown}
	k := &Keeper{stored: etcd}
	if err := k.readRing(t.Context()); !errors.Is(err, errDown) || etcd.gets != 1 {
		t.Errorf("%v after %d reads", err, etcd.gets)
	}
}

// TestKeeper_Outage_IsLoggedOnce, its end is, and so is a failing rotation.
func TestKeeper_Outage_IsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		etcd, kms := &fakeEtcd{err: errDown}, &fakeKMS{}
		k := newKeeper(Options{Key: "/keys", Transformer: kms, Seal: true, Rotation: testRotation, Keep: testKeep,
			Logger: slog.New(slog.NewTextHandler(&log, nil))}, etcd)
		time.Sleep(10 * time.Minute)
		etcd.set(func(e *fakeEtcd) { e.err = nil })
		time.Sleep(time.Hour)
		kms.set(func(f *fakeKMS) { f.err = errDown })
		time.Sleep(2 * testRotation)
		k.Close()
		for _, line := range []string{"Failed to read", "readable again", "Failed to update"} {
			if n := strings.Count(log.String(), line); n != 1 {
				t.Errorf("%q is logged %d times", line, n)
			}
		}
	})
}
