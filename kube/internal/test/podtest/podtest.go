// Package podtest serves pods of the example API from the in-memory source, for the tests of the
// packages that derive data from a mirror. It needs no etcd, and can run in a synctest bubble.
package podtest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/api/apitesting"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
)

// Prefix begins every key in etcd, Root those of the pods.
const (
	Prefix = "/registry/"
	Root   = Prefix + "pods/"
)

// patience bounds every wait. Only a failing test waits that long.
const patience = 2 * time.Minute

var codecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	utilruntime.Must(example.AddToScheme(scheme))
	utilruntime.Must(examplev1.AddToScheme(scheme))
	return serializer.NewCodecFactory(scheme)
}()

// Codec is the codec of stored pods: JSON of example/v1.
func Codec() runtime.Codec { return apitesting.TestCodec(codecs, examplev1.SchemeGroupVersion) }

// Options of a cluster.
type Options struct {
	Etcd     *memory.Store // nil: an empty one
	Unloaded bool          // New does not wait until the pods are loaded
	// UnsafeDelete: errors of unreadable pods are those of the gate
	// AllowUnsafeMalformedObjectDeletion, which the test has to set.
	UnsafeDelete bool

	Window mirror.Window
	Codec  runtime.Codec // of stored values
	Bytes  int64         // bound of the block cache
	// Config configures the view. Its Decoder and Blocks are those of the cluster.
	Config   objects.Config
	OnRotate func()
}

// Cluster is a mirror of an in-memory etcd, and the view of its pods.
type Cluster struct {
	Etcd     *memory.Store
	Mirror   *mirror.Mirror
	Resource *mirror.Resource
	View     *objects.View
	Blocks   *blockcache.Cache

	codec        countingCodec
	config       objects.Config
	unsafeDelete bool
}

// New returns a cluster whose pods are loaded, unless the options differ. It ends with the test.
func New(t testing.TB, change ...func(*Options)) *Cluster {
	t.Helper()
	o := Options{Codec: Codec(), Bytes: 64 << 20, Config: objects.Config{
		Kind: kind.Kind{
			GroupResource: schema.GroupResource{Resource: "pods"},
			NewFunc:       func() runtime.Object { return &example.Pod{} },
			NewListFunc:   NewList,
			GetAttrs:      Attrs,
		},
		Transformer: identity.NewEncryptCheckTransformer(),
	}}
	for _, f := range change {
		f(&o)
	}
	c := &Cluster{Etcd: o.Etcd, Blocks: blockcache.New(o.Bytes, o.Bytes, o.Bytes/4), codec: countingCodec{Codec: o.Codec}}
	if c.Etcd == nil {
		c.Etcd = memory.New()
	}
	m, err := mirror.New(mirror.Options{Prefix: Prefix, Source: c.Etcd, Window: o.Window, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	c.Mirror = m
	if c.Resource, err = m.Claim(Root); err != nil {
		t.Fatal(err)
	}
	if !o.Unloaded {
		if err := c.Resource.WaitReady(Context(t)); err != nil {
			t.Fatal(err)
		}
	}
	o.Config.Decoder, o.Config.Blocks = etcd3.NewDefaultDecoder(&c.codec, storage.APIObjectVersioner{}), c.Blocks
	if o.UnsafeDelete {
		o.Config.Transformer = etcd3.WithCorruptObjErrorHandlingTransformer(o.Config.Transformer)
		o.Config.Decoder = etcd3.WithCorruptObjErrorHandlingDecoder(o.Config.Decoder)
	}
	c.config, c.unsafeDelete = o.Config, o.UnsafeDelete
	c.View = objects.New(o.Config, o.OnRotate)
	t.Cleanup(c.View.Close)
	return c
}

// Put stores the pods, each at a revision of its own, and returns the last one.
func (c *Cluster) Put(t testing.TB, pods ...*example.Pod) (rev mirror.Revision) {
	t.Helper()
	for _, pod := range pods {
		rev = c.Etcd.Put(Key(pod), Stored(t, pod))
	}
	return rev
}

// Fill stores n pods in three namespaces, labelled i=0 to i=9 in turn, and waits until memory has
// them.
func (c *Cluster) Fill(t testing.TB, n int) {
	t.Helper()
	for i := range n {
		pod := Pod(fmt.Sprintf("pod-%04d", i))
		pod.Namespace, pod.Labels = fmt.Sprintf("ns-%d", i%3), map[string]string{"i": fmt.Sprint(i % 10)}
		c.Put(t, pod)
	}
	c.CatchUp(t)
}

// CatchUp returns when memory has caught up with etcd.
func (c *Cluster) CatchUp(t testing.TB) {
	t.Helper()
	if err := c.Mirror.Wait(Context(t), c.Etcd.Revision()); err != nil {
		t.Fatal(err)
	}
}

// Evict evicts all blocks of the cache, as a large addition does if they were not read for a while.
// The test is in a bubble of synctest.
func (c *Cluster) Evict() {
	time.Sleep(time.Minute)
	limit := c.Blocks.Stats().Limit
	c.Blocks.Charge(limit)
	c.Blocks.Charge(-limit)
}

// Latest returns the newest snapshot of the pods.
func (c *Cluster) Latest(t testing.TB) mirror.Snapshot {
	t.Helper()
	snap, err := c.Resource.Latest()
	if err != nil {
		t.Fatal(err)
	}
	return snap
}

// Entry returns the entry of a pod, which must exist.
func (c *Cluster) Entry(t testing.TB, pod *example.Pod) *mirror.Entry {
	t.Helper()
	e, ok := c.Latest(t).Get(Key(pod))
	if !ok {
		t.Fatalf("memory has no %s", Key(pod))
	}
	return e
}

// EventsAfter returns the events of all pods after a revision.
func (c *Cluster) EventsAfter(t testing.TB, rev mirror.Revision) []*mirror.Event {
	t.Helper()
	cursor, err := c.Resource.CursorAfter(rev, "", "")
	if err != nil {
		t.Fatal(err)
	}
	events, err := cursor.Next(nil, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return events
}

// Decoded returns the number of objects that were decoded while f ran.
func (c *Cluster) Decoded(f func()) int {
	before := c.codec.count()
	f()
	return c.codec.count() - before
}

// countingCodec counts decoded objects.
type countingCodec struct {
	runtime.Codec
	mu sync.Mutex // leaf; guards n
	n  int
}

func (c *countingCodec) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *countingCodec) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	c.mu.Lock()
	c.n++
	c.mu.Unlock()
	return c.Codec.Decode(data, defaults, into)
}

// Pod returns a pod in the namespace ns.
func Pod(name string) *example.Pod {
	return &example.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
}

// Labelled returns a pod in the namespace ns with one label.
func Labelled(name, label, value string) *example.Pod {
	pod := Pod(name)
	pod.Labels = map[string]string{label: value}
	return pod
}

// Key returns the key of the pod in etcd.
func Key(pod *example.Pod) string { return Root + pod.Namespace + "/" + pod.Name }

// Stored returns the stored value of a pod.
func Stored(t testing.TB, pod *example.Pod) string {
	t.Helper()
	data, err := runtime.Encode(Codec(), pod)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// Attrs returns the labels of a pod and its selectable fields.
func Attrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod, ok := obj.(*example.Pod)
	if !ok {
		return nil, nil, fmt.Errorf("%T is not a pod", obj)
	}
	return pod.Labels, fields.Set{"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "spec.nodeName": pod.Spec.NodeName}, nil
}

// Selecting returns the predicate of a label and a field selector.
func Selecting(t testing.TB, label, field string) storage.SelectionPredicate {
	t.Helper()
	pred := storage.SelectionPredicate{GetAttrs: Attrs}
	var err error
	if pred.Label, err = labels.Parse(label); err == nil {
		pred.Field, err = fields.ParseSelector(field)
	}
	if err != nil {
		t.Fatal(err)
	}
	return pred
}

// Context returns a context that ends with the test, or after two minutes.
func Context(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// Eventually returns when the condition is true, checking every millisecond.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %s for: %s", patience, what)
		}
	}
}

// NewList returns an empty list of pods.
func NewList() runtime.Object { return &example.PodList{} }

// Upstream returns upstream's store of the pods, which reads and writes through kv. It cannot watch
// or use leases. It ends with the test.
func (c *Cluster) Upstream(t testing.TB, kv *KV) storage.Interface {
	t.Helper()
	client := &kubernetes.Client{Client: clientv3.NewCtxClient(context.Background())}
	client.KV, client.Kubernetes = kv, client
	s, err := upstream.NewEtcd(client, nil, &c.codec, c.config.NewFunc, NewList, nil, Prefix, "/pods/", c.config.GroupResource,
		c.config.Transformer, etcd3.NewDefaultLeaseManagerConfig(), c.config.Decoder, storage.APIObjectVersioner{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if c.unsafeDelete {
		return etcd3.NewStoreWithUnsafeCorruptObjectDeletion(s, c.config.GroupResource)
	}
	return s
}
