package clients

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/kube/watchprogress"
	"github.com/stratakube/strata/server/test/internal/harness"
)

// consistentCache is a cache of the ConfigMaps of a namespace, fed by a reflector of client-go, that can be read consistently.
type consistentCache struct {
	store  cache.Store
	cache  *watchprogress.Cache
	reader *watchprogress.Reader
}

// startCache returns when the cache has its first list. It is fed until ctx ends.
func startCache(t *testing.T, ctx context.Context, config *rest.Config, namespace string) *consistentCache {
	t.Helper()
	client := harness.Must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
	c := &consistentCache{store: cache.NewStore(cache.MetaNamespaceKeyFunc)}
	c.cache = watchprogress.NewCache(c.store)
	c.reader = watchprogress.NewReader(c.cache, client.CoreV1().RESTClient(), "/api/v1/namespaces/"+namespace+"/configmaps")
	maps := client.CoreV1().ConfigMaps(namespace)
	lists := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return maps.List(ctx, o) },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return maps.Watch(ctx, o)
		},
	}
	reflector := cache.NewReflectorWithOptions(lists, &corev1.ConfigMap{}, c.cache, cache.ReflectorOptions{})
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		reflector.RunWithContext(ctx)
	}()
	t.Cleanup(func() { cancel(); <-done })
	harness.Check(t, c.cache.Wait(ctx, 1))
	return c
}

// register is one ConfigMap, which one writer changes: write n stores n, or deletes the object if n is a multiple of deleteEvery.
type register struct {
	name           string
	started, acked atomic.Int64 // the newest write
}

const deleteEvery = 5

// write writes the next value.
func (r *register) write(ctx context.Context, api *harness.API, collection string) error {
	n := r.started.Add(1)
	path := collection + "/" + r.name
	body := object{"metadata": object{"name": r.name}, "data": object{"n": strconv.FormatInt(n, 10)}}
	var err error
	switch {
	case n%deleteEvery == 0:
		err = api.Delete(ctx, path)
	case n%deleteEvery == 1:
		_, err = api.Create(ctx, collection, body)
	default:
		_, err = api.Update(ctx, path, body)
	}
	if err == nil {
		r.acked.Store(n)
	}
	return err
}

// judge returns an error unless the value, 0 for no object, is that of a write between least and most, and the write that it may be of.
func judge(value, least, most int64) (int64, error) {
	for n := least; n <= most; n++ {
		if n == value || value == 0 && n%deleteEvery == 0 {
			return n, nil
		}
	}
	return 0, fmt.Errorf("read %d while the acknowledged writes were %d to %d", value, least, most)
}

// read reads a register from the store.
func (c *consistentCache) read(namespace, name string) (int64, error) {
	o, exists, err := c.store.GetByKey(namespace + "/" + name)
	if err != nil || !exists {
		return 0, err
	}
	return strconv.ParseInt(o.(*corev1.ConfigMap).Data["n"], 10, 64)
}

// TestWatchProgress_ReadsOfCache_AreLinearizable: a cache of client-go is read while its objects are written, after a request for
// bookmarks. Each read has every write that was acknowledged before it began, none that had not begun when it ended, and is not older than
// an earlier read.
func TestWatchProgress_ReadsOfCache_AreLinearizable(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := withProgress()
	api := s.API()
	const namespace = "registers"
	harness.Namespace(t, ctx, api, namespace)
	c := startCache(t, ctx, s.Config, namespace)
	collection := "/api/v1/namespaces/" + namespace + "/configmaps"

	const writers, readers = 4, 4
	reads := harness.Pick[int64](500, 20_000)
	registers := make([]*register, writers)
	writing, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	for i := range registers {
		r := &register{name: fmt.Sprint("r", i)}
		registers[i] = r
		group.Go(func() error {
			for writing.Err() == nil {
				if err := r.write(writing, api, collection); err != nil && writing.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	var reading errgroup.Group
	var count, fresh atomic.Int64
	for range readers {
		reading.Go(func() error {
			floor := make([]int64, writers) // the newest write that an earlier read of this reader has shown
			for count.Add(1) <= reads {
				least := make([]int64, writers)
				for i, r := range registers {
					least[i] = max(floor[i], r.acked.Load())
				}
				if _, err := c.reader.Wait(ctx); err != nil {
					return err
				}
				for i, r := range registers {
					value, err := c.read(namespace, r.name)
					if err != nil {
						return err
					}
					if value == 0 && least[i] == 0 {
						continue // it may not exist yet
					}
					if floor[i], err = judge(value, least[i], r.started.Load()); err != nil {
						return fmt.Errorf("%s: %w; the cache is at %d", r.name, err, c.cache.Revision())
					}
					fresh.Add(1)
				}
			}
			return nil
		})
	}
	harness.Check(t, reading.Wait())
	cancel()
	harness.Check(t, group.Wait())
	if fresh.Load() == 0 {
		t.Error("no read found a write")
	}
}

// TestWatchProgress_QuietCollection_IsReadConsistentlyAtOnce: writes elsewhere bring no events to a watch; the request does not wait for
// the bookmark of the next minute.
func TestWatchProgress_QuietCollection_IsReadConsistentlyAtOnce(t *testing.T) {
	harness.OnlyStrata(t)
	s := withProgress()
	api := s.API()
	ctx := harness.Context(t, 40*time.Second) // bookmarks come after 60 s
	requested := func() float64 {
		return harness.Must[float64](t)(api.Sum(ctx, "strata_watch_bookmarks_requested_total", `resource="configmaps"`))
	}
	harness.Namespace(t, ctx, api, "quiet")
	harness.Namespace(t, ctx, api, "busy")
	c := startCache(t, ctx, s.Config, "quiet")
	before := requested()
	for i := range 20 {
		written := harness.Must[harness.Object](t)(api.Create(ctx, "/api/v1/namespaces/busy/secrets", object{"metadata": object{"name": fmt.Sprint("s", i)}}))
		got, err := c.reader.Wait(ctx)
		harness.Check(t, err)
		if least := harness.Revision(t, written.Metadata.ResourceVersion); got < least || c.cache.Revision() < got {
			t.Errorf("the answer is %d and the cache at %d, want at least %d", got, c.cache.Revision(), least)
		}
	}
	if n := requested() - before; n != 20 {
		t.Errorf("%g bookmarks were requested, want 20: one for each revision", n)
	}
}

// TestWatchProgress_Request_NeedsRightsAndGate: the form needs the rights of the list, concerns the user's own watches only, and is not
// acceptable without the gate.
func TestWatchProgress_Request_NeedsRightsAndGate(t *testing.T) {
	harness.OnlyStrata(t)
	s := withProgress()
	ctx := harness.Context(t, time.Minute)
	harness.Namespace(t, ctx, s.API(), "ns")
	const path = "/api/v1/namespaces/ns/configmaps"
	request := func(s *harness.Server, user string) (watchprogress.WatchProgress, error) {
		config := rest.CopyConfig(s.Config)
		config.Impersonate.UserName = user
		client := harness.Must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
		return watchprogress.Request(ctx, client.RESTClient(), path)
	}
	startCache(t, ctx, s.Config, "ns")
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		p, err := request(s, "")
		return p.Watches == 1, err
	}))
	if _, err := request(s, "stranger"); !apierrors.IsForbidden(err) {
		t.Errorf("a user without rights: %v, want 403", err)
	}
	harness.Must[harness.Object](t)(s.API().Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", object{
		"metadata": object{"name": "reader"}, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "reader"}},
	}))
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		p, err := request(s, "reader")
		if err == nil && p.Watches != 0 {
			err = errors.New("the request of another user reached the watch")
			t.Error(err)
		}
		return err == nil, err
	}))
	var status apierrors.APIStatus
	if _, err := request(cluster, ""); !errors.As(err, &status) || status.Status().Code != http.StatusNotAcceptable {
		t.Errorf("without the gate: %v, want 406", err)
	}
}
