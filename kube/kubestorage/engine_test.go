package kubestorage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
	"github.com/stratakube/strata/kube/internal/etcdclient"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/internal/upstream"
)

// openedEngine opens storages of one etcd in the way that registries do.
type openedEngine struct {
	*Engine
	config storagebackend.ConfigForResource
}

func (e *openedEngine) open(t *testing.T, r schema.GroupResource) storage.Interface {
	t.Helper()
	s, destroy := e.openAndDestroy(t, r)
	t.Cleanup(destroy)
	return s
}

func (e *openedEngine) openAndDestroy(t *testing.T, r schema.GroupResource) (storage.Interface, factory.DestroyFunc) {
	t.Helper()
	getter := e.RESTOptionsGetter(getterFunc(func(schema.GroupResource) generic.RESTOptions {
		return generic.RESTOptions{Decorator: generic.UndecoratedStorage}
	}))
	opts, err := getter.GetRESTOptions(r, nil)
	testcheck.NoError(t, err)
	config := e.config
	config.GroupResource = r
	s, destroy, err := upstream.Open(opts.Decorator, &config, "/"+r.Resource+"/", newExamplePod, newExamplePodList, podAttrs, nil)
	if err != nil {
		t.Fatalf("open %s: %v", r.Resource, err)
	}
	return s, destroy
}

// requireSharedMirror waits until the storages are loaded, and fails unless all have one mirror.
func requireSharedMirror(t *testing.T, all ...storage.Interface) {
	t.Helper()
	for _, s := range all {
		store, ok := s.(*Store)
		if !ok || store.mirror != all[0].(*Store).mirror {
			t.Fatalf("%T has a separate mirror", s)
		}
		testcheck.NoError(t, store.resource.WaitReady(contextFor(t)))
	}
}

// TestEngine_StoragesOfOneEtcd_ShareCluster: all storages on one etcd and prefix, of any resource
// and version, have one client, one mirror and one compactor.
func TestEngine_StoragesOfOneEtcd_ShareCluster(t *testing.T) {
	t.Parallel()
	pods, events := schema.GroupResource{Resource: "pods"}, schema.GroupResource{Resource: "events"}
	engine := &openedEngine{New(Options{
		Uncached: func(r schema.GroupResource) bool { return r == events },
		Logger:   slog.New(slog.NewTextHandler(io.Discard, nil)),
	}), storagebackend.ConfigForResource{Config: storagebackend.Config{
		Prefix:               "/registry",
		Transport:            storagebackend.TransportConfig{ServerList: startEtcd(t, testetcd.Config{}).Endpoints()},
		Codec:                testCodec(),
		CompactionInterval:   time.Hour,
		DBMetricPollInterval: time.Hour,
		EventsHistoryWindow:  storagebackend.DefaultEventsHistoryWindow,
		LeaseManagerConfig:   etcd3.NewDefaultLeaseManagerConfig(),
	}}}
	t.Cleanup(engine.Close)
	first, destroyFirst := engine.openAndDestroy(t, pods)
	second := engine.open(t, pods)
	others := engine.open(t, schema.GroupResource{Group: "example.com", Resource: "others"})
	uncachedEvents := engine.open(t, events)
	requireSharedMirror(t, first, second, others)
	if _, ok := uncachedEvents.(*Store); ok {
		t.Error("an uncached resource is served from memory")
	}
	if n := len(engine.clusters); n != 1 {
		t.Errorf("%d clusters, want 1", n)
	}

	// A storage reads the writes of the others, under separate keys.
	ctx := contextFor(t)
	testcheck.NoError(t, first.Create(ctx, "/pods/ns/a", newPod("a"), nil, 0))
	testcheck.NoError(t, uncachedEvents.Create(ctx, "/events/ns/e", newPod("e"), nil, 0))
	destroyFirst()
	destroyFirst() // subresources share a storage and destroy it again
	for key, want := range map[string]struct {
		s     storage.Interface
		names string
	}{"/pods/": {second, "a"}, "/others/": {others, ""}, "/events/": {uncachedEvents, "e"}} {
		list := &example.PodList{}
		if err := getList(ctx, want.s, key, everything(), list); err != nil || podNames(list) != want.names {
			t.Errorf("%s has %q, %v; want %q", key, podNames(list), err, want.names)
		}
	}

	engine.config.Prefix = "/elsewhere"
	elsewhere := engine.open(t, pods)
	if elsewhere.(*Store).mirror == second.(*Store).mirror || len(engine.clusters) != 2 {
		t.Error("another prefix has the same mirror")
	}
	engine.Close()
	engine.config.GroupResource = pods
	if _, _, err := upstream.Open(engine.Decorator(), &engine.config, "/pods/", newExamplePod, newExamplePodList, podAttrs, nil); err == nil {
		t.Error("a closed engine created a storage")
	}
}

// TestCompactor_CompactionByOther_IsFollowed by a server that does not compact.
func TestCompactor_CompactionByOther_IsFollowed(t *testing.T) {
	t.Parallel()
	client := startEtcd(t, testetcd.Config{})
	c, err := newCluster(context.Background(), etcdclient.DialTimeout, &storagebackend.ConfigForResource{Config: storagebackend.Config{
		Transport: storagebackend.TransportConfig{ServerList: client.Endpoints()},
	}}, Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}, newBlocks(DefaultRepresentationBytes))
	testcheck.NoError(t, err)
	defer c.close()
	resp, err := client.Put(contextFor(t), "a", "b")
	testcheck.NoError(t, err)
	rev := resp.Header.Revision
	if _, _, _, err := etcd3.Compact(contextFor(t), client.Client, 0, rev); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mirror detects the compaction", func() bool { return c.compactor.CompactRevision() == rev })
}

type getterFunc func(schema.GroupResource) generic.RESTOptions

func (f getterFunc) GetRESTOptions(r schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return f(r), nil
}

// TestEngine_EtcdWithoutProgress_ServesFromMemory: a store that answers no progress requests, such
// as etcd's gRPC proxy, feeds a mirror with a watch of all keys. Reads of the present come from
// memory and are as new as the store, after writes to any key, and no progress is requested.
func TestEngine_EtcdWithoutProgress_ServesFromMemory(t *testing.T) {
	t.Parallel()
	var log syncBuffer
	f := setup(t, func(o *options) {
		o.watcher = func(w clientv3.Watcher) clientv3.Watcher { return mute{Watcher: w} }
		o.engine.Logger = slog.New(slog.NewTextHandler(&log, nil))
	})
	if n := strings.Count(log.String(), "the feed watches all keys"); n != 1 || f.cluster.detected.progressMode != etcdsource.ByEvents {
		t.Errorf("progress mode is %s, %d log lines report it in\n%s", f.cluster.detected.progressMode, n, log.String())
	}
	ctx := contextFor(t)
	for i := range 5 {
		pod := f.create(t, newPod(fmt.Sprint("p", i)))[0]
		resp, err := f.client.Put(ctx, "/elsewhere", pod.ResourceVersion)
		testcheck.NoError(t, err)
		got := f.requests.during(func() {
			list := f.list(t, everything())
			if len(list.Items) != i+1 || list.ResourceVersion != fmt.Sprint(resp.Header.Revision) {
				t.Errorf("list has %q at %s, want %d pods at %d", podNames(list), list.ResourceVersion, i+1, resp.Header.Revision)
			}
			if err := f.Get(ctx, podKey(pod), storage.GetOptions{}, &example.Pod{}); err != nil {
				t.Error(err)
			}
		})
		// A GET may go to etcd while the machine is full.
		if got.Ranges != 0 || got.Revisions == 0 {
			t.Errorf("requests to etcd: %+v, want only its revision", got)
		}
	}
	if n := f.cluster.mirror.Stats().ProgressRequests; n != 0 {
		t.Errorf("%d progress requests", n)
	}
	nextPod(t, f.watchPods(t, everything()), watch.Added)
}

// TestEngine_FreshnessUnproven_ReadsFromEtcd: without progress and without a watch of all keys,
// reads of the present go to etcd, and gates cannot move them to memory.
func TestEngine_FreshnessUnproven_ReadsFromEtcd(t *testing.T) {
	t.Parallel()
	client := startEtcd(t, testetcd.Config{})
	client.Watcher = mute{Watcher: client.Watcher, deny: "\x00"}
	opts := Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	if got := detect(t, client, testPrefix, opts, false); got.progressMode != etcdsource.NoProgress || !got.eventsOnly || got.latestReads != (latestReads{}) {
		t.Errorf("%+v", got)
	}
	opts.Gates = gates(t, Gates(), "ConsistentListFromCache=true")
	refused := func() error { _, err := detectSource(client, testPrefix, opts); return err }
	err := refused()
	for end := time.Now().Add(patience); err == nil && time.Now().Before(end); {
		err = refused() // the etcd seemed to be another one, see detect
	}
	if err == nil || !strings.Contains(err.Error(), "ConsistentListFromCache") {
		t.Errorf("%v, want that the gate is refused", err)
	}
}

// mute is a watcher that forwards no progress request, and starts no watch of the key deny.
type mute struct {
	clientv3.Watcher
	deny string
}

func (mute) RequestProgress(context.Context) error { return nil }

func (m mute) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	if key == m.deny {
		denied := make(chan clientv3.WatchResponse)
		close(denied)
		return denied
	}
	return m.Watcher.Watch(ctx, key, opts...)
}

// syncBuffer is a bytes.Buffer for several writers.
type syncBuffer struct {
	mu sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Buffer.String()
}

// TestDecryption_Hangs_DelaysNoOtherResource (I9): while a KMS does not answer for one resource,
// reads, watches and writes of another resource on the same feed are not delayed.
func TestDecryption_Hangs_DelaysNoOtherResource(t *testing.T) {
	t.Parallel()
	kms := &valve{}
	f := setup(t, withTransformer(hanging{kms}))
	stuck := f.create(t, newPod("stuck"))[0]
	opened, destroy, err := f.cluster.open(storeConfig{
		Codec:          testCodec(),
		Kind:           podKind(schema.GroupResource{Resource: "others"}),
		ResourcePrefix: "/others/",
		Transformer:    podtest.Encryption(t, "1"),
		Leases:         etcd3.NewDefaultLeaseManagerConfig(),
	})
	testcheck.NoError(t, err)
	defer destroy()
	others := opened.(*Store)
	ctx := contextFor(t)
	testcheck.NoError(t, others.resource.WaitReady(ctx))
	f.catchUp(t)
	f.engine(t).watches.RetryFor = patience
	waiting := f.watchPods(t, afterRevision(stuck.ResourceVersion))

	kms.shut()
	defer kms.open()
	f.putPod(t, withLabel(stuck, "a", "b"))
	listCtx, cancel := context.WithCancel(ctx)
	listed := make(chan error, 1)
	go func() { listed <- f.GetList(listCtx, "/pods/", everything(), &example.PodList{}) }()

	w, err := others.Watch(ctx, "/others/", afterRevision(stuck.ResourceVersion))
	testcheck.NoError(t, err)
	defer w.Stop()
	for range 20 {
		created := &example.Pod{}
		testcheck.NoError(t, others.Create(ctx, "/others/ns/a", newPod("a"), created, 0))
		if got := nextPod(t, w, watch.Added); got.ResourceVersion != created.ResourceVersion {
			t.Fatalf("watch has %s, want %s", got.ResourceVersion, created.ResourceVersion)
		}
		list := &example.PodList{}
		if err := getList(ctx, others, "/others/", everything(), list); err != nil || podNames(list) != "a" {
			t.Fatalf("list has %q, %v", podNames(list), err)
		}
		if err := others.Delete(ctx, "/others/ns/a", &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		nextPod(t, w, watch.Deleted)
	}
	if stats, err := f.Stats(ctx); err != nil || stats.ObjectCount != 1 {
		t.Errorf("stats of the stuck resource: %+v, %v", stats, err)
	}

	// A list that waits for the KMS ends with its request, the watch continues when the KMS is
	// back.
	cancel()
	if err := <-listed; err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the waiting list: %v, want a cancellation", err)
	}
	kms.open()
	if got := nextPod(t, waiting, watch.Modified); got.Labels["a"] != "b" {
		t.Errorf("the watch continues with labels %v", got.Labels)
	}
}

// hanging is a transformer that decrypts nothing while its KMS is shut.
type hanging struct{ kms *valve }

func (h hanging) TransformFromStorage(ctx context.Context, data []byte, _ value.Context) ([]byte, bool, error) {
	return data, false, h.kms.pass(ctx)
}

func (h hanging) TransformToStorage(_ context.Context, data []byte, _ value.Context) ([]byte, error) {
	return data, nil
}

// TestEngine_DialHangs_OtherClustersAreServed: a dial does not delay the engine's other methods,
// and Close waits for it.
func TestEngine_DialHangs_OtherClustersAreServed(t *testing.T) {
	if testing.Short() {
		t.Skip("short: waits for etcd for 10 s")
	}
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	defer silent.Close() // accepts connections and does not answer
	engine := New(Options{})
	opened := make(chan error, 1)
	go func() {
		_, err := engine.cluster(&storagebackend.ConfigForResource{Config: storagebackend.Config{
			Prefix: "/registry", Transport: storagebackend.TransportConfig{ServerList: []string{"http://" + silent.Addr().String()}},
		}})
		opened <- err
	}()
	for engine.opening.TryLock() {
		engine.opening.Unlock()
		select {
		case err := <-opened:
			t.Fatalf("opening ended: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
	engine.HoldsBuiltIn("pods")
	engine.Checkers()
	if err := engine.Drain(contextFor(t), 0); err != nil {
		t.Error(err)
	}
	if engine.opening.TryLock() {
		t.Fatal("the dial had ended before the other methods returned")
	}
	engine.Close()
	if err := <-opened; err == nil {
		t.Error("a closed engine opened a cluster")
	}
}
