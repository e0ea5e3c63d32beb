// Package recorded records watches of an API server and the history of its etcd in the form that
// watchcheck judges.
//
// The state of a key is an *Object: the fields that selectors use. Revisions are those of etcd,
// which are the resource versions of objects.
package recorded

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
)

// Object has the fields of a stored object that selectors and tests use.
type Object struct {
	UID         string
	Labels      map[string]string
	Annotations map[string]string
	Node        string // spec.nodeName of a pod
}

func newObject(m metav1.ObjectMeta) *Object {
	return &Object{UID: string(m.UID), Labels: m.Labels, Annotations: m.Annotations}
}

// Item is a stored object.
type Item struct {
	*Object
	Revision int64 // of its last change
}

// Stored reads the objects below a prefix, and their revision. It is a quorum read.
func Stored(ctx context.Context, client *clientv3.Client, prefix string) (items map[string]Item, revision int64, err error) {
	r, err := client.Get(ctx, prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, 0, err
	}
	items = map[string]Item{}
	for _, kv := range r.Kvs {
		o, err := decode(kv.Key, kv.Value)
		if err != nil {
			return nil, 0, err
		}
		items[string(kv.Key)] = Item{o, kv.ModRevision}
	}
	return items, r.Header.Revision, nil
}

// History records all changes of a key range in etcd as they happen, so compaction does not matter.
// Its methods may be called concurrently.
type History struct {
	client *clientv3.Client
	done   chan struct{} // closed when the recording has ended

	mu struct { // leaf
		sync.Mutex
		history watchcheck.History
		err     error // the reason why it is incomplete
	}
}

// Follow records the keys below a prefix, as long as the test lasts.
func Follow(t testing.TB, ctx context.Context, client *clientv3.Client, prefix string) *History {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	t.Cleanup(cancel)
	h, err := follow(ctx, client, prefix)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		<-h.done
	})
	return h
}

// follow records the keys below a prefix until ctx ends.
func follow(ctx context.Context, client *clientv3.Client, prefix string) (*History, error) {
	h := &History{client: client, done: make(chan struct{})}
	base, revision, err := Stored(ctx, client, prefix)
	if err != nil {
		return nil, err
	}
	h.mu.history = watchcheck.History{From: revision, Through: revision, Base: map[string]any{}}
	for key, item := range base {
		h.mu.history.Base[key] = item.Object
	}
	go func() {
		defer close(h.done)
		for ctx.Err() == nil && h.Err() == nil {
			// A separate stream, so that progress requests do not affect other watches. It ends
			// when its member has lost the leader, and the next one is on another member, or starts
			// when there is a leader.
			for r := range client.Watch(clientv3.WithRequireLeader(ctx), prefix, clientv3.WithPrefix(), clientv3.WithRev(h.Through()+1)) {
				h.add(r)
			}
		}
	}()
	return h, nil
}

// Through returns the revision up to which the history is complete.
func (h *History) Through() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.history.Through
}

// Err returns the reason why the history is incomplete, if it is.
func (h *History) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.mu.err
}

// add adds a watch response. The client delivers whole revisions, in order.
func (h *History) add(r clientv3.WatchResponse) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := r.Err(); err != nil {
		if !errors.Is(err, rpctypes.ErrNoLeader) {
			h.mu.err = err
		}
		return
	}
	if len(r.Events) == 0 && r.Header.Revision < h.mu.history.Through {
		return // from a member that is behind
	}
	for _, e := range r.Events {
		c := watchcheck.Change{Revision: e.Kv.ModRevision, Key: string(e.Kv.Key)}
		if e.Type == mvccpb.PUT {
			o, err := decode(e.Kv.Key, e.Kv.Value)
			if err != nil {
				h.mu.err = err
				return
			}
			c.State = o
		}
		h.mu.history.Changes = append(h.mu.history.Changes, c)
	}
	h.mu.history.Through = r.Header.Revision
	if n := len(r.Events); n > 0 {
		// the header may be ahead of the delivered events
		h.mu.history.Through = r.Events[n-1].Kv.ModRevision
	}
}

// Now returns the history up to the current revision or later. The caller owns it, but its states
// are shared.
func (h *History) Now(ctx context.Context) (*watchcheck.History, error) {
	now, err := h.client.Get(ctx, "now", clientv3.WithCountOnly())
	if err != nil {
		return nil, err
	}
	var history watchcheck.History
	err = harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.mu.err != nil {
			return true, nil
		}
		history = h.mu.history
		if history.Through < now.Header.Revision {
			if err := h.client.RequestProgress(clientv3.WithRequireLeader(ctx)); err != nil {
				return false, err
			}
		}
		return history.Through >= now.Header.Revision, fmt.Errorf("the history is known up to %d of %d", history.Through, now.Header.Revision)
	})
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mu.err != nil {
		return nil, fmt.Errorf("record the history of etcd: %w", h.mu.err)
	}
	history.Changes = history.Changes[:len(history.Changes):len(history.Changes)]
	return &history, history.Check()
}

// decode returns the fields of a stored value that selectors use.
func decode(key, value []byte) (*Object, error) {
	var partial metav1.PartialObjectMetadata
	encoded, isProtobuf := bytes.CutPrefix(value, []byte("k8s\x00"))
	if !isProtobuf {
		if err := json.Unmarshal(value, &partial); err != nil {
			// not an object, such as the revision up to which etcd is compacted
			return &Object{}, nil
		}
		return newObject(partial.ObjectMeta), nil
	}
	var unknown runtime.Unknown
	if err := unknown.Unmarshal(encoded); err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	if strings.Contains(string(key), "/pods/") {
		var pod corev1.Pod
		if err := pod.Unmarshal(unknown.Raw); err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		o := newObject(pod.ObjectMeta)
		o.Node = pod.Spec.NodeName
		return o, nil
	}
	// All objects begin with their metadata.
	if err := partial.Unmarshal(unknown.Raw); err != nil {
		return &Object{}, nil // an allocation bitmap or similar
	}
	return newObject(partial.ObjectMeta), nil
}
