package kubestorage

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// requestTwin is a twin with the gate BookmarkOnRequest and bookmarks.
func requestTwin(t testing.TB) *twin {
	w := newTwin(t, mirror.DefaultWindow)
	w.bookmarks, w.onRequest = true, true
	return w
}

func userContext(t testing.TB, name string) context.Context {
	return request.WithUser(t.Context(), &user.DefaultInfo{Name: name})
}

// openAs opens a stream of a key for a user, and delivers its pending events.
func (w *twin) openAs(t testing.TB, name, key string, opts storage.ListOptions) *Stream {
	t.Helper()
	st, err := w.OpenStream(userContext(t, name), key, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	if b, err := st.next(); err != nil || !b.empty() {
		t.Fatalf("a stream from now begins with %+v, %v", b, err)
	}
	return st
}

// requestBookmarks requests bookmarks, and returns the revision.
func (w *twin) requestBookmarks(t testing.TB, name, key string, want int) mirror.Revision {
	t.Helper()
	rev, watches, err := w.RequestBookmarks(userContext(t, name), name, key, true)
	if err != nil || watches != want {
		t.Fatalf("request of %s for %s: %d watches, %v; want %d", name, key, watches, err, want)
	}
	return rev
}

// awake reports whether a waiting stream would be woken by something other than an event.
func awake(st *Stream) bool { return len(st.wake) > 0 }

// TestRequestBookmarks_Watches_OfUserAndPathReport: at once, at the requested revision, and only those that allow bookmarks.
func TestRequestBookmarks_Watches_OfUserAndPathReport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := requestTwin(t)
		marks := withBookmarks(w.fromNow())
		one := marks
		one.Recursive = false
		own := map[string]*Stream{
			"all":       w.openAs(t, "a", "/pods/", marks),
			"namespace": w.openAs(t, "a", "/pods/ns/", marks),
			"object":    w.openAs(t, "a", "/pods/ns/x", one),
		}
		others := map[string]*Stream{
			"other user":        w.openAs(t, "b", "/pods/", marks),
			"without bookmarks": w.openAs(t, "a", "/pods/", w.fromNow()),
		}
		w.etcd.Put(testPrefix+"other", "")
		began := time.Now()
		rev := w.requestBookmarks(t, "a", "/pods/", len(own))
		if rev != w.etcd.Revision() {
			t.Errorf("the answer is %d, want %d", rev, w.etcd.Revision())
		}
		for name, st := range own {
			b := take(t, st)
			for len(st.wake) > 0 { // take does not wait if a bookmark is due
				<-st.wake
			}
			if b.bookmark.Revision < rev || b.bookmark.InitialEventsEnd || time.Since(began) > time.Second {
				t.Errorf("%s: %+v after %s, want a bookmark at %d at once", name, b, time.Since(began), rev)
			}
		}
		for name, st := range others {
			if b, err := st.next(); awake(st) || err != nil || !b.empty() {
				t.Errorf("%s: woken: %v, %+v, %v", name, awake(st), b, err)
			}
		}
		// A watch that has reported the revision is not woken again.
		if again := w.requestBookmarks(t, "a", "/pods/", len(own)); again != rev {
			t.Errorf("the second answer is %d, want %d", again, rev)
		}
		for name, st := range own {
			if awake(st) {
				t.Errorf("%s: woken without a new revision", name)
			}
		}
		// The path of a namespace concerns its watches only.
		w.etcd.Put(testPrefix+"other", "")
		w.requestBookmarks(t, "a", "/pods/ns/", 2)
		if awake(own["all"]) || !awake(own["namespace"]) || !awake(own["object"]) {
			t.Error("a request for a namespace did not wake exactly its watches")
		}
		own["all"].Close()
		w.requestBookmarks(t, "a", "/pods/", 2)
	})
}

// TestRequestBookmarks_PendingEvents_PrecedeBookmark: events up to the requested revision are delivered first (I4), and one bookmark
// answers all requests before it.
func TestRequestBookmarks_PendingEvents_PrecedeBookmark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := requestTwin(t)
		st := w.openAs(t, "a", "/pods/", withBookmarks(w.fromNow()))
		const pods = readAhead + 10
		var rev mirror.Revision
		for i := range pods {
			w.put(t, newPod(fmt.Sprint("pod-", i)))
			rev = w.requestBookmarks(t, "a", "/pods/", 1)
		}
		events, bookmarks := 0, 0
		for b, err := st.next(); err != nil || !b.empty(); b, err = st.next() {
			if err != nil {
				t.Fatal(err)
			}
			events += len(b.events)
			if at := b.bookmark.Revision; at != 0 {
				if bookmarks++; at >= rev && events != pods {
					t.Errorf("a bookmark at %d after %d events, want %d", at, events, pods)
				}
			}
		}
		if events != pods || bookmarks != 1 {
			t.Errorf("%d events and %d bookmarks, want %d and 1", events, bookmarks, pods)
		}
	})
}

// TestRequestBookmarks_InitialEvents_PrecedeBookmark: the closing bookmark answers a request if its revision is new enough.
func TestRequestBookmarks_InitialEvents_PrecedeBookmark(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := requestTwin(t)
		w.put(t, newPod("x"))
		w.catchUp(t)
		yes := true
		opts := withBookmarks(everything())
		opts.SendInitialEvents = &yes
		st, err := w.OpenStream(userContext(t, "a"), "/pods/", opts)
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		w.etcd.Put(testPrefix+"other", "")
		rev := w.requestBookmarks(t, "a", "/pods/", 1)
		if b := take(t, st); len(b.runs) != 1 {
			t.Fatalf("begins with %+v", b)
		}
		first := take(t, st)
		if !first.bookmark.InitialEventsEnd {
			t.Fatalf("initial events end with %+v", first)
		}
		if b := take(t, st); b.bookmark.Revision < rev || b.bookmark.InitialEventsEnd {
			t.Errorf("then %+v, want a bookmark at %d", b, rev)
		}
	})
}

// TestRequestBookmarks_ManyWatches_ArePaced: a user whose bookmarks cost more than the share waits, and is refused if the wait is long.
// Other users are not concerned.
func TestRequestBookmarks_ManyWatches_ArePaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := requestTwin(t)
		// As many watches as the share pays for in 2 s.
		n := int(2 * time.Second / (bookmarkCost * 10 / time.Duration(runtime.GOMAXPROCS(0))))
		opts := withBookmarks(w.fromNow())
		w.openAs(t, "b", "/pods/", opts)
		for range n {
			w.openAs(t, "a", "/pods/", opts)
		}
		ask := func(name string) (time.Duration, error) {
			w.etcd.Put(testPrefix+"other", "")
			began := time.Now()
			_, _, err := w.RequestBookmarks(userContext(t, name), name, "/pods/", true)
			return time.Since(began).Round(100 * time.Millisecond), err
		}
		if took, err := ask("a"); took != 0 || err != nil {
			t.Errorf("the first request took %s, %v", took, err)
		}
		if took, err := ask("a"); took != 2*time.Second-bookmarkCredit || err != nil {
			t.Errorf("the second request took %s, %v", took, err)
		}
		if took, err := ask("b"); took != 0 || err != nil {
			t.Errorf("another user's request took %s, %v", took, err)
		}
		// Three more rounds would wait for longer than a read does.
		for range 2 {
			w.requests.request("a", "", "\xff", w.etcd.Revision()+1, time.Now())
			for st := range w.requests.users["a"].streams {
				st.requested.Store(0)
			}
		}
		_, err := ask("a")
		if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsTooManyRequests(err) || !ok || seconds < 4 {
			t.Errorf("a request beyond the bound: %v, Retry-After %d", err, seconds)
		}
		time.Sleep(10 * time.Second)
		if took, err := ask("a"); took != 0 || err != nil {
			t.Errorf("later: %s, %v", took, err)
		}
	})
}

// TestBookmarksOnRequest_GatesAndProgress_Decide: without the gates, and without etcd's progress, the form is refused.
func TestBookmarksOnRequest_GatesAndProgress_Decide(t *testing.T) {
	w := requestTwin(t)
	if !w.BookmarksOnRequest() {
		t.Error("off with all gates on")
	}
	for name, change := range map[string]func(*Store){
		"gate":       func(s *Store) { s.onRequest = false },
		"bookmarks":  func(s *Store) { s.bookmarks = false },
		"lists":      func(s *Store) { s.latestReads.lists = false },
		"eventsOnly": func(s *Store) { s.eventsOnly = true },
	} {
		w := requestTwin(t)
		if change(w.Store); w.BookmarksOnRequest() {
			t.Errorf("%s: on", name)
		}
	}
}

// BenchmarkRequestBookmarks measures a request while there are 10,000 watches: of other users, and of the requesting one. Woken watches
// send nothing here; docs/benchmarks/watches.md has the cost of their bookmarks.
func BenchmarkRequestBookmarks(b *testing.B) {
	const watches = 10_000
	for _, own := range []int{0, 1, watches} {
		b.Run(fmt.Sprint("own=", own), func(b *testing.B) {
			w := requestTwin(b)
			opts := withBookmarks(w.fromNow())
			for i := range watches {
				w.openAs(b, map[bool]string{true: "a", false: fmt.Sprint("user-", i)}[i < own], "/pods/", opts)
			}
			start, err := w.keys.Prepare("/pods/", true)
			if err != nil {
				b.Fatal(err)
			}
			rev, woken := w.etcd.Revision(), 0
			b.ReportAllocs()
			for b.Loop() {
				rev++
				_, n := w.requests.request("a", start, after(start), rev, time.Now())
				woken += n
			}
			b.ReportMetric(float64(woken)/float64(b.N), "woken/op")
		})
	}
}
