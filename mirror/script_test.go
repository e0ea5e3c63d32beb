package mirror_test

import (
	"context"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// script is a source whose methods a test replaces one by one.
type script struct {
	driver.Source
	list     func(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error)
	replay   func(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error
	watch    func(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error
	progress func(ctx context.Context) error
	current  func(ctx context.Context) (driver.Header, error)
}

func (s *script) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	if s.list != nil {
		return s.list(ctx, prefix, at, page)
	}
	return s.Source.List(ctx, prefix, at, page)
}

func (s *script) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if s.replay != nil {
		return s.replay(ctx, prefix, after, through, deliver)
	}
	return s.Source.Replay(ctx, prefix, after, through, deliver)
}

func (s *script) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	if s.watch != nil {
		return s.watch(ctx, prefix, after, deliver)
	}
	return s.Source.Watch(ctx, prefix, after, deliver)
}

func (s *script) RequestProgress(ctx context.Context) error {
	if s.progress != nil {
		return s.progress(ctx)
	}
	return s.Source.RequestProgress(ctx)
}

func (s *script) ReadRevision(ctx context.Context) (driver.Header, error) {
	if s.current != nil {
		return s.current(ctx)
	}
	return s.Source.ReadRevision(ctx)
}
