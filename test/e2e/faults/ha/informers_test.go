package ha

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

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

const (
	informersPerClient = 5 // that share a connection, like those of one controller
	shards             = 20
	equalWithin        = time.Minute
)

// follow describes the objects of an informer.
type follow struct{ resource, labels string }

// follows are the objects of the informers, in turns: a resource with many changes, whole and in
// part, and a resource without any.
func follows(i int) follow {
	shard := fmt.Sprint("shard=", i%shards)
	return [...]follow{{configMaps, ""}, {configMaps, shard}, {configMaps, shard}, {secrets, ""}, {secrets, shard}}[i%5]
}

func (f follow) selects(t *testing.T) watchcheck.Select {
	t.Helper()
	selector, err := labels.Parse(f.labels)
	harness.Check(t, err)
	return func(_ string, state any) bool { return selector.Matches(labels.Set(state.(*recorded.Object).Labels)) }
}

func (f follow) prefix() string { return "/registry/" + f.resource + "/" }

// informer is a client-go informer of metadata whose requests are counted and whose events are
// recorded.
type informer struct {
	follow
	cache.SharedIndexInformer
	sessions recorded.Sessions
	lists    atomic.Int64 // requests for the whole state: LISTs, and watches with initial events
	watches  atomic.Int64
	before   int64 // lists when all informers had synced

	mu      sync.Mutex // leaf
	errs    map[string]int
	watched time.Time // when the newest watch began
}

func newInformer(client metadata.Interface, f follow) *informer {
	i := &informer{follow: f, errs: map[string]int{}}
	resource := client.Resource(schema.GroupVersionResource{Version: "v1", Resource: f.resource})
	i.SharedIndexInformer = cache.NewSharedIndexInformer(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = f.labels
			i.lists.Add(1)
			list, err := resource.List(ctx, o)
			i.note(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = f.labels
			after, initial := int64(0), o.SendInitialEvents != nil && *o.SendInitialEvents
			if initial {
				i.lists.Add(1)
			} else {
				i.watches.Add(1)
				var err error
				if after, err = strconv.ParseInt(o.ResourceVersion, 10, 64); err != nil {
					return nil, err
				}
			}
			w, err := resource.Watch(ctx, o)
			if i.note(err); err != nil {
				return nil, err
			}
			i.mu.Lock()
			i.watched = time.Now()
			i.mu.Unlock()
			session := i.sessions.Begin(after)
			if initial {
				session.WithInitialEvents()
			}
			return session.Watch(w), nil
		},
	}, &metav1.PartialObjectMetadata{}, 0, cache.Indexers{})
	return i
}

// note counts a request that failed.
func (i *informer) note(err error) {
	if err == nil {
		return
	}
	text := "no answer"
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		text = fmt.Sprint(status.Status().Code, " ", status.Status().Reason)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.errs[text]++
}

// held returns the resource version of each object in the informer's store.
func (i *informer) held() (map[string]int64, error) {
	held := map[string]int64{}
	for _, o := range i.GetStore().List() {
		accessor, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		if held[cache.MetaObjectToName(accessor).String()], err = strconv.ParseInt(accessor.GetResourceVersion(), 10, 64); err != nil {
			return nil, err
		}
	}
	return held, nil
}

// fleet is all informers of a test, half of them at each balancer.
type fleet []*informer

// startFleet starts n informers and returns when all have synced.
func (s *scene) startFleet(t *testing.T, ctx context.Context, n int) fleet {
	t.Helper()
	var all fleet
	var client metadata.Interface
	for i := range n {
		if i%informersPerClient == 0 {
			config := s.servers
			if i/informersPerClient%2 == 1 {
				config = s.replicas
			}
			var err error
			client, err = metadata.NewForConfig(metadata.ConfigFor(harness.OwnConnections(config)))
			harness.Check(t, err)
		}
		all = append(all, newInformer(client, follows(i)))
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	for _, i := range all {
		running.Go(func() { i.RunWithContext(ctx) })
	}
	for _, i := range all {
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return i.HasSynced(), fmt.Errorf("the informer of %v has not synced: %v", i.follow, i.errs)
		}))
		i.before = i.lists.Load()
	}
	return all
}

// awaitSteady returns when no informer relists if its watch ends: client-go relists after a watch
// of less than a second without events.
func (f fleet) awaitSteady(t *testing.T, ctx context.Context) {
	t.Helper()
	const old = 1500 * time.Millisecond
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for _, i := range f {
			i.mu.Lock()
			age := time.Since(i.watched)
			i.mu.Unlock()
			if age < old {
				return false, fmt.Errorf("the watch of the informer of %v is %v old", i.follow, age)
			}
		}
		return true, nil
	}))
}

// relisted returns the number of lists since the informers had synced, and the errors of requests.
func (f fleet) relisted() (lists int64, errs map[string]int) {
	errs = map[string]int{}
	for _, i := range f {
		lists += i.lists.Load() - i.before
		i.mu.Lock()
		for text, n := range i.errs {
			errs[text] += n
		}
		i.mu.Unlock()
		for _, err := range i.sessions.Errors() {
			errs["in a watch: "+err.Error()]++
		}
	}
	return lists, errs
}

// awaitEqual returns when every informer's store equals etcd.
func (s *scene) awaitEqual(t *testing.T, ctx context.Context, f fleet) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, equalWithin, errors.New("informers differ from etcd"))
	defer cancel()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		stored := map[string]map[string]recorded.Item{}
		for _, i := range f {
			if stored[i.resource] == nil {
				items, _, err := recorded.Stored(ctx, s.etcd, i.prefix())
				if err != nil {
					return false, err
				}
				stored[i.resource] = items
			}
			want, selects := map[string]int64{}, i.selects(t)
			for key, item := range stored[i.resource] {
				if key = key[len(i.prefix()):]; selects(key, item.Object) {
					want[key] = item.Revision
				}
			}
			held, err := i.held()
			if err != nil {
				return false, err
			}
			if !maps.Equal(held, want) {
				return false, fmt.Errorf("the informer of %v holds %d objects, want the %d of etcd", i.follow, len(held), len(want))
			}
		}
		return true, nil
	}))
}

// validate checks all events of the informers against the history. Their stores are already known
// to be complete.
func (f fleet) validate(t *testing.T, ctx context.Context, h *recorded.History) {
	t.Helper()
	history, err := h.Now(ctx)
	harness.Check(t, err)
	recorded := make([][]watchcheck.Session, len(f))
	events, sessions, wrong := 0, 0, 0
	for n, i := range f {
		part := history.Under(i.prefix())
		last := part.From
		if n := len(part.Changes); n > 0 {
			last = part.Changes[n-1].Revision
		}
		recorded[n], err = i.sessions.Recorded(last)
		harness.Check(t, err)
		sessions += len(recorded[n])
		for _, session := range recorded[n] {
			events += len(session.Events)
		}
	}
	// Bookmarks of the last moment are newer than the history that the sessions had to reach.
	history, err = h.Now(ctx)
	harness.Check(t, err)
	parts := map[string]*watchcheck.History{}
	for n, i := range f {
		part := parts[i.resource]
		if part == nil {
			part = history.Under(i.prefix())
			parts[i.resource] = part
		}
		if err := part.View(i.selects(t)).Check(recorded[n]); err != nil {
			if wrong++; wrong <= 5 {
				t.Errorf("the informer of %v: %v", i.follow, err)
			}
		}
	}
	t.Logf("%d changes in etcd; %d informers received %d events in %d watches", len(history.Changes), len(f), events, sessions)
	if wrong > 0 {
		t.Errorf("%d of %d informers received wrong events", wrong, len(f))
	}
}
