package etcdfeed

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// pastSource is a source with ten revisions of history, some of whose reads fail.
type pastSource struct {
	driver.Source
	oldest, replay []error // of the next calls
}

const listed = 10

func next(errs *[]error) error {
	if len(*errs) == 0 {
		return nil
	}
	err := (*errs)[0]
	*errs = (*errs)[1:]
	return err
}

func (s *pastSource) List(context.Context, string, mirror.Revision, func([]driver.KV) error) (driver.Header, error) {
	return driver.Header{ClusterID: 1, Revision: listed}, nil
}

func (s *pastSource) Oldest(context.Context, string, driver.Header, driver.ReplayBounds) (mirror.Revision, error) {
	return 1, next(&s.oldest)
}

func (s *pastSource) Replay(_ context.Context, _ string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	for rev := after.Revision + 1; rev <= through; rev++ {
		if err := deliver(driver.Batch{Through: rev, Changes: []driver.Change{change(rev, "key")}}); err != nil {
			return err
		}
		if err := next(&s.replay); err != nil {
			return err
		}
	}
	return nil
}

// TestTap_CompactionOvertakesRestore_NextAttemptIsJoined: a read of history that a compaction has
// overtaken is repeated by the mirror, and watches wait for it. After any other error no history is
// awaited.
func TestTap_CompactionOvertakesRestore_NextAttemptIsJoined(t *testing.T) {
	compacted := fmt.Errorf("read history: %w", mirror.ErrCompacted)
	other := errors.New("no connection")
	for name, tt := range map[string]struct {
		oldest, replay []error
		restored       bool
	}{
		"none":              {restored: true},
		"oldest, compacted": {oldest: []error{compacted}, restored: true},
		"replay, compacted": {replay: []error{nil, compacted}, restored: true},
		"oldest, other":     {oldest: []error{other}},
		"replay, other":     {replay: []error{nil, other}},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			tap := &tap{Source: &pastSource{oldest: tt.oldest, replay: tt.replay}, prefix: "/", log: newLog(1 << 20)}
			now, err := tap.List(ctx, "/", 0, nil)
			if err != nil {
				t.Fatal(err)
			}
			err = mirror.ErrCompacted
			for range 2 {
				if !errors.Is(err, mirror.ErrCompacted) {
					break
				}
				if st := tap.log.state(); !st.restoring() {
					t.Fatal("history is not awaited though the read is repeated")
				}
				var oldest mirror.Revision
				if oldest, err = tap.Oldest(ctx, "/", now, driver.ReplayBounds{Revisions: 100}); err == nil {
					err = tap.Replay(ctx, "/", driver.Header{ClusterID: 1, Revision: oldest}, now.Revision, func(driver.Batch) error { return nil })
				}
			}
			floor := mirror.Revision(listed)
			if tt.restored {
				floor = 1
			}
			if st := tap.log.state(); st.floor != floor || st.restoring() || (err == nil) != tt.restored {
				t.Errorf("floor %d, restoring %t (%v); want floor %d", st.floor, st.restoring(), err, floor)
			}
		})
	}
}
