package kubestorage

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/grpclog"
	"k8s.io/apimachinery/pkg/api/apitesting"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// patience bounds every wait of the tests. Only a failing test waits that long, even on a busy
// machine with the race detector.
const patience = 2 * time.Minute

const testPrefix = "/registry/"

var (
	scheme = runtime.NewScheme()
	codecs = serializer.NewCodecFactory(scheme)
)

func init() {
	// Discard the logs of gRPC: etcd and its clients are closed during calls.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	utilruntime.Must(example.AddToScheme(scheme))
	utilruntime.Must(examplev1.AddToScheme(scheme))
}

// fixture is a storage of the example API's pods with a separate etcd.
type fixture struct {
	storage.Interface // a *Store, or upstream's store if the cluster reads from etcd
	destroy           func()

	cluster *cluster
	client  *kubernetes.Client
	codec   *countingCodec

	// The requests of the fixture's client to etcd.
	requests *requests
	reads    *storagetesting.KVRecorder
	lists    *storagetesting.KubernetesRecorder
}

// options of a fixture.
type options struct {
	etcd        testetcd.Config
	store       storeConfig
	engine      Options
	source      func(driver.Source) driver.Source       // between etcd and the mirror
	watcher     func(clientv3.Watcher) clientv3.Watcher // put before etcd's
	memory      *memory.Store                           // see inMemory
	fromEtcd    bool                                    // no mirror: the cluster reads from etcd
	eventsOnly  bool                                    // as if etcd were too old
	beforeReady bool                                    // do not wait until the resource is loaded
	dataBefore  func(*kubernetes.Client)                // called before anything reads etcd
	prefix      string                                  // of all keys, testPrefix unless set
}

func withTransformer(t value.Transformer) func(*options) {
	return func(o *options) { o.store.Transformer = t }
}

// inMemory makes the etcd of a fixture an in-memory one, which can run in a synctest bubble. It has
// no leases, and upstream's store cannot watch it. Compactions do not reach the mirror.
func inMemory(etcd *memory.Store) func(*options) {
	return func(o *options) { o.memory = etcd }
}

// clientOf returns a client of an in-memory etcd.
func clientOf(etcd *memory.Store) *kubernetes.Client {
	c := &kubernetes.Client{Client: clientv3.NewCtxClient(context.Background())}
	c.KV, c.Kubernetes = podtest.NewKV(etcd, nil), c
	return c
}

func withSource(wrap func(driver.Source) driver.Source) func(*options) {
	return func(o *options) { o.source = wrap }
}

func withWindow(w mirror.Window) func(*options) {
	return func(o *options) { o.engine.Window = w }
}

func withGates(g featuregate.FeatureGate) func(*options) {
	return func(o *options) { o.engine.Gates = g }
}

func withData(put func(*kubernetes.Client)) func(*options) {
	return func(o *options) { o.dataBefore = put }
}

// atRoot stores keys as upstream's own tests do: the path of an object is its key.
func atRoot(o *options)      { o.prefix = "/" }
func fromEtcd(o *options)    { o.fromEtcd = true }
func eventsOnly(o *options)  { o.eventsOnly = true }
func beforeReady(o *options) { o.beforeReady = true }
func uncached(o *options)    { o.store.Uncached = true }

// setup starts an etcd and makes a storage on it. Unless the options differ, the storage is a Store
// whose resource is loaded.
func setup(t testing.TB, opts ...func(*options)) *fixture {
	t.Helper()
	codec := &countingCodec{Codec: testCodec()}
	o := options{
		prefix: testPrefix,
		store: storeConfig{
			Codec:          codec,
			Kind:           podKind(schema.GroupResource{Resource: "pods"}),
			ResourcePrefix: "/pods/",
			Transformer:    identity.NewEncryptCheckTransformer(),
			// Leases are shared for this long; the suites wait for one to expire.
			Leases: etcd3.LeaseManagerConfig{ReuseDurationSeconds: 1, MaxObjectCount: 1000},
		},
		engine: Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))},
	}
	for _, opt := range opts {
		opt(&o)
	}
	f := &fixture{codec: codec, requests: &requests{}}
	var client *kubernetes.Client
	if o.memory != nil {
		client = clientOf(o.memory)
	} else {
		client = startEtcd(t, o.etcd, grpc.WithChainStreamInterceptor(f.requests.countStream))
	}
	f.client, f.requests.KV = client, client.KV
	f.lists = storagetesting.NewKubernetesRecorder(client.Kubernetes)
	f.reads = newKVRecorder(f.requests, f.lists)
	client.KV = f.reads
	client.Kubernetes = f.lists
	if o.dataBefore != nil {
		o.dataBefore(client)
	}

	if o.watcher != nil {
		client.Watcher = o.watcher(client.Watcher)
	}
	var source detectedSource
	if o.memory != nil {
		source = detectedSource{source: o.memory, latestReads: latestReads{lists: true, gets: true}}
	} else if !o.fromEtcd {
		source = detect(t, client, o.prefix, o.engine, o.watcher == nil)
		if source.source == nil {
			t.Fatal("the etcd cannot feed a mirror")
		}
		if o.eventsOnly {
			source.eventsOnly, source.latestReads = true, latestReads{}
		}
	}
	if o.source != nil && source.source != nil {
		source.source = o.source(source.source)
	}
	var compactor *compactor
	if o.memory == nil {
		compactor = startCompactor(client.Client, 0, o.engine.ReadOnly, o.engine.Logger)
	}
	c, err := startCluster(client, compactor, source, o.prefix, o.engine, newBlocks(cmp.Or(o.engine.RepresentationBytes, DefaultRepresentationBytes)))
	testcheck.NoError(t, err)
	t.Cleanup(c.close)
	f.cluster = c
	if o.memory != nil {
		c.ranges = client.KV
	}
	f.Interface, f.destroy, err = c.open(o.store)
	testcheck.NoError(t, err)
	t.Cleanup(f.destroy)
	if s, ok := f.Interface.(*Store); ok && !o.beforeReady {
		testcheck.NoError(t, s.resource.WaitReady(contextFor(t)))
	}
	f.requests.reset()
	f.reads.GetReadsAndReset()
	return f
}

// detect is detectSource of an etcd that answers progress requests, or does not. It is repeated
// while the etcd seems to be another one, because its answer took most of a second: the machine is
// full.
func detect(t testing.TB, client *kubernetes.Client, prefix string, opts Options, progress bool) detectedSource {
	t.Helper()
	for end := time.Now().Add(patience); ; {
		source, err := detectSource(client, prefix, opts)
		wrong := source.progressMode == etcdsource.ByProgress
		if progress {
			wrong = source.progressMode == etcdsource.ByEvents
		}
		if err != nil {
			t.Fatalf("the etcd cannot feed a mirror: %v", err)
		}
		if !wrong || time.Now().After(end) {
			return source
		}
	}
}

// setupInMemory is setup with an in-memory etcd; see inMemory.
func setupInMemory(t testing.TB, opts ...func(*options)) *fixture {
	t.Helper()
	return setup(t, append(opts, inMemory(memory.New()))...)
}

// newKVRecorder returns upstream's recorder of reads; since v0.37 it records streamed lists too.
func newKVRecorder(kv clientv3.KV, lists *storagetesting.KubernetesRecorder) *storagetesting.KVRecorder {
	switch create := any(storagetesting.NewKVRecorder).(type) {
	case func(clientv3.KV) *storagetesting.KVRecorder:
		return create(kv)
	case func(clientv3.KV, *storagetesting.KubernetesRecorder) *storagetesting.KVRecorder:
		return create(kv, lists)
	default:
		panic(fmt.Sprintf("unknown recorder %T", create))
	}
}

// engine returns the fixture's storage, which must be served from memory.
func (f *fixture) engine(t testing.TB) *Store {
	t.Helper()
	s, ok := f.Interface.(*Store)
	if !ok {
		t.Fatalf("the storage is a %T, want it served from memory", f.Interface)
	}
	return s
}

// catchUp returns when memory, if there is one, has caught up with etcd. Its feed has started then,
// and sends no requests to etcd on its own.
func (f *fixture) catchUp(t testing.TB) {
	t.Helper()
	m := f.cluster.mirror
	if m == nil {
		return
	}
	rev, err := m.ReadRevision(contextFor(t))
	if err == nil {
		err = m.Wait(contextFor(t), rev)
	}
	if err != nil {
		t.Fatalf("memory did not catch up with etcd: %v", err)
	}
	// The restore of history reads from etcd too.
	eventually(t, "history is restored", func() bool { return m.Stats().Restoring == 0 })
}

// testCodec is the codec of the values in etcd.
func testCodec() runtime.Codec { return apitesting.TestCodec(codecs, examplev1.SchemeGroupVersion) }

// contextFor returns a context that ends with the test, or after patience.
func contextFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually returns when the condition is true, checking every 10 ms.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %s for: %s", patience, what)
		}
	}
}

// startEtcd runs an etcd until the end of the test, and returns a client of it.
func startEtcd(t testing.TB, config testetcd.Config, opts ...grpc.DialOption) *kubernetes.Client {
	t.Helper()
	if testing.Short() {
		t.Skip("short: runs an etcd")
	}
	etcd := testetcd.Start(t, config)
	client, err := kubernetes.New(clientv3.Config{
		Endpoints:   []string{etcd.Endpoint()},
		DialOptions: opts,
		Logger:      zap.NewNop(),
	})
	if err != nil {
		t.Fatalf("connect to etcd: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// requests counts a client's requests to etcd below testPrefix; the key of upstream's compactor is
// outside.
type requests struct {
	clientv3.KV
	revisions atomic.Int64 // reads of etcd's revision alone
	gets      atomic.Int64 // reads of one key
	ranges    atomic.Int64 // reads of many
	writes    atomic.Int64 // transactions, puts and deletions
}

func (r *requests) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	switch op := clientv3.OpGet(key, opts...); {
	case !strings.HasPrefix(key, testPrefix):
	case op.RangeBytes() != nil:
		r.ranges.Add(1)
	case op.IsCountOnly():
		r.revisions.Add(1)
	default:
		r.gets.Add(1)
	}
	return r.KV.Get(ctx, key, opts...)
}

// countStream counts the streams of a connection that read many keys: the mirror opens them itself.
func (r *requests) countStream(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, begin grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	if strings.HasSuffix(method, "/RangeStream") {
		r.ranges.Add(1)
	}
	return begin(ctx, desc, conn, method, opts...)
}

func (r *requests) Put(ctx context.Context, key, value string, opts ...clientv3.OpOption) (*clientv3.PutResponse, error) {
	r.writes.Add(1)
	return r.KV.Put(ctx, key, value, opts...)
}

func (r *requests) Delete(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.DeleteResponse, error) {
	r.writes.Add(1)
	return r.KV.Delete(ctx, key, opts...)
}

func (r *requests) Txn(ctx context.Context) clientv3.Txn {
	r.writes.Add(1)
	return r.KV.Txn(ctx)
}

// reset sets the counters to zero.
func (r *requests) reset() {
	for _, n := range []*atomic.Int64{&r.revisions, &r.gets, &r.ranges, &r.writes} {
		n.Store(0)
	}
}

// tally is a reading of requests.
type tally struct{ Revisions, Gets, Ranges, Writes int64 }

// during returns the requests to etcd while f ran.
func (r *requests) during(f func()) tally {
	before := r.tally()
	f()
	after := r.tally()
	return tally{
		Revisions: after.Revisions - before.Revisions,
		Gets:      after.Gets - before.Gets,
		Ranges:    after.Ranges - before.Ranges,
		Writes:    after.Writes - before.Writes,
	}
}

func (r *requests) tally() tally {
	return tally{r.revisions.Load(), r.gets.Load(), r.ranges.Load(), r.writes.Load()}
}

// countingCodec counts decoded objects.
type countingCodec struct {
	runtime.Codec
	decodes atomic.Int64
}

func (c *countingCodec) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, gvk, err := c.Codec.Decode(data, defaults, into)
	c.decodes.Add(1)
	return obj, gvk, err
}

// podAttrs are the labels of a pod and the fields that the suites select by.
func podAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod, ok := obj.(*example.Pod)
	if !ok {
		return nil, nil, fmt.Errorf("%T is not a pod", obj)
	}
	return pod.Labels, fields.Set{
		"metadata.name":      pod.Name,
		"metadata.namespace": pod.Namespace,
		"spec.nodeName":      pod.Spec.NodeName,
		"spec.restartPolicy": string(pod.Spec.RestartPolicy),
		"status.phase":       string(pod.Status.Phase),
	}, nil
}

func newExamplePod() runtime.Object     { return &example.Pod{} }
func newExamplePodList() runtime.Object { return &example.PodList{} }

// newPod returns a pod in the namespace ns.
func newPod(name string) *example.Pod {
	return &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
}

func podKey(pod metav1.Object) string { return "/pods/" + pod.GetNamespace() + "/" + pod.GetName() }

// create stores the pods and returns them as stored.
func (f *fixture) create(t testing.TB, pods ...*example.Pod) []*example.Pod {
	t.Helper()
	var stored []*example.Pod
	for _, pod := range pods {
		out := &example.Pod{}
		if err := f.Create(contextFor(t), podKey(pod), pod, out, 0); err != nil {
			t.Fatalf("create %s: %v", pod.Name, err)
		}
		stored = append(stored, out)
	}
	return stored
}

// update sets an annotation of the pod to a value and returns the pod as stored.
func (f *fixture) update(t testing.TB, pod *example.Pod, value string) *example.Pod {
	t.Helper()
	out := &example.Pod{}
	err := f.GuaranteedUpdate(contextFor(t), podKey(pod), out, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		metav1.SetMetaDataAnnotation(&obj.(*example.Pod).ObjectMeta, "value", value)
		return obj, nil
	}), nil)
	if err != nil {
		t.Fatalf("update %s: %v", pod.Name, err)
	}
	return out
}

// remove deletes the pod and returns its last state.
func (f *fixture) remove(t testing.TB, pod *example.Pod) *example.Pod {
	t.Helper()
	out := &example.Pod{}
	if err := f.Delete(contextFor(t), podKey(pod), out, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
		t.Fatalf("delete %s: %v", pod.Name, err)
	}
	return out
}

// everything is a list of all pods, linearizable.
func everything() storage.ListOptions {
	return storage.ListOptions{Predicate: storage.Everything, Recursive: true}
}

// list returns the pods that the options select.
func (f *fixture) list(t testing.TB, opts storage.ListOptions) *example.PodList {
	t.Helper()
	list := &example.PodList{}
	if err := getList(contextFor(t), f, "/pods/", opts, list); err != nil {
		t.Fatalf("list: %v", err)
	}
	return list
}

// getList lists from a storage, again while it answers 429: the machine is full, and memory is
// late.
func getList(ctx context.Context, s storage.Interface, key string, opts storage.ListOptions, list *example.PodList) error {
	err := s.GetList(ctx, key, opts, list)
	for ; apierrors.IsTooManyRequests(err) && ctx.Err() == nil; err = s.GetList(ctx, key, opts, list) {
		time.Sleep(10 * time.Millisecond)
	}
	return err
}

func podNames(list *example.PodList) string {
	var names []string
	for i := range list.Items {
		names = append(names, list.Items[i].Name)
	}
	return strings.Join(names, " ")
}

// watchPods begins a watch that ends with the test, again while memory is late.
func (f *fixture) watchPods(t testing.TB, opts storage.ListOptions) watch.Interface {
	t.Helper()
	w, err := f.Watch(contextFor(t), "/pods/", opts)
	for end := time.Now().Add(patience); apierrors.IsTooManyRequests(err) && time.Now().Before(end); w, err = f.Watch(contextFor(t), "/pods/", opts) {
		time.Sleep(10 * time.Millisecond)
	}
	if err != nil {
		t.Fatalf("watch: %v", err)
	}
	t.Cleanup(w.Stop)
	return w
}

// afterRevision are the options of a watch of all pods after the revision.
func afterRevision(resourceVersion string) storage.ListOptions {
	opts := everything()
	opts.ResourceVersion = resourceVersion
	return opts
}

// next returns the watch's next event; the caller owns its object.
func next(t testing.TB, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			t.Fatal("the watch has ended, want an event")
		}
		if shared, ok := e.Object.(runtime.CacheableObject); ok {
			e.Object = shared.GetObject()
		}
		return e
	case <-time.After(patience):
		t.Fatalf("no event in %s", patience)
	}
	return watch.Event{}
}

// nextPod returns the pod of the next event, which must be of the type.
func nextPod(t testing.TB, w watch.Interface, want watch.EventType) *example.Pod {
	t.Helper()
	e := next(t, w)
	pod, ok := e.Object.(*example.Pod)
	if e.Type != want || !ok {
		t.Fatalf("got %s %+v, want %s of a pod", e.Type, e.Object, want)
	}
	return pod
}

// nextStatus returns the status of the next event, which must be an error.
func nextStatus(t testing.TB, w watch.Interface) metav1.Status {
	t.Helper()
	e := next(t, w)
	status, ok := e.Object.(*metav1.Status)
	if e.Type != watch.Error || !ok {
		t.Fatalf("got %s %+v, want an error", e.Type, e.Object)
	}
	return *status
}

// ended returns when the watch's channel is closed, skipping the events left in it.
func ended(t testing.TB, w watch.Interface) {
	t.Helper()
	timeout := time.After(patience)
	for {
		select {
		case _, ok := <-w.ResultChan():
			if !ok {
				return
			}
		case <-timeout:
			t.Fatalf("the watch did not end in %s", patience)
		}
	}
}

// expectUnreadable are the options of a deletion of an object that cannot be decoded. The option
// has another name since v0.37.
func expectUnreadable() storage.DeleteOptions {
	var opts storage.DeleteOptions
	fields := reflect.ValueOf(&opts).Elem()
	for _, name := range []string{"IgnoreStoreReadError", "ExpectTransformOrDecodeError"} {
		if f := fields.FieldByName(name); f.IsValid() {
			f.SetBool(true)
			return opts
		}
	}
	panic(fmt.Sprintf("no option for unreadable objects in %+v", opts))
}

// swappable is a transformer that a test replaces while the storage runs.
type swappable struct {
	current atomic.Pointer[value.Transformer]
}

func newSwappable(t value.Transformer) *swappable {
	s := &swappable{}
	s.set(t)
	return s
}

func (s *swappable) get() value.Transformer  { return *s.current.Load() }
func (s *swappable) set(t value.Transformer) { s.current.Store(&t) }

func (s *swappable) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	return s.get().TransformFromStorage(ctx, data, dataCtx)
}

func (s *swappable) TransformToStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, error) {
	return s.get().TransformToStorage(ctx, data, dataCtx)
}

// podKind is the kind of pods as a resource.
func podKind(resource schema.GroupResource) kind.Kind {
	return kind.Kind{GroupResource: resource, NewFunc: newExamplePod, NewListFunc: newExamplePodList, GetAttrs: podAttrs}
}
