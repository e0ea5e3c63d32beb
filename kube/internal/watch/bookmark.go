package watch

import (
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

const (
	// bookmarkInterval is the interval of bookmarks for a watch that requests them, plus up to a
	// quarter so that they do not coincide (KEP-956).
	bookmarkInterval = time.Minute
	// progressInterval is that interval for a watch that requests the storage's own progress
	// notifications, which an external request cannot do: 5 s, the recommended setting for etcd's
	// in Kubernetes.
	progressInterval = 5 * time.Second
	// bookmarkTick divides those intervals: the bookmarks of one tick are sent together, which
	// saves the server a wake-up for each.
	bookmarkTick = 500 * time.Millisecond
	// bookmarkLead is the time between the last bookmark and the server's end of the watch. A
	// shorter watch that begins in the past gets its only bookmark as soon as it has caught up
	// (schedule.catchUp): a reader of past events learns at once that it has all of them.
	bookmarkLead = 2 * time.Second
)

// Bookmark reports to the client that everything up to a revision was delivered before (I4).
type Bookmark struct {
	Revision mirror.Revision
	// InitialEventsEnd: the bookmark closes the initial events.
	InitialEventsEnd bool
}

// schedule is when the bookmarks of a watch are due. The zero value is never.
type schedule struct {
	every time.Duration // 0: never
	next  time.Time     // zero if there is none
	timer *time.Timer   // wakes the stream at next; nil without bookmarks
	// catchUp: one is due when the history is delivered, because the watch ends before the time of
	// a later one.
	catchUp bool
	last    bool // the bookmark before the end of the server was delivered
}

// bookmarkEvery returns how often a watch gets bookmarks, 0 for never.
func bookmarkEvery(opts *storage.ListOptions) time.Duration {
	switch {
	case opts.ProgressNotify:
		return progressInterval
	case opts.Predicate.AllowWatchBookmarks:
		return bookmarkInterval
	}
	return 0
}

// after sets the time of the next bookmark after now: after the interval, or shortly before the
// deadline, which may be zero, whichever comes first. wake is called then.
func (s *schedule) after(now, deadline time.Time, wake func()) {
	s.next = time.Time{}
	if s.every == 0 {
		return
	}
	next := now.Add(s.every + rand.N(s.every/4-bookmarkTick))
	next = next.Add(bookmarkTick - time.Duration(next.UnixNano()%int64(bookmarkTick)))
	if !deadline.IsZero() {
		if last := deadline.Add(-bookmarkLead); last.Before(next) {
			if next = last; !next.After(now) {
				return
			}
		}
	}
	s.next = next
	if s.timer != nil {
		s.timer.Reset(next.Sub(now))
		return
	}
	s.timer = time.AfterFunc(next.Sub(now), wake)
}

// scheduleBookmark sets the time of the next bookmark.
func (st *Stream) scheduleBookmark() {
	st.bookmarks.after(time.Now(), st.life.deadline, st.Drain)
}

// bookmarkDue reports whether a bookmark is due, and sets the time of the next.
func (st *Stream) bookmarkDue() bool {
	if st.bookmarks.next.IsZero() || time.Now().Before(st.bookmarks.next) {
		return false
	}
	st.scheduleBookmark()
	return st.reached()
}

// reached reports whether the watch has a position that memory has reached: a watch at a future
// revision gets no bookmark below that revision.
func (st *Stream) reached() bool {
	return st.log.cursor.Position() <= st.env.Lists.Mirror.PublishedRevision()
}

// dueBookmark returns the bookmark that is due when all events are delivered, if there is one.
func (st *Stream) dueBookmark() delivery {
	if st.bookmarks.catchUp && st.log.cursor.Position() >= st.log.publishedAtStart {
		st.bookmarks.catchUp = false
		return st.bookmark()
	}
	if st.bookmarkDue() {
		return st.bookmark()
	}
	return delivery{}
}

// lastBookmark returns the bookmark before the end of the server, when everything up to life.until
// is delivered, and then the end.
func (st *Stream) lastBookmark() (delivery, error) {
	if !st.bookmarks.last && st.bookmarks.every > 0 && st.reached() {
		st.bookmarks.last = true
		return st.bookmark(), nil
	}
	return delivery{}, st.drained()
}

// bookmark returns a bookmark at the position of the stream.
func (st *Stream) bookmark() delivery {
	st.env.Metrics.Bookmark()
	return delivery{bookmark: Bookmark{Revision: st.log.cursor.Position()}}
}

// BookmarkObject returns the object of a bookmark event: of the storage's type, with only a
// resource version and, if it closes the initial events, the annotation for that. The caller owns
// it.
func (st *Stream) BookmarkObject(b Bookmark) (runtime.Object, error) {
	obj := st.env.Lists.View.Kind().NewFunc()
	if err := (storage.APIObjectVersioner{}).UpdateObject(obj, uint64(b.Revision)); err != nil {
		return nil, err
	}
	if b.InitialEventsEnd {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			return nil, err
		}
	}
	return obj, nil
}
