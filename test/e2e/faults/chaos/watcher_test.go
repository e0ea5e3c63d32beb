package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// transacted is the name prefix of the objects that are changed in one transaction.
const transacted = "together-"

// watcher watches a collection throughout a round. Each session uses another replica, and starts
// where the last one ended, from a list, from an old revision, or from a state that the watch
// itself sends first.
type watcher struct {
	n        int
	resource resource
	ns, half string // "" selects all
	name     string // of the only object that is watched; "" selects all

	sessions  recorded.Sessions
	fromAny   []bool       // of each session, whether it began with a state of unknown revision
	delivered []watchEvent // by all of them
	expired   []refusal    // 410 at revisions to which etcd was not compacted
	ended     error        // why the last watch does not reach the end
	starts    map[string]int
}

// watchEvent is one event of an object.
type watchEvent struct {
	session int
	kind    string
	key     key
	state   state
}

// newWatchers returns watchers with every kind of selection.
func (r *round) newWatchers() (all []*watcher) {
	for _, res := range resources {
		for _, w := range []*watcher{
			{}, {ns: r.namespaces[0]}, {half: halves[0]}, {ns: r.namespaces[1], half: halves[1]}, {ns: r.namespaces[0], name: "object-0"},
		} {
			w.n, w.resource, w.starts = len(all), res, map[string]int{}
			all = append(all, w)
		}
	}
	return all
}

func (w *watcher) String() string {
	return fmt.Sprintf("watcher %d of %s in %q, half %q, name %q", w.n, w.resource.name, w.ns, w.half, w.name)
}

// selects reports whether the watcher selects a stored object; the key is namespace/name.
func (w *watcher) selects(key string, stored any) bool {
	ns, name, _ := strings.Cut(key, "/")
	o, ok := stored.(*recorded.Object)
	return ok && (w.ns == "" || ns == w.ns) && (w.name == "" || name == w.name) && (w.half == "" || o.Labels[halfLabel] == w.half)
}

// position is the progress of a watcher.
type position struct {
	revision int64 // to continue after; 0 for none
}

// run watches until the fence, which ends the round: the revision of the last change that the
// watcher selects. The channel delivers it once it is known. A watcher that selects no fence gets
// 0, and then returns.
func (w *watcher) run(ctx context.Context, r *round, fence <-chan int64) {
	rng := random(r.seed, 100+w.n)
	at, end := position{}, int64(-1)
	for ctx.Err() == nil {
		select {
		case end = <-fence:
		default:
		}
		if end == 0 || end > 0 && at.revision >= end {
			w.ended = nil
			return
		}
		to := r.watched[rng.IntN(len(r.watched))]
		if err := w.session(ctx, r, rng, to, &at, &end, fence); err != nil {
			w.ended = err
			harness.Pause(ctx, 30*time.Millisecond)
		}
	}
}

// begin draws the start of a watch. It returns the query to send.
func (w *watcher) begin(ctx context.Context, r *round, rng *rand.Rand, to *replica, at position) (how string, query url.Values, after int64, err error) {
	query = url.Values{"allowWatchBookmarks": {"true"}, "timeoutSeconds": {fmt.Sprint(2 + rng.IntN(4))}}
	if w.half != "" {
		query.Set("labelSelector", halfLabel+"="+w.half)
	}
	if w.name != "" {
		query.Set("fieldSelector", "metadata.name="+w.name)
	}
	from := func(revision int64) { query.Set("resourceVersion", fmt.Sprint(revision)) }
	draw := rng.IntN(10)
	switch {
	case at.revision > 0 && draw < 6:
		from(at.revision)
		return "resumed", query, at.revision, nil
	case draw < 7 && r.newest.Load() > 0:
		past := r.drawPast(rng)
		from(past)
		return "from an old revision", query, past, nil
	case draw < 8:
		l := query
		list, err := to.api.List(ctx, w.resource.path(w.ns), url.Values{"labelSelector": l["labelSelector"], "fieldSelector": l["fieldSelector"]}.Encode())
		if err != nil {
			return "", nil, 0, err
		}
		if _, err := fmt.Sscan(list.Metadata.ResourceVersion, &after); err != nil {
			return "", nil, 0, err
		}
		from(after)
		return "from a list", query, after, nil
	case draw < 9:
		from(0)
		return "from any", query, 0, nil
	default:
		query.Set("sendInitialEvents", "true")
		query.Set("resourceVersionMatch", "NotOlderThan")
		return "initial events", query, 0, nil
	}
}

// session makes one watch and reads it to its end.
func (w *watcher) session(ctx context.Context, r *round, rng *rand.Rand, to *replica, at *position, end *int64, fence <-chan int64) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*requestTimeout, errors.New("the watch has neither ended in time nor been cut"))
	defer cancel()
	listing, stop := context.WithTimeout(ctx, requestTimeout)
	how, query, after, err := w.begin(listing, r, rng, to, *at)
	stop()
	if err != nil {
		return err
	}
	if how != "resumed" && *end > 0 && how != "from a list" && how != "initial events" {
		return nil // the last session does not start at an old revision
	}
	watch, refused, err := to.api.Watch(ctx, w.resource.path(w.ns), query.Encode())
	if err != nil {
		return err
	}
	if refused != nil {
		if r.classify("watch", refused, nil, "") == expired {
			w.gone(r, to, after, at)
		}
		return refused.Err()
	}
	defer watch.Close()
	w.starts[how]++
	session := w.sessions.Begin(after)
	if how == "initial events" {
		session.WithInitialEvents()
	}
	w.fromAny = append(w.fromAny, how == "from any")
	n := len(w.fromAny) - 1
	initial := how == "initial events"
	known := after // from here on events are in revision order
	for {
		e, err := watch.Next(ctx)
		if err != nil {
			if errors.Is(err, harness.ErrEnded) {
				return nil
			}
			return err
		}
		session.Add(e)
		if e.Type == "ERROR" {
			if e.Status.Code == http.StatusGone {
				w.gone(r, to, after, at)
			}
			return fmt.Errorf("%d %s: %s", e.Status.Code, e.Status.Reason, e.Status.Message)
		}
		s, err := stateOfObject(e.Object)
		if err != nil {
			return err
		}
		if e.Type != "BOOKMARK" {
			w.delivered = append(w.delivered, watchEvent{n, e.Type, keyOf(w.resource.name, e.Object.Metadata.Namespace, e.Object.Metadata.Name), s})
		} else if e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true" {
			initial = false
		}
		if initial || how == "from any" {
			if how != "from any" || e.Type != "BOOKMARK" {
				continue // these come, or may come, in key order
			}
			how = "" // the bookmark completes the initial state
		}
		known = max(known, s.revision)
		at.revision = known
		if e.Type != "BOOKMARK" && strings.HasPrefix(e.Object.Metadata.Name, transacted) {
			at.revision-- // other events of the transaction may be lost when the watch is cut
		}
		select {
		case *end = <-fence:
		default:
		}
		if *end == 0 || *end > 0 && at.revision >= *end {
			return nil
		}
	}
}

// gone records a watch that was refused with 410. The watcher relists.
func (w *watcher) gone(r *round, to *replica, after int64, at *position) {
	at.revision = 0
	if after < r.compacted.Load() {
		return
	}
	w.expired = append(w.expired, refusal{to, after})
}

// refusal is a 410 for a watch from a revision.
type refusal struct {
	by    *replica
	after int64
}

var (
	// unrestored is the server's log message for a prefix without history before a revision, or
	// before the revision of its next list.
	unrestored = regexp.MustCompile(`History could not be restored.* prefix="?([^" ]+)"? revision=(\d+)`)
	listed     = regexp.MustCompile(`Listed the prefix"?.* prefix="?([^" ]+)"? .*revision=(\d+)`)
)

// historyLost reports whether the server has logged a reason for 410 to watches of the resource
// after a revision that etcd has: history was not restored in time, or memory contradicted etcd.
func (r *replica) historyLost(res resource, after int64) bool {
	return slices.ContainsFunc(r.server.Outputs(), func(output string) bool {
		without := false // the next list comes without history
		for line := range strings.Lines(output) {
			if strings.Contains(line, "Event does not match the cached state") {
				return true
			}
			m := unrestored.FindStringSubmatch(line)
			if m != nil {
				without = true
			} else if m = listed.FindStringSubmatch(line); m == nil || !without {
				continue
			}
			oldest, err := strconv.ParseInt(m[2], 10, 64)
			if err == nil && after < oldest && strings.HasPrefix("/registry/"+res.name+"/", m[1]) {
				return true
			}
		}
		return false
	})
}

// commitTransaction changes some objects of a namespace in one transaction: all of them, or all but
// one that it deletes.
func (r *round) commitTransaction(ctx context.Context, rng *rand.Rand, ns string, i int) error {
	var ops []clientv3.Op
	for j := range 3 {
		for _, res := range resources {
			name := fmt.Sprint(transacted, j)
			at := "/registry/" + string(keyOf(res.name, ns, name))
			if rng.IntN(4) == 0 {
				ops = append(ops, clientv3.OpDelete(at))
				continue
			}
			ops = append(ops, clientv3.OpPut(at, stored(res, ns, name, halves[rng.IntN(len(halves))], fmt.Sprintf("%d-together-%d", r.seed, i))))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := r.scene.client.Txn(ctx).Then(ops...).Commit()
	return err
}

// fences writes the objects that end a round and returns the revision that each watcher has to
// reach.
func (r *round) fences(ctx context.Context) (ends map[*watcher]int64, last int64, err error) {
	ends = map[*watcher]int64{}
	for _, res := range resources {
		for _, ns := range r.namespaces {
			for _, half := range halves {
				var written harness.Object
				name := "fence-" + half
				o := body(name, fmt.Sprintf("%d-fence-%s-%s-%s", r.seed, res.name, ns, half), half, state{})
				if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					ctx, cancel := context.WithTimeout(ctx, requestTimeout)
					defer cancel()
					var err error
					if written, err = r.asked[0].api.Create(ctx, res.path(ns), o); err != nil {
						// it may exist already
						written, err = r.asked[0].api.Get(ctx, res.path(ns)+"/"+name, "")
					}
					return err == nil, err
				}); err != nil {
					return nil, 0, fmt.Errorf("write a fence: %w", err)
				}
				s, err := stateOfObject(written)
				if err != nil {
					return nil, 0, err
				}
				last = max(last, s.revision)
				for _, w := range r.watchers {
					stored := &recorded.Object{Labels: map[string]string{halfLabel: half}}
					if w.resource == res && w.selects(ns+"/"+name, stored) {
						ends[w] = max(ends[w], s.revision)
					}
				}
			}
		}
	}
	return ends, last, nil
}

// judged returns the sessions of a watcher in the form that validators take. A session that began
// with a state of unknown revision gets the revision at which it fits, if there is one. The key is
// namespace/name.
func (w *watcher) judged(view *watchcheck.View, l *timeline, from int64) (sessions []watchcheck.Session, err error) {
	recorded, err := w.sessions.Recorded(0)
	if err != nil {
		return nil, err
	}
	sizes := w.sizes(l)
	for i, s := range recorded {
		switch {
		case w.fromAny[i]:
			fitting, cut, err := w.fit(view, l, sizes, from, s)
			if err != nil {
				return nil, fmt.Errorf("not Reliable: session %d, begun with any state: %w", i, err)
			}
			if !cut {
				sessions = append(sessions, fitting)
			}
		case s.Initial != nil && s.After == 0: // cut before the initial state was complete
		default:
			sessions = append(sessions, s)
		}
	}
	return sessions, nil
}

// fit returns the session with the revision at which its initial state was taken: its first events
// show the state at that revision, and the rest follow it. cut reports that the watch was cut
// before the initial state was complete.
func (w *watcher) fit(view *watchcheck.View, l *timeline, sizes []size, from int64, s watchcheck.Session) (fitting watchcheck.Session, cut bool, err error) {
	err = fmt.Errorf("no state of the collection is the one with which it began, %v", s.Events)
	initial := map[string]int64{}
	newest := from
	for n := 0; ; n++ {
		if n > 0 {
			e := s.Events[n-1]
			if _, again := initial[e.Key]; again || e.Kind != watchcheck.Added {
				return s, false, err
			}
			initial[e.Key] = e.Revision
			newest = max(newest, e.Revision)
		}
		if n == len(s.Events) {
			return s, true, nil
		}
		before := s.Events[n].Revision
		if s.Events[n].Kind == watchcheck.Bookmark {
			before++
		}
		for _, at := range mayBegin(sizes, n, newest, before) {
			if !w.holds(l, at, initial) {
				continue
			}
			fitting := watchcheck.Session{After: at, Initial: initial, Events: s.Events[n:]}
			if wrong := view.Check([]watchcheck.Session{fitting}); wrong == nil {
				return fitting, false, nil
			} else {
				err = wrong
			}
		}
	}
}

// size is the number of objects of a collection from a revision on.
type size struct {
	revision int64
	n        int
}

// sizes returns the sizes of the watcher's collection, ascending by revision.
func (w *watcher) sizes(l *timeline) (all []size) {
	all = append(all, size{})
	for k, changes := range l.changes {
		if !k.in(w.resource.name, w.ns) || w.name != "" && !strings.HasSuffix(string(k), "/"+w.name) {
			continue
		}
		had := 0
		for _, c := range changes {
			has := 0
			if c.state.exists() && (w.half == "" || c.state.half == w.half) {
				has = 1
			}
			all = append(all, size{c.revision, has - had})
			had = has
		}
	}
	slices.SortStableFunc(all, func(a, b size) int { return cmp.Compare(a.revision, b.revision) })
	n, last := 0, all[:0] // of each revision
	for i, s := range all {
		n += s.n
		if i+1 == len(all) || all[i+1].revision != s.revision {
			last = append(last, size{s.revision, n})
		}
	}
	return last
}

// mayBegin returns newest and the later revisions before a revision at which objects of the
// collection changed, if it had n objects then.
func mayBegin(sizes []size, n int, newest, before int64) (all []int64) {
	i, found := slices.BinarySearchFunc(sizes, newest, func(s size, at int64) int { return cmp.Compare(s.revision, at) })
	if !found {
		i--
	}
	for ; i < len(sizes) && max(newest, sizes[i].revision) < before; i++ {
		if sizes[i].n == n {
			all = append(all, max(newest, sizes[i].revision))
		}
	}
	return all
}

// holds reports whether the collection at a revision equals said.
func (w *watcher) holds(l *timeline, revision int64, said map[string]int64) bool {
	n := 0
	for k, s := range l.all(w.resource.name, w.ns, w.half, revision) {
		_, key, _ := strings.Cut(string(k), "/")
		_, name, _ := strings.Cut(key, "/")
		if w.name != "" && name != w.name {
			continue
		}
		if n++; said[key] != s.revision {
			return false
		}
	}
	return n == len(said)
}
