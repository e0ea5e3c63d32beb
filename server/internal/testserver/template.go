package testserver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/util/wait"
)

// template has the keys and values of a new control plane: namespaces, roles, priority classes, API
// services. They are the same for all control planes with the same flags. Writing them is half of a
// start, so later control planes begin with a copy.
type template map[string]string // values by key without the prefix

// templateOps is the number of writes of a transaction; etcd permits 128.
const templateOps = 128

// ownedByServer are the prefixes of keys that belong to one server: its identity.
var ownedByServer = []string{"/leases/", "/masterleases/", "/peerserverleases/"}

// firstObjects are the keys of objects that the server creates in the background after it is ready,
// and that clients rely on. The service is the last one.
var firstObjects = []string{
	"/namespaces/kube-system", "/namespaces/kube-public", "/namespaces/kube-node-lease", "/namespaces/default", "/services/specs/default/kubernetes",
}

const (
	// firstObjectsTimeout bounds the wait for firstObjects; they take some 10 ms. Flags may turn
	// them off.
	firstObjectsTimeout = 5 * time.Second
	pollInterval        = 5 * time.Millisecond
)

// awaitFirstObjects returns when the firstObjects exist or the timeout has expired. The error is
// that of etcd or of ctx.
func (h *host) awaitFirstObjects(ctx context.Context, p *controlPlane) error {
	err := wait.PollUntilContextTimeout(ctx, pollInterval, firstObjectsTimeout, true, func(ctx context.Context) (bool, error) {
		for _, key := range firstObjects {
			response, err := h.client.Get(ctx, p.prefix()+key, clientv3.WithCountOnly())
			if err != nil || response.Count == 0 {
				return false, err
			}
		}
		return true, nil
	})
	if ctx.Err() == nil && wait.Interrupted(err) {
		return nil
	}
	return err
}

// keepTemplate copies the objects of p, which has no client yet, unless there is a template with
// its flags.
func (h *host) keepTemplate(ctx context.Context, p *controlPlane) error {
	h.mu.Lock()
	has := h.copied[p.api()] != nil
	h.mu.Unlock()
	if has {
		return nil
	}
	response, err := h.client.Get(ctx, p.prefix()+"/", clientv3.WithPrefix())
	if err != nil {
		return fmt.Errorf("copy the objects of %s: %w", p.name, err)
	}
	t := template{}
	for _, kv := range response.Kvs {
		key := strings.TrimPrefix(string(kv.Key), p.prefix())
		if !slices.ContainsFunc(ownedByServer, func(owned string) bool { return strings.HasPrefix(key, owned) }) {
			t[key] = string(kv.Value)
		}
	}
	h.mu.Lock()
	h.copied[p.api()] = t
	h.mu.Unlock()
	return nil
}

// applyTemplate writes the objects of the template with the flags of p, if there is one.
func (h *host) applyTemplate(ctx context.Context, p *controlPlane) error {
	h.mu.Lock()
	t := h.copied[p.api()]
	h.mu.Unlock()
	for keys := range slices.Chunk(slices.Sorted(maps.Keys(t)), templateOps) {
		var puts []clientv3.Op
		for _, key := range keys {
			puts = append(puts, clientv3.OpPut(p.prefix()+key, t[key]))
		}
		if _, err := h.client.Txn(ctx).Then(puts...).Commit(); err != nil {
			return fmt.Errorf("write the first objects of %s: %w", p.name, err)
		}
	}
	return nil
}
