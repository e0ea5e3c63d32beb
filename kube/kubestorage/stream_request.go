package kubestorage

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/stratakube/strata/mirror"
)

// A user's bookmarks on request are paced by their cost. A request is delayed while the bookmarks that its user has requested before have
// cost more than the share, beyond a credit, and refused if it would wait for longer than freshWait.
const (
	// bookmarkCost is the CPU time of a bookmark: wake-up, frame, TLS and write. Measured, rounded up: docs/benchmarks/watches.md.
	bookmarkCost = 20 * time.Microsecond
	// bookmarkShare is the part of the server's processors that one user may spend on bookmarks of one resource. A guess.
	bookmarkShare = 0.1
	// bookmarkCredit is the time for which a user may exceed the share. A guess: readers of a few watches never wait.
	bookmarkCredit = time.Second
)

// bookmarkRequests are the open watches of a storage that allow bookmarks, by user. The zero value is empty. Safe for concurrent use.
type bookmarkRequests struct {
	mu    sync.Mutex // leaf
	users map[string]*bookmarkUser
}

// bookmarkUser is a user with open watches. It exists while it has some.
type bookmarkUser struct {
	streams map[*Stream]struct{}
	// paidAt is the time at which the requested bookmarks have cost no more than the share.
	paidAt time.Time
}

// add adds the stream of a user, until remove.
func (b *bookmarkRequests) add(user string, st *Stream) (remove func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.users[user]
	if u == nil {
		if b.users == nil {
			b.users = map[string]*bookmarkUser{}
		}
		u = &bookmarkUser{streams: map[*Stream]struct{}{}}
		b.users[user] = u
	}
	u.streams[st] = struct{}{}
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if delete(u.streams, st); len(u.streams) == 0 {
			delete(b.users, user)
		}
	}
}

// delay returns how long the next request of a user has to wait.
func (b *bookmarkRequests) delay(user string, now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if u := b.users[user]; u != nil {
		return max(0, u.paidAt.Add(-bookmarkCredit).Sub(now))
	}
	return 0
}

// request requests a bookmark at or after rev from the user's streams whose keys are in start <= key < end. It returns their number and
// the number of those that it woke: others have sent such a bookmark, or are about to. Cost is O(streams of the user), without an
// allocation.
func (b *bookmarkRequests) request(user, start, end string, rev mirror.Revision, now time.Time) (watches, woken int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.users[user]
	if u == nil {
		return 0, 0
	}
	for st := range u.streams {
		if st.start < start || st.end > end {
			continue
		}
		watches++
		if st.requestBookmark(rev) {
			woken++
		}
	}
	if u.paidAt.Before(now) {
		u.paidAt = now
	}
	pause := time.Duration(float64(bookmarkCost) / (bookmarkShare * float64(runtime.GOMAXPROCS(0))))
	u.paidAt = u.paidAt.Add(time.Duration(woken) * pause)
	return watches, woken
}

// requestBookmark requests a bookmark at or after rev. It reports false if the stream has sent one, or if one was requested before. Safe for
// concurrent use.
func (st *Stream) requestBookmark(rev mirror.Revision) bool {
	if st.reported.Load() >= rev || st.requested.Load() >= rev {
		return false
	}
	st.requested.Store(rev) // the caller has the mutex of bookmarkRequests, so the value grows
	st.nudge()
	return true
}

// bookmarkRequested reports whether a requested bookmark can be sent: its revision is above the last reported one, and the stream has
// delivered all events up to there (I4). A watch at a future revision gets no bookmark below that revision.
func (st *Stream) bookmarkRequested() bool {
	rev, at := st.requested.Load(), st.cursor.Position()
	return rev > st.reported.Load() && rev <= at && at <= st.store.mirror.PublishedRevision()
}

// awaitRequested makes the stream wake when its position can reach the revision of a requested bookmark: the position of a cursor on a
// topic may be behind the published revision.
func (st *Stream) awaitRequested() {
	if rev := st.requested.Load(); rev > st.reported.Load() {
		st.cursor.Await(rev)
	}
}

// joinRequests makes the stream send bookmarks on request of its user.
func (st *Stream) joinRequests() {
	if st.bookmarkEvery == 0 || st.cursor == nil || !st.store.BookmarksOnRequest() {
		return
	}
	if user, ok := request.UserFrom(st.ctx); ok {
		st.leaveRequests = st.store.requests.add(user.GetName(), st)
	}
}

// BookmarksOnRequest reports whether RequestBookmarks can be answered: the gates BookmarkOnRequest, WatchBookmark and
// ConsistentListFromCache are on, and the published revision follows etcd's progress.
func (s *Store) BookmarksOnRequest() bool {
	return s.onRequest && s.bookmarks && s.latestReads.lists && !s.eventsOnly
}

// RequestBookmarks returns a revision at which every write that was acknowledged before the call is visible (I6), after memory has reached
// it, and makes the user's open watches of keys below key report it: each sends a bookmark at that revision or later as soon as it has
// delivered all events up to there (I4), unless it has sent such a bookmark before. watches is their number. recursive is that of a
// list.
//
// Concurrent calls share the read of etcd's revision (D6), and the bookmarks of one revision. Errors: 429 if memory cannot catch up, or
// if the user's bookmarks of the resource cost too much.
func (s *Store) RequestBookmarks(ctx context.Context, user, key string, recursive bool) (rev mirror.Revision, watches int, err error) {
	start, err := s.keys.Prepare(key, recursive)
	if err != nil {
		return 0, 0, err
	}
	end := after(start)
	if !recursive {
		end = start + "\x00"
	}
	if err := s.ready(ctx); err != nil {
		return 0, 0, err
	}
	if err := s.payBookmarks(ctx, user); err != nil {
		return 0, 0, err
	}
	if rev, err = s.consistentRevision(ctx, nil); err != nil {
		return 0, 0, err
	}
	watches, woken := s.requests.request(user, start, end, rev, time.Now())
	s.watchMetrics.Requested(woken)
	return rev, watches, nil
}

// payBookmarks waits until the bookmarks that the user has requested before have cost no more than the share. Errors: 429 if
// that takes longer than freshWait, and ctx's error.
func (s *Store) payBookmarks(ctx context.Context, user string) error {
	delay := s.requests.delay(user, time.Now())
	if delay == 0 {
		return nil
	}
	if delay > freshWait {
		return apierrors.NewTooManyRequests(fmt.Sprintf("user %q requests bookmarks of %s for too many watches; "+
			"retry later, or request the path of one namespace", user, s.group), int((delay+time.Second-1)/time.Second))
	}
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
