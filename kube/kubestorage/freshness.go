package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// notReady is the answer to a read that has to wait until the resource is loaded
// (KEP-4568): 429 with a pause.
func (s *Store) notReady() error {
	pause := s.unready.refuse(time.Now())
	return apierrors.NewTooManyRequests(storage.ErrStorageNotReady.Error(), int(pause/time.Second))
}

// ready returns when the resource can be read: what is being loaded, with its history or
// because a custom resource is asked for the first time, mostly is there within seconds, so
// whoever asks waits for it, for freshWait at most. When that has been too short for others,
// it takes long, and those who come are refused at once, as KEP-4568 has it. Error: 429.
func (s *Store) ready(ctx context.Context) error {
	if s.resource.Ready() {
		return nil
	}
	if s.unready.lasts(time.Now()) {
		return s.notReady()
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	if err := s.resource.WaitReady(waitCtx); err != nil {
		return s.notReady()
	}
	return nil
}

// outage is a time in which reads are refused. The zero value has not begun.
type outage struct {
	mu            sync.Mutex // leaf
	began, recent time.Time  // of the first and the last refusal
}

// outageGap without a refusal ends an outage: twice the longest pause, so that those
// who keep to it belong to the same one.
const outageGap = time.Minute

// lasts reports whether readers have been refused lately.
func (o *outage) lasts(now time.Time) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.recent.IsZero() && now.Sub(o.recent) <= outageGap
}

// refuse returns when the reader should come back: in 1 s at first, in 30 s when it
// takes long.
func (o *outage) refuse(now time.Time) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now.Sub(o.recent) > outageGap {
		o.began = now
	}
	o.recent = now
	// As upstream has it: 2 s after 12 s, 30 s after a minute.
	seconds := math.Min(30, math.Exp(0.06*now.Sub(o.began).Seconds()))
	return time.Duration(seconds) * time.Second
}

// Waits for the mirror to catch up.
const (
	// freshWait bounds the wait of a read for the revision it needs, as in upstream.
	freshWait = 3 * time.Second
	// getWait bounds it for a GET of one key, which may go to etcd instead:
	// deletions, updates and leader elections read before they write.
	getWait = 250 * time.Millisecond
	// getPatience is how long a GET waits for a member of etcd before it asks again; it
	// doubles.
	getPatience = time.Second
	// answerTime is what is left of a request's own deadline, if that comes first: whoever
	// waits until then is cut off instead of told when to try again.
	answerTime = 250 * time.Millisecond
	// tooHighRetrySeconds is the pause that a client is told with 504 and 429.
	tooHighRetrySeconds = 1
)

// waitContext bounds a wait on behalf of a request.
func waitContext(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, max(left-answerTime, left/2))
	}
	return context.WithTimeout(ctx, limit)
}

// waitFor returns when rev can be read, and 504 "Too large resource version" when
// it cannot be within freshWait.
func (s *Store) waitFor(ctx context.Context, rev mirror.Revision) error {
	if s.mirror.Clock() >= rev {
		if rev > 0 { // else nothing is asked for
			s.metrics.Waited(0)
		}
		return nil
	}
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	err := s.await(waitCtx, rev)
	if err != nil && ctx.Err() == nil {
		return storage.NewTooLargeResourceVersionError(uint64(rev), uint64(s.mirror.Clock()), tooHighRetrySeconds)
	}
	return err
}

// await returns when rev can be read, or with ctx's error, and measures that.
func (s *Store) await(ctx context.Context, rev mirror.Revision) error {
	if s.mirror.Clock() >= rev {
		s.metrics.Waited(0)
		return nil
	}
	began := time.Now()
	err := s.mirror.Wait(ctx, rev)
	s.metrics.Waited(time.Since(began))
	return err
}

// current returns etcd's revision (I6). Errors: mirror.ErrNotReady if etcd was
// restored, until everything is listed anew.
func (s *Store) current(ctx context.Context) (mirror.Revision, error) {
	rev, err := s.mirror.Current(ctx)
	if errors.Is(err, mirror.ErrRestored) {
		return 0, fmt.Errorf("%w: %w", mirror.ErrNotReady, err)
	}
	return rev, err
}

// consistent returns when the mirror has seen every write that was acknowledged
// before the call (I6), and 429 when it cannot tell within freshWait: that is not the
// client's doing, and not to be passed on to etcd, which would multiply an outage
// (KEP-2340, k/k#138494).
func (s *Store) consistent(ctx context.Context) error {
	waitCtx, cancel := waitContext(ctx, freshWait)
	defer cancel()
	rev, err := s.current(waitCtx)
	if err == nil {
		err = s.await(waitCtx, rev)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.metrics.Consistent(err == nil, false)
	if err != nil && waitCtx.Err() != nil {
		return errBehind()
	}
	return err
}

// errBehind is the answer to a read that memory has not caught up for.
func errBehind() error {
	return apierrors.NewTooManyRequests("the watch cache cannot keep up with etcd", tooHighRetrySeconds)
}

type hasWaitedKey struct{}

// HasWaited returns a context for a request that was answered with ErrReadEtcd: a Get of the
// present does not wait for memory a second time.
func HasWaited(ctx context.Context) context.Context {
	return context.WithValue(ctx, hasWaitedKey{}, true)
}

// soonConsistent is consistent for those who do not wait longer than getWait.
func (s *Store) soonConsistent(ctx context.Context) error {
	ctx, cancel := waitContext(ctx, getWait)
	defer cancel()
	rev, err := s.mirror.Current(ctx)
	if err != nil {
		return err
	}
	return s.await(ctx, rev)
}
