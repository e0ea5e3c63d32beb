package etcdsource

import (
	"context"

	"github.com/stratakube/strata/mirror"
)

// Oldest implements mirror.Source.
func (s *Source) Oldest(_ context.Context, _ string, now mirror.Header, _ mirror.ReplayBounds) (mirror.Revision, error) {
	return now.Revision, nil
}

// Replay implements mirror.Source.
func (s *Source) Replay(context.Context, string, mirror.Header, mirror.Revision, func(mirror.Batch) error) error {
	return nil
}
