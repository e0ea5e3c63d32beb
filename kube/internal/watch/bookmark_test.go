package watch

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestStream_ShortWatchOfPast_GetsBookmarkWhenCaughtUp: a watch that ends before the time of its
// last bookmark gets it after the past events, without delay and once. Longer watches, and those
// that begin now, get none earlier.
func TestStream_ShortWatchOfPast_GetsBookmarkWhenCaughtUp(t *testing.T) {
	for name, c := range map[string]struct {
		timeout, want time.Duration // want: the time of the bookmark; -1 for none
		past, marks   bool
	}{
		"short, past":                    {bookmarkLead, 0, true, true},
		"shorter, past":                  {bookmarkLead / 2, 0, true, true},
		"short, past, without bookmarks": {bookmarkLead, -1, true, false},
		"short, now":                     {bookmarkLead, -1, false, true},
		"longer, past":                   {bookmarkLead + time.Second, time.Second, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				begin, events := w.Etcd.Revision(), 3*readAhead/2
				for i := range events {
					w.Put(t, podtest.Pod(fmt.Sprint("pod-", i)))
				}
				latest := w.Etcd.Put(podtest.Prefix+"other", "")
				w.CatchUp(t)
				opts := after(begin)
				if !c.past {
					opts, events = w.fromNow(), 0
				}
				if c.marks {
					opts = withBookmarks(opts)
				}
				ctx, cancel := context.WithTimeout(t.Context(), c.timeout)
				defer cancel()
				st, opened := w.open(t, ctx, opts), time.Now()
				var got, bookmarks int
				for {
					b, err := st.next()
					if err == nil && b.empty() {
						err = st.wait(nil)
					}
					if err != nil {
						break
					}
					got += len(b.events)
					if at := b.bookmark.Revision; at != 0 {
						if bookmarks++; at != latest || got != events || time.Since(opened) != c.want {
							t.Errorf("a bookmark at %d after %s and %d events, want %d after %s and %d", at, time.Since(opened), got, latest, c.want, events)
						}
					}
				}
				if want := map[bool]int{true: 0, false: 1}[c.want < 0]; bookmarks != want || got != events {
					t.Errorf("%d bookmarks and %d events, want %d and %d", bookmarks, got, want, events)
				}
			})
		})
	}
}
