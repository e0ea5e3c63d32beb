package mirror_test

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// stepped is an etcd that makes no step by itself. The test determines which revisions the watch
// delivers and reports as progress, when a revision read is executed, and when its reply arrives.
// Lists are answered at once. The methods that are not part of driver.Source are for the test,
// which calls them when all goroutines are idle (synctest.Wait).
type stepped struct {
	*memory.Store

	mu sync.Mutex
	stepping
}

// stepping is the state between the mirror and a stepped etcd.
type stepping struct {
	stream   *stream       // the running watch, nil if there is none
	call     *revisionCall // the revision read in flight, nil if there is none
	requests int           // for progress
	asked    time.Time     // time of the last progress request
	hang     chan struct{} // progress requests return when it is closed; nil: at once
}

// now returns the current state.
func (s *stepped) now() stepping {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stepping
}

// stream is a watch.
type stream struct {
	after    mirror.Revision // where it began
	sent     mirror.Revision // the changes up to here have been delivered
	reported mirror.Revision // the highest revision it has reported
	feed     chan driver.Batch
	broken   chan struct{}
}

// revisionCall is a call of ReadRevision.
type revisionCall struct {
	rev   mirror.Revision // 0 until etcd has read it
	reply chan error
}

// Watch implements driver.Source.
func (s *stepped) Watch(ctx context.Context, _ string, after driver.Header, deliver func(driver.Batch) error) error {
	st := &stream{after: after.Revision, sent: after.Revision, reported: after.Revision,
		feed: make(chan driver.Batch), broken: make(chan struct{})}
	s.set(func() { s.stream = st })
	defer s.set(func() { s.stream = nil })
	for {
		select {
		case b := <-st.feed:
			if err := deliver(b); err != nil {
				return err
			}
		case <-st.broken:
			return memory.ErrBroken
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// ReadRevision implements driver.Source.
func (s *stepped) ReadRevision(ctx context.Context) (driver.Header, error) {
	call := &revisionCall{reply: make(chan error)}
	s.set(func() { s.call = call })
	defer s.set(func() { s.call = nil })
	select {
	case err := <-call.reply:
		return driver.Header{ClusterID: 1, Revision: call.rev}, err
	case <-ctx.Done():
		return driver.Header{}, ctx.Err()
	}
}

// RequestProgress implements driver.Source. The test sends the answer.
func (s *stepped) RequestProgress(ctx context.Context) error {
	var hang chan struct{}
	s.set(func() {
		s.requests++
		s.asked = time.Now()
		hang = s.hang
	})
	if hang == nil {
		return nil
	}
	select {
	case <-hang:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *stepped) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// due returns the changes that the watch has yet to deliver.
func (s *stepped) due() []driver.Change { return s.Changes(root, s.now().stream.sent) }

// inStep returns the highest revision that the watch may report as progress.
func (s *stepped) inStep() mirror.Revision {
	if due := s.due(); len(due) > 0 {
		return due[0].ModRevision - 1
	}
	return s.Revision()
}

// deliver makes the watch deliver, in one batch, the changes of the next n revisions with changes
// in the prefix. Like etcdsource it does not go below a revision that was reported before.
func (s *stepped) deliver(n int) {
	st := s.now().stream
	var b driver.Batch
	for _, c := range s.due() {
		if c.ModRevision != st.sent {
			if n--; n < 0 {
				break
			}
		}
		st.sent = c.ModRevision
		b.Changes = append(b.Changes, c)
	}
	st.reported = max(st.reported, st.sent)
	b.Through = st.reported
	st.feed <- b
}

// progress makes the watch report progress at rev.
func (s *stepped) progress(rev mirror.Revision) {
	st := s.now().stream
	st.reported = rev
	st.feed <- driver.Batch{Through: rev}
}

// breakStream ends the watch.
func (s *stepped) breakStream() { close(s.now().stream.broken) }

// linearize executes the revision read in flight.
func (s *stepped) linearize() { s.now().call.rev = s.Revision() }

// reply answers the revision read in flight.
func (s *stepped) reply() { s.now().call.reply <- nil }

var errNoLeader = errors.New("etcdserver: no leader")

// fail answers the revision read in flight with an error.
func (s *stepped) fail() { s.now().call.reply <- errNoLeader }

// holdRequests makes progress requests hang until letRequestsGo.
func (s *stepped) holdRequests() { s.set(func() { s.hang = make(chan struct{}) }) }

func (s *stepped) letRequestsGo() {
	s.set(func() {
		close(s.hang)
		s.hang, s.asked = nil, time.Now()
	})
}
