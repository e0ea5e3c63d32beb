package kubestorage

import (
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
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
	// (Stream.catchUp): a reader of past events learns at once that it has all of them.
	bookmarkLead = 2 * time.Second
)

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

// scheduleBookmark sets the time of the next bookmark: after bookmarkEvery, or shortly before the
// server ends the watch, whichever comes first.
func (st *Stream) scheduleBookmark() {
	st.nextBookmark = time.Time{}
	if st.bookmarkEvery == 0 {
		return
	}
	now := time.Now()
	next := now.Add(st.bookmarkEvery + rand.N(st.bookmarkEvery/4-bookmarkTick))
	next = next.Add(bookmarkTick - time.Duration(next.UnixNano()%int64(bookmarkTick)))
	if !st.deadline.IsZero() {
		if last := st.deadline.Add(-bookmarkLead); last.Before(next) {
			if next = last; !next.After(now) {
				return
			}
		}
	}
	st.nextBookmark = next
	if st.timer != nil {
		st.timer.Reset(next.Sub(now))
		return
	}
	st.timer = time.AfterFunc(next.Sub(now), st.nudge)
}

// bookmarkDue reports whether a bookmark is due, and sets the time of the next.
func (st *Stream) bookmarkDue() bool {
	if st.nextBookmark.IsZero() || time.Now().Before(st.nextBookmark) {
		return false
	}
	st.scheduleBookmark()
	// A watch at a future revision gets no bookmark below that revision.
	return st.cursor.Position() <= st.store.mirror.PublishedRevision()
}

// BookmarkObject returns the object of a bookmark event: of the storage's type, with only a
// resource version and, if it closes the initial events, the annotation for that. The caller owns
// it.
func (st *Stream) BookmarkObject(b Bookmark) (runtime.Object, error) {
	obj := st.store.newFunc()
	if err := st.store.versioner.UpdateObject(obj, uint64(b.Revision)); err != nil {
		return nil, err
	}
	if b.InitialEventsEnd {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			return nil, err
		}
	}
	return obj, nil
}
