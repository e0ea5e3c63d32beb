package kubestorage

import (
	"context"
	"sync"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// valve blocks its callers while it is shut. The zero value is open.
type valve struct {
	mu     sync.Mutex
	opened chan struct{} // closed when the valve is opened again; nil while it is open
}

func (v *valve) shut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.opened == nil {
		v.opened = make(chan struct{})
	}
}

func (v *valve) open() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.opened != nil {
		close(v.opened)
		v.opened = nil
	}
}

func (v *valve) pass(ctx context.Context) error {
	v.mu.Lock()
	opened := v.opened
	v.mu.Unlock()
	if opened == nil {
		return nil
	}
	select {
	case <-opened:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// stallable is a source whose lists, feed and revision a test can block.
type stallable struct {
	driver.Source
	lists, feed, revision valve
}

// through makes setup use s between etcd and the mirror.
func (s *stallable) through(o *options) {
	o.source = func(etcd driver.Source) driver.Source {
		s.Source = etcd
		return s
	}
}

func (s *stallable) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	if err := s.lists.pass(ctx); err != nil {
		return driver.Header{}, err
	}
	return s.Source.List(ctx, prefix, at, page)
}

func (s *stallable) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	return s.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if err := s.feed.pass(ctx); err != nil {
			return err
		}
		return deliver(b)
	})
}

func (s *stallable) ReadRevision(ctx context.Context) (driver.Header, error) {
	if err := s.revision.pass(ctx); err != nil {
		return driver.Header{}, err
	}
	return s.Source.ReadRevision(ctx)
}
