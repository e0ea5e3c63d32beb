package watchprogress

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/tools/cache"
)

// Cache is a cache.ReflectorStore that passes everything on to a store, and knows the revision that the store has reached. Give it to
// cache.NewReflectorWithOptions, and read the store. Safe for concurrent use if the store is.
type Cache struct {
	cache.ReflectorStore

	mu       sync.Mutex // leaf
	revision int64
	changed  chan struct{} // closed when revision grows; nil if there are no waits
}

// NewCache returns a Cache that feeds store.
func NewCache(store cache.ReflectorStore) *Cache { return &Cache{ReflectorStore: store} }

// Add implements cache.ReflectorStore.
func (c *Cache) Add(obj any) error { return c.apply(obj, c.ReflectorStore.Add) }

// Update implements cache.ReflectorStore.
func (c *Cache) Update(obj any) error { return c.apply(obj, c.ReflectorStore.Update) }

// Delete implements cache.ReflectorStore.
func (c *Cache) Delete(obj any) error { return c.apply(obj, c.ReflectorStore.Delete) }

// Replace implements cache.ReflectorStore.
func (c *Cache) Replace(objs []any, resourceVersion string) error {
	if err := c.ReflectorStore.Replace(objs, resourceVersion); err != nil {
		return err
	}
	return c.reach(resourceVersion)
}

// Bookmark implements cache.ReflectorBookmarkStore.
func (c *Cache) Bookmark(resourceVersion string) error {
	if next, ok := c.ReflectorStore.(cache.ReflectorBookmarkStore); ok {
		if err := next.Bookmark(resourceVersion); err != nil {
			return err
		}
	}
	return c.reach(resourceVersion)
}

// apply applies an event to the store. An API server writes one object in a transaction, so the event is the whole of its revision.
func (c *Cache) apply(obj any, to func(any) error) error {
	if err := to(obj); err != nil {
		return err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return fmt.Errorf("resource version of %T: %w", obj, err)
	}
	return c.reach(m.GetResourceVersion())
}

// reach records that the store has a revision, and wakes the waits.
func (c *Cache) reach(resourceVersion string) error {
	revision, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil {
		return fmt.Errorf("resource version %q is not a number: %w", resourceVersion, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if revision <= c.revision {
		return nil
	}
	c.revision = revision
	if c.changed != nil {
		close(c.changed)
		c.changed = nil
	}
	return nil
}

// Revision returns the revision that the store has reached, 0 before the first list.
func (c *Cache) Revision() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.revision
}

// Wait returns when the store has reached the revision, or with the cause of ctx's end.
func (c *Cache) Wait(ctx context.Context, revision int64) error {
	for {
		c.mu.Lock()
		if c.revision >= revision {
			c.mu.Unlock()
			return nil
		}
		if c.changed == nil {
			c.changed = make(chan struct{})
		}
		changed := c.changed
		c.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
