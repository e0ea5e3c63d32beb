package kubestorage_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/kubestorage"
)

// simRecord is one request of a client with its result.
type simRecord struct {
	Op              int // the step that began it
	Server, Process int
	Verb            string
	HTTP, Protobuf  bool   // answered by the read path
	Key             string // of a write or GET
	Seq             int    // of a write
	RV              string // as requested
	Match           metav1.ResourceVersionMatch
	Limit           int64
	Selector        simSelector
	From            *simRecord // the list that this is the next page of
	Forged          bool       // its sealed token was changed
	Precondition    int64      // revision of the object that a write demands, 0 if any
	Final           bool       // after all faults were repaired
	// The revision of etcd at its begin and end, and the lowest revision that the process may
	// return without a step back.
	Began, Ended, Floor int64

	Done      atomic.Bool // written last
	Err       string      // class of the error, "" if there is none
	Message   string
	Rev       int64
	Items     []simItem
	Next      string // continue token
	Remaining int64  // -1 if the response has none
	Shown     bool   // the process has published the revision of this list
}

func (r *simRecord) String() string { return r.describe(r.Message) }

func (r *simRecord) describe(message string) string {
	text := fmt.Sprintf("step %d, server %d.%d: %s (HTTP %v) %s rv=%q %s limit=%d %+v", r.Op, r.Server, r.Process, r.Verb, r.HTTP, r.Key, r.RV, r.Match, r.Limit, r.Selector)
	if r.Precondition > 0 {
		text += fmt.Sprintf(" of revision %d", r.Precondition)
	}
	if r.From != nil {
		text += fmt.Sprintf(" after step %d", r.From.Op)
	}
	return text + fmt.Sprintf(": etcd at %d to %d: rev %d %s %s, %d items %v", r.Began, r.Ended, r.Rev, r.Err, message, len(r.Items), r.Items)
}

// simWatch is one watch.
type simWatch struct {
	Op              int
	Server, Process int
	RV              string
	Initial         bool // sendInitialEvents
	HTTP            bool // answered by the read path
	Bookmarks       bool
	Selector        simSelector
	Final           bool // after all faults were repaired
	Began, Floor    int64

	Ended  int64 // revision of etcd at its end
	mu     sync.Mutex
	Events []simEvent
	Err    string // of the request, or the event that ended the watch
	Detail string
	Over   bool // the stream has ended
	Closed bool // by the client
	Live   bool // still open at the end, when all had caught up

	cancel context.CancelFunc
	gate   atomic.Pointer[chan struct{}] // the client reads when it is closed; nil: now
}

func (w *simWatch) String() string { return w.describe(w.Events, w.Err, w.Detail) }

func (w *simWatch) describe(events []simEvent, err, detail string) string {
	return fmt.Sprintf("step %d, server %d.%d: watch (HTTP %v) rv=%q initial=%v bookmarks=%v %+v, etcd at %d: over %v %s %s, %d events %v",
		w.Op, w.Server, w.Process, w.HTTP, w.RV, w.Initial, w.Bookmarks, w.Selector, w.Began, w.Over, err, detail, len(events), events)
}

// simEvent is an event of a watch.
type simEvent struct {
	Type watch.EventType
	simItem
	End bool // of the initial events
}

// last returns the last revision that the watch has reported, by an event or by a bookmark.
func (w *simWatch) last(bookmarks bool) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := int64(0)
	for _, e := range w.Events {
		if e.Type == watch.Bookmark && !bookmarks {
			continue
		}
		if w.Initial || w.RV == "" || w.RV == "0" {
			last = max(last, e.Rev)
		} else {
			last = e.Rev
		}
	}
	return last
}

// simHistory is what one run has recorded. A judge needs nothing else.
type simHistory struct {
	Lineages []lineage
	Records  []*simRecord
	Watches  []*simWatch
	Window   bool // history in memory is bounded tightly
	// The revision at which keys of tokens were deleted first, 0 if they were not.
	Forgotten    int64
	Transactions map[int64]bool // the revisions that no server has written
	Left         []string       // memory beyond its bound at the end
}

// followHTTP records the events of the watch by the read path. It returns false if that passes the
// watch on.
func (w *simWatch) followHTTP(ctx context.Context, reads http.Handler, opts storage.ListOptions) bool {
	events, answered := make(chan watch.Event), make(chan bool, 1)
	go func() {
		answered <- simWatchHTTP(ctx, reads, w.Selector.Namespace, simQuery(w.Selector, opts), events)
		close(events)
	}()
	err := w.record(ctx, events)
	if w.HTTP = <-answered; w.HTTP {
		w.over(err)
	}
	return w.HTTP
}

// follow records the events of the watch by the storage.
func (w *simWatch) follow(ctx context.Context, store *kubestorage.Store, opts storage.ListOptions) {
	stream, err := store.Watch(ctx, w.Selector.key(), opts)
	if err != nil {
		w.over(err)
		return
	}
	defer stream.Stop()
	w.over(w.record(ctx, stream.ResultChan()))
}

// over notes the end of the watch.
func (w *simWatch) over(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Over = true
	if err != nil {
		w.Err, w.Detail = simError(err), err.Error()
	}
}

// record records events until they end, and returns the error that was the last of them.
func (w *simWatch) record(ctx context.Context, events <-chan watch.Event) error {
	for {
		if gate := w.gate.Load(); gate != nil {
			select {
			case <-*gate:
			case <-ctx.Done():
				return nil
			}
		}
		e, ok := <-events
		switch {
		case !ok:
			return nil
		case e.Type == watch.Error:
			return apierrors.FromObject(e.Object)
		}
		event := simEvent{Type: e.Type, simItem: simItemOf(e.Object)}
		if e.Type == watch.Bookmark {
			event.simItem = simItem{Rev: event.Rev}
			event.End = e.Object.(*example.Pod).Annotations[metav1.InitialEventsAnnotationKey] == "true"
		}
		w.mu.Lock()
		w.Events = append(w.Events, event)
		w.mu.Unlock()
	}
}

// end ends the watch by its client.
func (w *simWatch) end() {
	w.mu.Lock()
	w.Closed = true
	w.mu.Unlock()
	w.cancel()
}

// pause makes the client read no more, or again.
func (w *simWatch) pause() {
	if w.gate.Load() == nil {
		w.gate.Store(new(make(chan struct{})))
	} else {
		w.resume()
	}
}

func (w *simWatch) resume() {
	if gate := w.gate.Swap(nil); gate != nil {
		close(*gate)
	}
}

// text is the history without what a seed does not decide: the times of bookmarks, the words of
// errors, which name the last revision that a server has heard of, and whether a server that ends
// tells its watches.
func (h *simHistory) text() string {
	var text strings.Builder
	for _, r := range h.Records {
		fmt.Fprintln(&text, r.describe(""))
	}
	for _, w := range h.Watches {
		events := slices.DeleteFunc(slices.Clone(w.Events), func(e simEvent) bool { return e.Type == watch.Bookmark && !e.End })
		err := w.Err
		if err == "unavailable" {
			err = ""
		}
		fmt.Fprintln(&text, w.describe(events, err, ""))
	}
	return text.String()
}
