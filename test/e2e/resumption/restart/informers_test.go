package restart

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// follow describes the objects of an informer. Two informers with the same resource, namespace and
// selectors have to deliver the same.
type follow struct {
	resource  string // plural
	namespace string // "" for all namespaces
	labels    string
	fields    string
	metadata  bool // only the metadata of objects
}

func (f follow) String() string {
	return fmt.Sprintf("%s in %q, labels %q, fields %q, metadata only %v", f.resource, f.namespace, f.labels, f.fields, f.metadata)
}

// selects returns f as a selection for the history.
func (f follow) selects(t testing.TB) watchcheck.Select {
	t.Helper()
	byLabels, err := labels.Parse(f.labels)
	harness.Check(t, err)
	byFields, err := fields.ParseSelector(f.fields)
	harness.Check(t, err)
	return func(key string, state any) bool {
		o := state.(*recorded.Object)
		namespace, name, _ := cache.SplitMetaNamespaceKey(key)
		return (f.namespace == "" || namespace == f.namespace) && byLabels.Matches(labels.Set(o.Labels)) &&
			byFields.Matches(fields.Set{"metadata.name": name, "metadata.namespace": namespace, "spec.nodeName": o.Node})
	}
}

// informer is a client-go informer whose requests are counted and whose events are recorded.
type informer struct {
	follow
	cache.SharedIndexInformer
	sessions recorded.Sessions
	lists    atomic.Int64 // requests for the whole state: LISTs, and watches with initial events
	watches  atomic.Int64
	gone     atomic.Int64 // answers and ERROR events with 410
	opened   atomic.Int64 // the time of the current watch's start, in ns; 0 without a watch

	mu   sync.Mutex
	errs map[string]int // answers to requests that failed
}

// clients are the clients on one connection.
type clients struct {
	typed    kubernetes.Interface
	untyped  dynamic.Interface
	metadata metadata.Interface
}

func newClients(t testing.TB, config *rest.Config) clients {
	t.Helper()
	encoded := rest.CopyConfig(config)
	encoded.ContentType = "application/vnd.kubernetes.protobuf"
	encoded.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	httpClient, err := rest.HTTPClientFor(config)
	harness.Check(t, err)
	var c clients
	c.typed, err = kubernetes.NewForConfigAndClient(encoded, httpClient)
	harness.Check(t, err)
	c.untyped, err = dynamic.NewForConfigAndClient(config, httpClient)
	harness.Check(t, err)
	c.metadata, err = metadata.NewForConfigAndClient(metadata.ConfigFor(config), httpClient)
	harness.Check(t, err)
	return c
}

// source returns the list and watch functions of f, and the kind of its objects.
func (c clients) source(f follow) (list func(context.Context, metav1.ListOptions) (runtime.Object, error),
	watches func(context.Context, metav1.ListOptions) (watch.Interface, error), kind runtime.Object) {
	resource := schema.GroupVersionResource{Version: "v1", Resource: f.resource}
	if f.resource == gizmoResource.Resource {
		resource = gizmoResource
	}
	switch {
	case f.metadata:
		r := c.metadata.Resource(resource).Namespace(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &metav1.PartialObjectMetadata{}
	case f.resource == "configmaps":
		r := c.typed.CoreV1().ConfigMaps(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &corev1.ConfigMap{}
	case f.resource == "secrets":
		r := c.typed.CoreV1().Secrets(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &corev1.Secret{}
	case f.resource == "limitranges":
		r := c.typed.CoreV1().LimitRanges(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &corev1.LimitRange{}
	case f.resource == "pods":
		r := c.typed.CoreV1().Pods(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &corev1.Pod{}
	default:
		r := c.untyped.Resource(resource).Namespace(f.namespace)
		return func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }, r.Watch, &unstructured.Unstructured{}
	}
}

// newInformer returns an informer that is not started.
func newInformer(t testing.TB, c clients, f follow) *informer {
	t.Helper()
	i := &informer{follow: f, errs: map[string]int{}}
	list, watches, kind := c.source(f)
	i.SharedIndexInformer = cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector, o.FieldSelector = f.labels, f.fields
			if o.Continue == "" {
				i.lists.Add(1)
			}
			l, err := list(ctx, o)
			i.note(ctx, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector, o.FieldSelector = f.labels, f.fields
			initial := o.SendInitialEvents != nil && *o.SendInitialEvents
			if initial {
				i.lists.Add(1)
			} else {
				i.watches.Add(1)
			}
			w, err := watches(ctx, o)
			i.note(ctx, err)
			if err != nil {
				return nil, err
			}
			after := int64(0)
			if !initial {
				if after, err = strconv.ParseInt(o.ResourceVersion, 10, 64); err != nil {
					return nil, err
				}
			}
			session := i.sessions.Begin(after)
			if initial {
				session.WithInitialEvents()
			}
			i.opened.Store(time.Now().UnixNano())
			return openWatch{session.Watch(w), i}, nil
		},
	}, kind, 0, cache.Indexers{})
	return i
}

// openWatch is a watch that an informer has not stopped yet.
type openWatch struct {
	watch.Interface
	of *informer
}

func (w openWatch) Stop() {
	w.of.opened.Store(0)
	w.Interface.Stop()
}

// settled reports whether the informer's watch is so old that its end does not make client-go
// relist, as it does after a watch of less than a second without events.
func (i *informer) settled() bool {
	opened := i.opened.Load()
	return opened != 0 && time.Since(time.Unix(0, opened)) > 1100*time.Millisecond
}

// note counts an error that answered a request.
func (i *informer) note(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	if isGone(err) {
		i.gone.Add(1)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	text := err.Error()
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		text = fmt.Sprint(status.Status().Code, " ", status.Status().Message)
	}
	i.errs[text[:min(len(text), 120)]]++
}

func isGone(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

// held returns the resource version of each object in the informer's store.
func (i *informer) held() (map[string]int64, error) {
	held := map[string]int64{}
	for _, o := range i.GetStore().List() {
		accessor, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		revision, err := strconv.ParseInt(accessor.GetResourceVersion(), 10, 64)
		if err != nil {
			return nil, err
		}
		held[cache.MetaObjectToName(accessor).String()] = revision
	}
	return held, nil
}

// differs describes the difference between the informer's store and the stored objects.
func (i *informer) differs(stored map[string]int64) error {
	held, err := i.held()
	if err != nil {
		return err
	}
	if maps.Equal(held, stored) {
		return nil
	}
	for key, revision := range stored {
		if held[key] != revision {
			return fmt.Errorf("the informer of %v holds %d objects of %d, and %s at %d instead of %d", i.follow, len(held), len(stored), key, held[key], revision)
		}
	}
	for key, revision := range held {
		if _, ok := stored[key]; !ok {
			return fmt.Errorf("the informer of %v holds %d objects instead of %d, and %s at %d, which is not stored", i.follow, len(held), len(stored), key, revision)
		}
	}
	return nil
}
