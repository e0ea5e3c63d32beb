// Package informer runs informers of client-go whose requests are counted, and compares their
// stores and all their events with etcd.
package informer

import (
	"context"
	"errors"
	"fmt"
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

// Follow describes the objects of an informer. Two informers with the same resource, namespace and
// selectors have to deliver the same.
type Follow struct {
	schema.GroupVersionResource
	Namespace string // "" for all namespaces
	Labels    string
	Fields    string
	Metadata  bool // only the metadata of objects
}

// Core returns a resource of the core group.
func Core(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Version: "v1", Resource: resource}
}

func (f Follow) String() string {
	return fmt.Sprintf("%s in %q, labels %q, fields %q, metadata only %v", f.Resource, f.Namespace, f.Labels, f.Fields, f.Metadata)
}

// Prefix is that of the resource's keys in etcd.
func (f Follow) Prefix() string {
	if f.Group != "" {
		return "/registry/" + f.Group + "/" + f.Resource + "/"
	}
	return "/registry/" + f.Resource + "/"
}

// Selects returns f as a selection for the history.
func (f Follow) Selects(t testing.TB) watchcheck.Select {
	t.Helper()
	byLabels, err := labels.Parse(f.Labels)
	harness.Check(t, err)
	byFields, err := fields.ParseSelector(f.Fields)
	harness.Check(t, err)
	return func(key string, state any) bool {
		o := state.(*recorded.Object)
		namespace, name, _ := cache.SplitMetaNamespaceKey(key)
		return (f.Namespace == "" || namespace == f.Namespace) && byLabels.Matches(labels.Set(o.Labels)) &&
			byFields.Matches(fields.Set{"metadata.name": name, "metadata.namespace": namespace, "spec.nodeName": o.Node})
	}
}

// Clients are the clients on one connection.
type Clients struct {
	core     rest.Interface // in protobuf
	untyped  dynamic.Interface
	metadata metadata.Interface
}

// NewClients returns clients of a server.
func NewClients(t testing.TB, config *rest.Config) Clients {
	t.Helper()
	encoded := rest.CopyConfig(config)
	encoded.ContentType = runtime.ContentTypeProtobuf
	encoded.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	httpClient, err := rest.HTTPClientFor(config)
	harness.Check(t, err)
	typed, err := kubernetes.NewForConfigAndClient(encoded, httpClient)
	harness.Check(t, err)
	c := Clients{core: typed.CoreV1().RESTClient()}
	c.untyped, err = dynamic.NewForConfigAndClient(config, httpClient)
	harness.Check(t, err)
	c.metadata, err = metadata.NewForConfigAndClient(metadata.ConfigFor(config), httpClient)
	harness.Check(t, err)
	return c
}

// source returns the requests of f, and the kind of its objects.
func (c Clients) source(f Follow) (*cache.ListWatch, runtime.Object) {
	kinds := map[string]runtime.Object{
		"configmaps": &corev1.ConfigMap{}, "limitranges": &corev1.LimitRange{}, "pods": &corev1.Pod{}, "secrets": &corev1.Secret{},
	}
	switch kind := kinds[f.Resource]; {
	case f.Metadata:
		r := c.metadata.Resource(f.GroupVersionResource).Namespace(f.Namespace)
		return &cache.ListWatch{
			ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) },
			WatchFuncWithContext: r.Watch,
		}, &metav1.PartialObjectMetadata{}
	case f.Group == "" && kind != nil:
		return cache.NewFilteredListWatchFromClient(c.core, f.Resource, f.Namespace, func(*metav1.ListOptions) {}), kind
	default:
		r := c.untyped.Resource(f.GroupVersionResource).Namespace(f.Namespace)
		return &cache.ListWatch{
			ListWithContextFunc:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) },
			WatchFuncWithContext: r.Watch,
		}, &unstructured.Unstructured{}
	}
}

// Informer is an informer whose requests are counted and whose events are recorded.
type Informer struct {
	Follow
	cache.SharedIndexInformer
	sessions recorded.Sessions
	lists    atomic.Int64 // requests for the whole state: LISTs, and watches with initial events
	gone     atomic.Int64 // requests with the answer 410
	broken   atomic.Int64 // requests without an answer; client-go relists after such a watch
	opened   atomic.Int64 // the time of the current watch's start, in ns; 0 without a watch

	mu   sync.Mutex     // leaf
	errs map[string]int // of requests
}

// New returns an informer that is not started.
func New(c Clients, f Follow) *Informer {
	i := &Informer{Follow: f, errs: map[string]int{}}
	source, kind := c.source(f)
	i.SharedIndexInformer = cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector, o.FieldSelector = f.Labels, f.Fields
			if o.Continue == "" {
				i.lists.Add(1)
			}
			l, err := source.ListWithContext(ctx, o)
			i.note(ctx, err)
			return l, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector, o.FieldSelector = f.Labels, f.Fields
			after, initial := int64(0), o.SendInitialEvents != nil && *o.SendInitialEvents
			if initial {
				i.lists.Add(1)
			} else {
				var err error
				if after, err = strconv.ParseInt(o.ResourceVersion, 10, 64); err != nil {
					return nil, err
				}
			}
			w, err := source.WatchWithContext(ctx, o)
			if i.note(ctx, err); err != nil {
				return nil, err
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
	of *Informer
}

func (w openWatch) Stop() {
	w.of.opened.Store(0)
	w.Interface.Stop()
}

// note counts a request that failed.
func (i *Informer) note(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	text := err.Error()
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		text = fmt.Sprint(status.Status().Code, " ", status.Status().Message)
	}
	if isGone(err) {
		i.gone.Add(1)
	} else if apierrors.ReasonForError(err) == metav1.StatusReasonUnknown {
		i.broken.Add(1)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.errs[text[:min(len(text), 120)]]++
}

func isGone(err error) bool { return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) }

// Counts are the counts of an informer's requests and errors.
type Counts struct {
	Lists  int // requests for the whole state: LISTs, and watches with initial events
	Gone   int // answers and ERROR events with 410
	Broken int // requests without an answer
}

// Since returns the counts since earlier ones.
func (c Counts) Since(before Counts) Counts {
	return Counts{c.Lists - before.Lists, c.Gone - before.Gone, c.Broken - before.Broken}
}

// Counts returns the counts since the informer was started.
func (i *Informer) Counts() Counts {
	c := Counts{Lists: int(i.lists.Load()), Gone: int(i.gone.Load()), Broken: int(i.broken.Load())}
	for _, err := range i.sessions.Errors() {
		if isGone(err) {
			c.Gone++
		}
	}
	return c
}

// differs describes the difference between the informer's store and the stored objects.
func (i *Informer) differs(stored map[string]int64) error {
	held := map[string]int64{}
	for _, o := range i.GetStore().List() {
		accessor, err := meta.Accessor(o)
		if err != nil {
			return err
		}
		key := cache.MetaObjectToName(accessor).String()
		if held[key], err = strconv.ParseInt(accessor.GetResourceVersion(), 10, 64); err != nil {
			return err
		}
	}
	for key, revision := range stored {
		if held[key] != revision {
			return fmt.Errorf("the informer of %v holds %d objects of %d, and %s at %d instead of %d", i.Follow, len(held), len(stored), key, held[key], revision)
		}
	}
	for key, revision := range held {
		if _, ok := stored[key]; !ok {
			return fmt.Errorf("the informer of %v holds %d objects instead of %d, and %s at %d, which is not stored", i.Follow, len(held), len(stored), key, revision)
		}
	}
	return nil
}
