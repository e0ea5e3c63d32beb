package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

const (
	// atOnce is the number of requests of one activity that are in flight at once; a guess.
	atOnce = 32
	// adminConns is the number of connections of clients that are not nodes; controllers have a few.
	adminConns = 4
	// quiet bounds the wait for idle processes before a measurement.
	quiet = 20 * time.Second
)

// cluster is an etcd with fsync, a server on it, and the objects and clients of a simulated cluster.
type cluster struct {
	shape   scaling.Cluster
	dir     string
	etcd    *target.Etcd
	engine  *target.Engine
	traffic *target.Traffic
	admin   []*target.Conn
	watches *watchPool
	kwok    bool
	done    map[scaling.Op]*atomic.Int64

	factor   float64 // of the last measurement, from CPU time to that at the reference speed
	template *corev1.Pod
	leases   []*guarded[*coordinationv1.Lease]
	slices   []*guarded[*discoveryv1.EndpointSlice]

	mu      sync.Mutex // guards live and created
	live    []*corev1.Pod
	created int
	events  atomic.Int64
}

// guarded is the newest state of an object, whose writer needs its resource version.
type guarded[T any] struct {
	sync.Mutex
	obj T
}

// startCluster starts etcd and server without objects. The caller must close it.
func startCluster(ctx context.Context, config config, shape scaling.Cluster) (*cluster, error) {
	c := &cluster{shape: shape, dir: config.dir, traffic: new(target.Traffic), done: map[scaling.Op]*atomic.Int64{}}
	for _, op := range scaling.Ops {
		c.done[op] = new(atomic.Int64)
	}
	data, err := tempDir(config.dir, "etcd-")
	if err != nil {
		return nil, err
	}
	if c.etcd, err = target.StartEtcd(ctx, config.binary, filepath.Join(data, "etcd"), config.dir, "--unsafe-no-fsync=false"); err != nil {
		return nil, err
	}
	if c.engine, err = c.startServer(ctx, config, ""); err != nil {
		c.etcd.Stop()
		return nil, err
	}
	for range adminConns {
		c.admin = append(c.admin, c.engine.DialCounting(c.traffic))
	}
	c.watches = newWatchPool(ctx)
	return c, nil
}

// startServer starts a server on the etcd of the cluster. Lines of the cluster's own server and of another one differ by variant.
func (c *cluster) startServer(ctx context.Context, config config, variant string) (*target.Engine, error) {
	return target.StartEngine(ctx, target.EngineSpec{
		Label: "strata", Engine: "strata", Binary: config.binary, Variant: variant,
	}, c.etcd, config.credentials, "/api/v1/namespaces", config.dir)
}

func (c *cluster) close() {
	target.CloseAll(c.admin)
	c.engine.Stop()
	c.etcd.Stop()
}

// conn returns a connection of clients that are not nodes.
func (c *cluster) conn(i int) *target.Conn { return c.admin[i%len(c.admin)] }

func (c *cluster) count(op scaling.Op) { c.done[op].Add(1) }

// podNamespace is the namespace of pod i; there are as many namespaces as the initial pods need.
func (c *cluster) podNamespace(i int) string { return namespaceName(i % max(c.shape.Pods, 1)) }

// each calls f for 0 to n-1, atOnce at a time.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	return eachOf(ctx, n, atOnce, f)
}

// eachOf is each with another limit.
func eachOf(ctx context.Context, n, limit int, f func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(limit)
	for i := range n {
		group.Go(func() error { return f(ctx, i) })
	}
	return group.Wait()
}

// fill creates namespaces, nodes with leases, EndpointSlices, and pods. Pods are written to etcd, in the form that the server stored for one
// that was created, bound and started through the API.
func (c *cluster) fill(ctx context.Context) error {
	if err := c.fillNamespaces(ctx); err != nil {
		return err
	}
	if err := c.fillNodes(ctx, c.shape.Nodes); err != nil {
		return err
	}
	if err := c.fillSlices(ctx, int(c.shape.Slices())); err != nil {
		return err
	}
	return c.fillPods(ctx, c.shape.Pods)
}

func (c *cluster) fillNamespaces(ctx context.Context) error {
	return each(ctx, (max(c.shape.Pods, 1)+scaling.ListPods-1)/scaling.ListPods, func(ctx context.Context, i int) error {
		name := namespaceName(i * scaling.ListPods)
		if _, err := send(ctx, c.conn(i), http.MethodPost, "/api/v1/namespaces", &corev1.Namespace{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: name},
		}, http.StatusCreated); err != nil {
			return err
		}
		_, err := send(ctx, c.conn(i), http.MethodPost, "/api/v1/namespaces/"+name+"/serviceaccounts", &corev1.ServiceAccount{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"}, ObjectMeta: metav1.ObjectMeta{Name: "default"},
		}, http.StatusCreated)
		return err
	})
}

// fillNodes creates nodes and their leases; kwok creates leases itself.
func (c *cluster) fillNodes(ctx context.Context, n int) error {
	c.leases = make([]*guarded[*coordinationv1.Lease], n)
	return each(ctx, n, func(ctx context.Context, i int) error {
		if _, err := send(ctx, c.conn(i), http.MethodPost, nodePath, newNode(i, c.kwok), http.StatusCreated); err != nil {
			return err
		}
		if _, err := patch(ctx, c.conn(i), nodePath+"/"+nodeName(i)+"/status", heartbeat(time.Now())); err != nil {
			return err
		}
		if c.kwok {
			return nil
		}
		lease, err := sendAs[*coordinationv1.Lease](ctx, c.conn(i), http.MethodPost, leasePath, newLease(nodeName(i)), http.StatusCreated)
		c.leases[i] = &guarded[*coordinationv1.Lease]{obj: lease}
		return err
	})
}

func (c *cluster) fillSlices(ctx context.Context, n int) error {
	c.slices = make([]*guarded[*discoveryv1.EndpointSlice], n)
	return each(ctx, n, func(ctx context.Context, i int) error {
		slice, err := sendAs[*discoveryv1.EndpointSlice](ctx, c.conn(i), http.MethodPost, slicePath, newSlice(i, c.shape.SliceEndpoints, 0), http.StatusCreated)
		c.slices[i] = &guarded[*discoveryv1.EndpointSlice]{obj: slice}
		return err
	})
}

// sendAs is send with the type of the answer.
func sendAs[T runtime.Object](ctx context.Context, conn *target.Conn, method, path string, obj runtime.Object, status int) (T, error) {
	var none T
	got, err := send(ctx, conn, method, path, obj, status)
	if err != nil {
		return none, err
	}
	typed, ok := got.(T)
	if !ok {
		return none, fmt.Errorf("%s %s: the answer is a %T", method, path, got)
	}
	return typed, nil
}

// fillPods writes n pods to etcd.
func (c *cluster) fillPods(ctx context.Context, n int) error {
	if err := c.makeTemplate(ctx); err != nil {
		return err
	}
	c.live, c.created = make([]*corev1.Pod, n), n
	return each(ctx, n, func(ctx context.Context, i int) error {
		pod := c.template.DeepCopy()
		pod.Name, pod.Namespace, pod.UID, pod.Spec.NodeName = podName(i), c.podNamespace(i), types.UID(uuid.NewString()), nodeName(i%c.shape.Nodes)
		c.live[i] = pod
		return c.put(ctx, podKey(pod), pod)
	})
}

func podKey(pod *corev1.Pod) string { return "/registry/pods/" + pod.Namespace + "/" + pod.Name }

// put writes an object to etcd.
func (c *cluster) put(ctx context.Context, key string, obj runtime.Object) error {
	var value bytes.Buffer
	if err := serializer.Encode(obj, &value); err != nil {
		return fmt.Errorf("encode %s: %w", key, err)
	}
	if _, err := c.etcd.Client.Put(ctx, key, value.String()); err != nil {
		return fmt.Errorf("write %s: %w", key, err)
	}
	return nil
}

// makeTemplate creates, binds, starts and removes a pod, and stores its form in etcd before the removal.
func (c *cluster) makeTemplate(ctx context.Context) error {
	pod, err := c.createPod(ctx, 9_999_999)
	if err != nil {
		return err
	}
	if err := c.bind(ctx, pod); err != nil {
		return err
	}
	if err := c.patchStatus(ctx, c.conn(0), pod, corev1.PodRunning); err != nil {
		return err
	}
	stored, err := c.etcd.Client.Get(ctx, podKey(pod))
	if err != nil {
		return fmt.Errorf("read the template: %w", err)
	}
	if len(stored.Kvs) != 1 {
		return errors.New("etcd does not have the template")
	}
	obj, _, err := scheme.Codecs.UniversalDeserializer().Decode(stored.Kvs[0].Value, nil, nil)
	if err != nil {
		return fmt.Errorf("decode the template: %w", err)
	}
	c.template = obj.(*corev1.Pod)
	c.template.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	return c.removePod(ctx, c.conn(0), pod)
}

// pollInterval is the interval of conditions that are polled.
const pollInterval = 500 * time.Millisecond

// poll calls ready until it returns true.
func poll(ctx context.Context, ready func() (bool, error)) error {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		ok, err := ready()
		if err != nil || ok {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// settle waits until the processes are idle, and returns the memory of the server: resident bytes, and then live bytes, with stacks, after a
// garbage collection. Live bytes are the ones to compare: how much garbage is resident depends on the load before.
func (c *cluster) settle(ctx context.Context) (resident, live float64, err error) {
	if err := process.WaitQuiet(ctx, quiet, c.engine.Child, c.etcd.Child); err != nil {
		return 0, 0, err
	}
	memory, err := c.engine.Memory()
	if err != nil {
		return 0, 0, err
	}
	state, err := c.engine.State(ctx)
	return float64(memory.Resident), float64(state.Live + state.Stacks), err
}
