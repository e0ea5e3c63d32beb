package kubestorage

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// LoadState is how far an engine is with the load of its memory.
type LoadState struct {
	// Loading reports whether objects are being read from etcd, and Resource is the one that is
	// being read, "" before the first object. Objects of other resources, and keys that are no
	// objects, are part of the numbers.
	Loading  bool
	Resource string
	Objects  int64 // read so far
	Total    int64 // in etcd when it was first asked; 0 if it has not answered
	// Restoring reports whether history is being read from etcd, and Changes are the changes read
	// so far.
	Restoring bool
	Changes   int64
}

// countTimeout bounds the request for the number of keys in etcd, which costs etcd milliseconds for
// 100,000 keys.
const countTimeout = time.Second

// LoadState returns the state of the load, of all etcd clusters together; of the clusters that are
// being loaded, the resource is that of one. The first call asks each etcd for the number of its
// keys, and takes a second at most for each.
func (e *Engine) LoadState(ctx context.Context) (state LoadState) {
	e.mu.Lock()
	clusters := slices.Collect(maps.Values(e.clusters))
	e.mu.Unlock()
	totalKnown := true
	for _, c := range clusters {
		if c.mirror == nil {
			continue
		}
		total := c.totalKeys(ctx)
		p := c.mirror.LoadState()
		state.Objects += p.Listed
		state.Total += total
		totalKnown = totalKnown && total > 0
		if p.Loading {
			state.Loading, state.Resource = true, c.resourceOf(p.Position)
		}
		state.Restoring = state.Restoring || p.Restoring
		state.Changes += p.Restored
	}
	if !totalKnown || state.Total < state.Objects {
		state.Total = 0
	}
	return state
}

// totalKeys returns the number of keys in etcd at the first successful call, 0 if etcd does not
// answer.
func (c *cluster) totalKeys(ctx context.Context) int64 {
	if total := c.total.Load(); total > 0 {
		return total
	}
	ctx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	response, err := c.client.Client.Get(ctx, c.prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err != nil {
		return 0
	}
	c.total.Store(response.Count)
	return response.Count
}

// resourceOf returns the name of the resource of a key, such as pods or leases.coordination.k8s.io;
// of a resource without a storage, the first part of the key.
func (c *cluster) resourceOf(key string) string {
	key = strings.TrimPrefix(key, c.prefix)
	for name := key; name != ""; {
		i := strings.LastIndexByte(name, '/')
		if i < 0 {
			break
		}
		name = name[:i]
		if resource, ok := c.resources.Load(name); ok {
			return resource.(string)
		}
	}
	first, _, _ := strings.Cut(key, "/")
	return first
}
