package kubestorage

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/etcdmoves"
)

// moves has the marks of the resources of a cluster that are being moved, or were, to another etcd. It follows them by a watch.
type moves struct {
	client *clientv3.Client
	prefix string                                    // of the marks
	marks  atomic.Pointer[map[string]etcdmoves.Mark] // nil until they have been read
}

const (
	// firstMarks bounds the first read of marks, which delays the start of a cluster, and the first writes if it failed.
	firstMarks = time.Second
	// marksRetry is the pause after a failed read or watch of marks; a guess.
	marksRetry = time.Second
)

func newMoves(client *clientv3.Client, prefix string) *moves {
	return &moves{client: client, prefix: etcdmoves.Prefix(prefix)}
}

// read returns the marks in etcd, and their revision.
func (m *moves) read(ctx context.Context) (marks *map[string]etcdmoves.Mark, revision int64, err error) {
	r, err := m.client.Get(ctx, m.prefix, clientv3.WithPrefix())
	if err != nil {
		return nil, 0, err
	}
	marks = &map[string]etcdmoves.Mark{}
	for _, kv := range r.Kvs {
		m.set(*marks, kv)
	}
	return marks, r.Header.Revision, nil
}

// load reads the marks, and returns their revision, 0 after an error.
func (m *moves) load(ctx context.Context) (revision int64) {
	marks, revision, err := m.read(ctx)
	if err != nil {
		return 0
	}
	m.marks.Store(marks)
	return revision
}

// current returns the marks, which it reads if they have not been read yet. Error: etcd does not answer.
func (m *moves) current(ctx context.Context) (map[string]etcdmoves.Mark, error) {
	if marks := m.marks.Load(); marks != nil {
		return *marks, nil
	}
	ctx, cancel := context.WithTimeout(ctx, firstMarks)
	defer cancel()
	marks, _, err := m.read(ctx)
	if err != nil {
		return nil, err
	}
	m.marks.CompareAndSwap(nil, marks) // follow may have newer ones
	return *m.marks.Load(), nil
}

// set adds a mark. An unreadable one, of a later release, refuses writes.
func (m *moves) set(marks map[string]etcdmoves.Mark, kv *mvccpb.KeyValue) {
	mark, err := etcdmoves.Parse(kv.Value)
	if err != nil {
		mark = etcdmoves.Mark{State: etcdmoves.Moving}
	}
	marks[strings.TrimPrefix(string(kv.Key), m.prefix)] = mark
}

// follow updates the marks until ctx ends. They are those of the revision, or were not read if it is 0.
func (m *moves) follow(ctx context.Context, revision int64) {
	for ctx.Err() == nil {
		if revision != 0 {
			m.watch(ctx, revision)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(marksRetry):
		}
		revision = m.load(ctx)
	}
}

// watch applies the changes after a revision until the watch ends.
func (m *moves) watch(ctx context.Context, revision int64) {
	ctx, cancel := context.WithCancel(clientv3.WithRequireLeader(ctx)) // a member without a leader ends the watch
	defer cancel()
	for r := range m.client.Watch(ctx, m.prefix, clientv3.WithPrefix(), clientv3.WithRev(revision+1)) {
		if r.Err() != nil {
			return
		}
		marks := maps.Clone(*m.marks.Load())
		for _, ev := range r.Events {
			if ev.Type == clientv3.EventTypeDelete {
				delete(marks, strings.TrimPrefix(string(ev.Kv.Key), m.prefix))
			} else {
				m.set(marks, ev.Kv)
			}
		}
		m.marks.Store(&marks)
	}
}

// check returns the error of a write of the resource at a path, nil if it is not being moved: 503. Without marks no write is accepted.
func (m *moves) check(ctx context.Context, path, resource string) error {
	marks, err := m.current(ctx)
	if err != nil {
		return apierrors.NewServiceUnavailable(fmt.Sprintf("the marks of moved resources, such as %s, cannot be read from etcd: %v; the request can be retried", resource, err))
	}
	mark, ok := marks[path]
	if !ok || !mark.Refuses() {
		return nil
	}
	to := strings.Join(mark.Servers, ";")
	switch mark.State {
	case etcdmoves.Moving:
		return apierrors.NewServiceUnavailable(fmt.Sprintf("%s is being moved to the etcd at %s; the request can be retried", resource, to))
	case etcdmoves.Incoming:
		return apierrors.NewServiceUnavailable(fmt.Sprintf("%s is being moved from the etcd at %s to the etcd of this server; the request can be retried", resource, to))
	}
	return apierrors.NewServiceUnavailable(fmt.Sprintf("%s was moved to the etcd at %s; restart this server with an override of --etcd-servers-overrides for it", resource, to))
}

// movable is upstream's storage of a resource, whose writes are refused while the resource is marked as moving or moved.
type movable struct {
	storage.Interface
	moves    *moves
	path     string // of the resource below the prefix of all keys, without slashes at its ends
	resource string
}

func (s movable) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	if err := s.moves.check(ctx, s.path, s.resource); err != nil {
		return err
	}
	return s.Interface.Create(ctx, key, obj, out, ttl)
}

func (s movable) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validateDeletion storage.ValidateObjectFunc, cached runtime.Object, opts storage.DeleteOptions) error {
	if err := s.moves.check(ctx, s.path, s.resource); err != nil {
		return err
	}
	validated := func(ctx context.Context, obj runtime.Object) error { // admission runs in it, for as long as a webhook takes
		if err := validateDeletion(ctx, obj); err != nil {
			return err
		}
		return s.moves.check(ctx, s.path, s.resource)
	}
	return s.Interface.Delete(ctx, key, out, preconditions, validated, cached, opts)
}

func (s movable) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, cached runtime.Object) error {
	if err := s.moves.check(ctx, s.path, s.resource); err != nil {
		return err
	}
	updated := func(obj runtime.Object, meta storage.ResponseMeta) (runtime.Object, *uint64, error) { // admission runs in it, too
		changed, ttl, err := tryUpdate(obj, meta)
		if err == nil {
			err = s.moves.check(ctx, s.path, s.resource)
		}
		return changed, ttl, err
	}
	return s.Interface.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, updated, cached)
}
