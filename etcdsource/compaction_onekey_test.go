package etcdsource

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/protobuf/proto"
)

// oneKey is an etcd with one key, with the revisions and compactions of a real one, and with hooks
// between any two steps.
type oneKey struct {
	clientv3.KV
	clientv3.Watcher

	mu        sync.Mutex
	cluster   uint64
	rev       int64
	compacted int64
	key       *mvccpb.KeyValue                     // nil: deleted
	history   []string                             // "put 5", "compact 5", "delete"
	watchers  map[chan clientv3.WatchResponse]bool // false: hangs
	// before is called before each request with its kind (get, txn, compact, watch), without the
	// lock; after is called when etcd has executed the request, before the answer. Their error is
	// the answer.
	before, after func(kind string) error
}

// step calls a hook between two steps.
func (e *oneKey) step(place *func(string) error, kind string) error {
	e.mu.Lock()
	f := *place
	e.mu.Unlock()
	return f(kind)
}

// intercept sets a hook; f is called by several goroutines, one at a time.
func (e *oneKey) intercept(place *func(string) error, f func(kind string) error) {
	var one sync.Mutex
	e.mu.Lock()
	defer e.mu.Unlock()
	*place = func(kind string) error {
		one.Lock()
		defer one.Unlock()
		return f(kind)
	}
}

// failing makes requests of a kind fail with err until end is called.
func (e *oneKey) failing(kind string, err error) (end func()) {
	var over atomic.Bool
	e.intercept(&e.before, func(k string) error {
		if k == kind && !over.Load() {
			return err
		}
		return nil
	})
	return func() { over.Store(true) }
}

func newOneKey() *oneKey {
	nothing := func(string) error { return nil }
	return &oneKey{cluster: 1, rev: 1, watchers: map[chan clientv3.WatchResponse]bool{}, before: nothing, after: nothing}
}

// client returns a client of the etcd without a connection.
func (e *oneKey) client() *clientv3.Client {
	c := clientv3.NewCtxClient(context.Background())
	c.KV, c.Watcher = e, e
	return c
}

func (e *oneKey) header() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: e.cluster, Revision: e.rev}
}

func (e *oneKey) kvs() []*mvccpb.KeyValue {
	if e.key == nil {
		return nil
	}
	return []*mvccpb.KeyValue{proto.CloneOf(e.key)}
}

func (e *oneKey) notifyLocked(kind mvccpb.Event_EventType, kv *mvccpb.KeyValue) {
	for w, receives := range e.watchers {
		if !receives {
			continue
		}
		w <- clientv3.WatchResponse{Header: e.header(), Events: []*clientv3.Event{{Type: kind, Kv: kv}}}
	}
}

// put writes the key.
func (e *oneKey) put(value string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.putLocked(value)
}

func (e *oneKey) putLocked(value string) {
	e.rev++
	kv := &mvccpb.KeyValue{Key: []byte(CompactionKey), Value: []byte(value), ModRevision: e.rev, CreateRevision: e.rev, Version: 1}
	if e.key != nil {
		kv.CreateRevision, kv.Version = e.key.CreateRevision, e.key.Version+1
	}
	e.key = kv
	e.history = append(e.history, "put "+value)
	e.notifyLocked(mvccpb.PUT, proto.CloneOf(kv))
}

// remove deletes the key.
func (e *oneKey) remove() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rev++
	e.key = nil
	e.history = append(e.history, "delete")
	e.notifyLocked(mvccpb.DELETE, &mvccpb.KeyValue{Key: []byte(CompactionKey), ModRevision: e.rev})
}

// write is a write of other keys: the revision increases.
func (e *oneKey) write(n int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.rev += n
}

// cut ends all watches.
func (e *oneKey) cut() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for w := range e.watchers {
		close(w)
		delete(e.watchers, w)
	}
}

// hang stops the responses of all current watches.
func (e *oneKey) hang() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for w := range e.watchers {
		e.watchers[w] = false
	}
}

func (e *oneKey) compactTo(rev int64) error {
	switch {
	case rev <= e.compacted:
		return rpctypes.ErrCompacted
	case rev > e.rev:
		return rpctypes.ErrFutureRev
	}
	e.compacted = rev
	e.history = append(e.history, fmt.Sprint("compact ", rev))
	return nil
}

func (e *oneKey) Get(ctx context.Context, _ string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	if err := e.step(&e.before, "get"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if at := clientv3.OpGet(CompactionKey, opts...).Rev(); at > 0 && at < e.compacted {
		return nil, rpctypes.ErrCompacted
	}
	return &clientv3.GetResponse{Header: e.header(), Kvs: e.kvs()}, nil
}

func (e *oneKey) Compact(ctx context.Context, rev int64, _ ...clientv3.CompactOption) (*clientv3.CompactResponse, error) {
	if err := e.step(&e.before, "compact"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	err := e.compactTo(rev)
	h := e.header()
	e.mu.Unlock()
	if late := e.step(&e.after, "compact"); late != nil {
		err = late
	}
	return &clientv3.CompactResponse{Header: h}, err
}

func (e *oneKey) Txn(context.Context) clientv3.Txn { return &oneTxn{etcd: e} }

// oneTxn is the only supported form of transaction.
type oneTxn struct {
	etcd   *oneKey
	expect int64
	value  string
}

func (x *oneTxn) If(cs ...clientv3.Cmp) clientv3.Txn {
	c := cs[0].GetCompare()
	if len(cs) != 1 || c.Result != pb.Compare_EQUAL || c.Target != pb.Compare_VERSION {
		panic("comparison differs from that of a kube-apiserver")
	}
	x.expect = c.TargetUnion.(*pb.Compare_Version).Version
	return x
}

func (x *oneTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	if len(ops) != 1 || !ops[0].IsPut() || string(ops[0].KeyBytes()) != CompactionKey {
		panic("transaction differs from that of a kube-apiserver")
	}
	x.value = string(ops[0].ValueBytes())
	return x
}

func (x *oneTxn) Else(ops ...clientv3.Op) clientv3.Txn {
	if len(ops) != 1 || !ops[0].IsGet() {
		panic("transaction differs from that of a kube-apiserver")
	}
	return x
}

func (x *oneTxn) Commit() (*clientv3.TxnResponse, error) {
	e := x.etcd
	if err := e.step(&e.before, "txn"); err != nil {
		return nil, err
	}
	e.mu.Lock()
	version := int64(0)
	if e.key != nil {
		version = e.key.Version
	}
	resp := &clientv3.TxnResponse{Succeeded: version == x.expect}
	if resp.Succeeded {
		e.putLocked(x.value)
	} else {
		resp.Responses = []*pb.ResponseOp{{Response: &pb.ResponseOp_ResponseRange{ResponseRange: &pb.RangeResponse{Kvs: e.kvs()}}}}
	}
	resp.Header = e.header()
	e.mu.Unlock()
	if err := e.step(&e.after, "txn"); err != nil {
		return nil, err
	}
	return resp, nil
}

func (e *oneKey) Watch(ctx context.Context, _ string, opts ...clientv3.OpOption) clientv3.WatchChan {
	w := make(chan clientv3.WatchResponse, 100)
	if err := e.step(&e.before, "watch"); err != nil {
		close(w)
		return w
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if from := clientv3.OpGet(CompactionKey, opts...).Rev(); from < e.compacted {
		w <- clientv3.WatchResponse{Header: e.header(), Canceled: true, CompactRevision: e.compacted}
		close(w)
		return w
	}
	w <- clientv3.WatchResponse{Header: e.header(), Created: true}
	e.watchers[w] = true
	context.AfterFunc(ctx, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if _, ok := e.watchers[w]; ok {
			close(w)
			delete(e.watchers, w)
		}
	})
	return w
}

func (e *oneKey) operations() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.history)
}
