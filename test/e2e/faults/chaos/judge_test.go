package chaos

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/stratakube/strata/internal/test/watchcheck"
)

// The checks, by name:
//
//	Acknowledged   an acknowledged write is in etcd's history, with the revision and the object of its answer
//	Explained      each change in etcd's history has exactly one request, which was not refused
//	Linearizable   the requests for each key, consistent lists included, can be put into one order that agrees with their
//	               answers and with real time (porcupine)
//	Fresh          a consistent read includes all changes, of any key, that a client received before the read began
//	Snapshot       a list is the state of etcd at the revision that it claims, every object as it was written, in order
//	Bounded        a read with a minimum or an exact revision meets it
//	Monotonic      one client's reads from the cache of one server never go back
//	Expired        no client gets 410 for a revision that etcd still has
//	Watch          the validators of watchcheck, and every event carries the object as it was written
//	Ended          every watch reaches the end of the round
//	Answered       every answer is of an expected kind
//	Available      most reads are answered, and within any ten seconds a fifth of the reads and a tenth of the writes
//	Mirror         at the end the cache of each server equals etcd
//
// The effect of an unacknowledged write is read from etcd's history, where each value occurs once:
// the write either took effect, at a known revision and at any time after it was sent, or it did
// not. Deletions have no value: an unacknowledged deletion in the history is attributed to one of
// the deletions with an unknown outcome.
const (
	acknowledged = "Acknowledged"
	explained    = "Explained"
	linearizable = "Linearizable"
	fresh        = "Fresh"
	snapshot     = "Snapshot"
	bounded      = "Bounded"
	monotonic    = "Monotonic"
	notExpired   = "Expired"
	watched      = "Watch"
	ended        = "Ended"
	answered     = "Answered"
	available    = "Available"
	mirrored     = "Mirror"
)

// checkBound is the time after which a search for an order is given up, which is a failure.
const checkBound = 2 * time.Minute

// verdict has the violations found, by check, and the numbers of operations judged.
type verdict struct {
	found map[string][]string

	writes, unknownWrites, happened int
	gets, lists, pages, unread      int
	steps                           int
	sessions, events                int
	readShares, writeShares         shares
	expiredWatches                  int
}

func (v *verdict) add(check, format string, args ...any) {
	v.found[check] = append(v.found[check], fmt.Sprintf(format, args...))
}

// judgeAvailability adds a violation if fewer than half of the reads were answered. Each fault ends
// soon and concerns one server, or a minority of etcd, so most reads have an answer. A round
// without answers would otherwise pass all checks.
func (v *verdict) judgeAvailability() {
	if reads := v.gets + v.lists; reads <= v.unread {
		v.add(available, "%d reads were answered, %d were not", reads, v.unread)
	}
}

// shares has the requests that ended within each second.
type shares []share

type share struct{ answered, all int }

// worstWindow is the number of consecutive seconds whose requests together have a floor. A single
// second has none: an election takes one to two, in which etcd confirms no read and no write, and a
// client waits up to six for an answer.
const worstWindow = 10

// judgeSeconds adds a violation if too few reads or writes within some window of worstWindow were
// answered. A fault of one server concerns a third of the requests; an etcd whose disk is full
// takes no write but deletions, a fifth of the writes.
func (v *verdict) judgeSeconds() {
	for _, of := range []struct {
		what   string
		shares shares
		floor  int // percent
	}{{"reads", v.readShares, 20}, {"writes", v.writeShares, 10}} {
		if worst, end := of.shares.worst(); worst.answered*100 < worst.all*of.floor {
			v.add(available, "in the seconds from %d to %d only %d of %d %s were answered", end-worstWindow, end, worst.answered, worst.all, of.what)
		}
	}
}

// worst returns the window with the lowest share, and its end.
func (s shares) worst() (worst share, end int) {
	for last := worstWindow; last <= len(s); last++ {
		var window share
		for _, second := range s[last-worstWindow : last] {
			window.answered += second.answered
			window.all += second.all
		}
		if worst.all == 0 || window.answered*worst.all < worst.answered*window.all {
			worst, end = window, last
		}
	}
	return worst, end
}

// ended counts a request in the second of its end.
func (s *shares) ended(at origin, how outcome) {
	for int(at.ret.Seconds()) >= len(*s) {
		*s = append(*s, share{})
	}
	second := &(*s)[int(at.ret.Seconds())]
	second.all++
	if how != unknown {
		second.answered++
	}
}

// String describes the shares: in how many seconds at least that part of the requests was answered.
// In a second in which no request ended, clients waited for answers.
func (s shares) String() string {
	var most, half, none int
	for _, second := range s {
		switch {
		case second.answered == 0:
			none++
		case second.answered*10 >= second.all*9:
			most++
		case second.answered*2 >= second.all:
			half++
		}
	}
	worst, _ := s.worst()
	return fmt.Sprintf("nine tenths in %d of %d seconds, half in %d more, none in %d, %d of %d in the worst ten", most, len(s), half, none, worst.answered, worst.all)
}

// operations is the number of judged requests: all that were answered, and unanswered writes.
func (v *verdict) operations() int { return v.writes + v.gets + v.lists + v.sessions }

// checks returns the names of the checks that found a violation.
func (v *verdict) checks() []string { return slices.Sorted(maps.Keys(v.found)) }

func (v *verdict) String() string {
	return fmt.Sprintf("%d requests judged: %d writes (%d not acknowledged, of which %d happened), %d GETs, %d LISTs (%d in pages), "+
		"%d watches with %d events (%d got 410 for a revision that etcd has); %d reads were not answered; answered reads: %v; answered writes: %v; %d steps of registers",
		v.operations(), v.writes, v.unknownWrites, v.happened, v.gets, v.lists, v.pages, v.sessions, v.events, v.expiredWatches, v.unread, v.readShares, v.writeShares, v.steps)
}

// report fails the test if there are violations.
func (v *verdict) report(t *testing.T, seed uint64) {
	t.Helper()
	const most = 6
	for _, check := range v.checks() {
		found := v.found[check]
		t.Errorf("%s=%d: %s: %d times\n\t%s", seedEnv, seed, check, len(found), strings.Join(found[:min(most, len(found))], "\n\t"))
	}
}

// judge judges all answers to the clients of a round.
func (r *round) judge(t *testing.T, h *watchcheck.History) *verdict {
	t.Helper()
	v := &verdict{found: map[string][]string{}}
	part := &watchcheck.History{From: h.From, Through: h.Through, Base: map[string]any{}}
	for _, res := range resources {
		of := h.Under("/registry/" + res.name + "/")
		for key, o := range of.Base {
			part.Base[res.name+"/"+key] = o
		}
		for _, c := range of.Changes {
			part.Changes = append(part.Changes, watchcheck.Change{Revision: c.Revision, Key: res.name + "/" + c.Key, State: c.State})
		}
	}
	l := newTimeline(part)
	for _, odd := range r.odd {
		v.add(answered, "%s", odd)
	}
	histories := r.writes(v, l)
	r.reads(v, l, histories)
	v.judgeAvailability()
	for _, o := range r.ops {
		if o.kind == get {
			v.readShares.ended(o.origin, o.outcome)
		} else {
			v.writeShares.ended(o.origin, o.outcome)
		}
	}
	for _, l := range r.lists {
		v.readShares.ended(l.origin, l.outcome)
	}
	v.judgeSeconds()
	r.fresh(v, l)
	r.monotonic(v, l)
	r.watches(v, l, part)
	for _, h := range histories {
		v.steps += len(h)
	}
	checkLinearizable(histories, checkBound, func(k key, result porcupine.CheckResult, info porcupine.LinearizationInfo) {
		r.mu.Lock()
		defer r.mu.Unlock()
		file := filepath.Join(t.ArtifactDir(), strings.ReplaceAll(string(k), "/", "_")+".html")
		v.add(linearizable, "%s: %v (see %s with -artifacts)%s", k, result, file, stuck(info, histories[k]))
		if f, err := os.Create(file); err == nil {
			// the picture is for debugging only
			_ = errors.Join(porcupine.Visualize(registers, info, f), f.Close())
		}
	})
	return v
}

// stuck describes the operation that the longest order found does not contain.
func stuck(info porcupine.LinearizationInfo, history []porcupine.Operation) string {
	best := []porcupine.Operation{}
	for _, partial := range info.PartialLinearizationsOperations() {
		for _, p := range partial {
			if len(p) > len(best) {
				best = p
			}
		}
	}
	in := map[any]bool{}
	state := register{}
	for _, o := range best {
		in[o.Input] = true
		state, _ = state.next(o.Input.(*step))
	}
	first := porcupine.Operation{Return: math.MaxInt64}
	for _, o := range history {
		if !in[o.Input] && o.Return < first.Return {
			first = o
		}
	}
	if first.Input == nil {
		return ""
	}
	s := first.Input.(*step)
	return fmt.Sprintf("; after %d of %d steps it is %+v, and %s cannot come (%v, %+v, want %+v, at %d)",
		len(best), len(history), state, s.what, s.outcome, s.got, s.want, s.at)
}

// writes judges writes against etcd's history and returns the steps of each key, those of reads of
// one key included.
func (r *round) writes(v *verdict, l *timeline) map[key][]porcupine.Operation {
	histories := map[key][]porcupine.Operation{}
	add := func(o *op, ended bool, s *step) {
		s.what = fmt.Sprintf("%v by client %d at replica %d", o.kind, o.client, o.replica)
		s.kind, s.want = o.kind, o.want
		histories[o.key] = append(histories[o.key], operation(o.origin, ended, s))
	}
	owners := map[key]map[string]*op{} // of deletions, by uid
	doubts := map[key][]*op{}          // deletions with an unknown outcome
	wrote := map[string]*op{}
	for _, o := range r.ops {
		if o.kind == get {
			continue
		}
		v.writes++
		if o.outcome == unknown {
			v.unknownWrites++
		}
		if o.kind == remove {
			switch o.outcome {
			case done:
				if owners[o.key] == nil {
					owners[o.key] = map[string]*op{}
				}
				if other := owners[o.key][o.got.uid]; other != nil {
					v.add(acknowledged, "two deletions of one object were acknowledged: %v and %v", other, o)
				}
				owners[o.key][o.got.uid] = o
			case unknown:
				doubts[o.key] = append(doubts[o.key], o)
			default:
				add(o, true, &step{outcome: o.outcome})
			}
			continue
		}
		wrote[o.value] = o
		at := l.values[o.value]
		if len(at) > 1 {
			v.add(explained, "written %d times: %v", len(at), o)
		}
		switch {
		case o.outcome == done:
			if had, _ := l.at(o.key, o.got.revision); had != o.got {
				v.add(acknowledged, "%v; etcd has %+v at that revision", o, had)
			}
			add(o, true, &step{outcome: done, got: o.got, at: o.got.revision})
		case o.outcome == unknown && len(at) == 1:
			v.happened++
			for _, c := range l.changes[o.key] {
				if c.state.value == o.value {
					add(o, false, &step{outcome: done, got: c.state, at: c.revision})
				}
			}
		case o.outcome != unknown && len(at) > 0:
			v.add(explained, "it was refused, and has happened: %v", o)
		case o.outcome != unknown:
			add(o, true, &step{outcome: o.outcome})
		}
	}
	for k, changes := range l.changes {
		if !r.registers(k) {
			continue
		}
		for _, c := range changes {
			if c.state.exists() && wrote[c.state.value] == nil {
				v.add(explained, "no client wrote %+v to %s", c.state, k)
			}
		}
		for _, d := range l.deletions(k) {
			if o := owners[k][d.last.uid]; o != nil {
				o.got.revision = d.revision
				add(o, true, &step{outcome: done, got: state{uid: d.last.uid}, at: d.revision})
				delete(owners[k], d.last.uid)
				continue
			}
			// One of several possible requests: the deletion is attributed to the earliest. As its
			// end is unknown, it may take effect at any time after that one was sent.
			var first *op
			for _, o := range doubts[k] {
				may := (o.want.uid == "" || o.want.uid == d.last.uid) && (o.want.revision == 0 || o.want.revision == d.last.revision)
				if may && (first == nil || o.call < first.call) {
					first = o
				}
			}
			if first == nil {
				v.add(explained, "no client deleted %s@%d of %s at %d", d.last.uid, d.last.revision, k, d.revision)
				continue
			}
			v.happened++
			copied := *first
			copied.want = state{}
			add(&copied, false, &step{outcome: done, got: state{uid: d.last.uid}, at: d.revision})
		}
	}
	for _, left := range owners {
		for _, o := range left {
			v.add(acknowledged, "%v; etcd has not deleted it", o)
		}
	}
	return histories
}

// registers reports whether clients write the key through the API, one at a time.
func (r *round) registers(k key) bool {
	for _, ns := range r.namespaces {
		if strings.Contains(string(k), "/"+ns+"/object-") {
			return true
		}
	}
	return false
}

// keys returns the keys that clients write in a collection.
func (r *round) keys(resource, namespace string) (all []key) {
	for _, ns := range r.namespaces {
		if namespace == "" || ns == namespace {
			for i := range namesPerKind {
				all = append(all, keyOf(resource, ns, fmt.Sprintf("object-%d", i)))
			}
		}
	}
	return all
}

// reads judges reads against etcd's history, and adds consistent ones to the steps of each key.
func (r *round) reads(v *verdict, l *timeline, histories map[key][]porcupine.Operation) {
	for _, o := range r.ops {
		if o.kind != get {
			continue
		}
		switch {
		case o.outcome == unknown:
			v.unread++
			continue
		case o.outcome == done && !l.validFrom(o.key, o.got, 0):
			v.add(snapshot, "%v: there was never such an object", o)
		case o.mode == notOlder && !l.validFrom(o.key, o.got, o.min):
			v.add(bounded, "%v: older than %d", o, o.min)
		}
		v.gets++
		if o.mode == present {
			s := &step{what: fmt.Sprintf("get by client %d at replica %d", o.client, o.replica), kind: get, outcome: o.outcome, got: o.got}
			histories[o.key] = append(histories[o.key], operation(o.origin, true, s))
		}
	}
	for _, q := range r.lists {
		switch {
		case q.fault != "":
			v.add(snapshot, "%v: %s", q, q.fault)
			continue
		case q.outcome == unknown:
			v.unread++
			continue
		case q.outcome == expired:
			v.lists++
			if at := max(q.asked, q.revision); at == 0 || at >= r.compacted.Load() {
				v.add(notExpired, "%v: etcd was compacted to %d", q, r.compacted.Load())
			}
			continue
		}
		v.lists++
		if q.pages > 0 {
			v.pages++
		}
		switch {
		case q.mode == exact && q.revision != q.asked, q.mode == notOlder && q.revision < q.asked:
			v.add(bounded, "%v: want revision %d", q, q.asked)
		}
		want := l.all(q.resource, q.namespace, q.half, q.revision)
		for _, k := range sortedKeys(want) {
			if got, ok := q.items[k]; !ok {
				v.add(snapshot, "%v: %s is missing, %+v", q, k, want[k])
			} else if got != want[k] {
				v.add(snapshot, "%v: %s is %+v, etcd had %+v", q, k, got, want[k])
			}
		}
		for _, k := range sortedKeys(q.items) {
			if _, ok := want[k]; !ok {
				v.add(snapshot, "%v: etcd had no %s, %+v", q, k, q.items[k])
			}
		}
		if q.mode != present || q.half != "" {
			continue // an object that the selector excludes may still exist
		}
		at := q.origin
		at.ret = q.fixed
		for _, k := range r.keys(q.resource, q.namespace) {
			s := &step{what: fmt.Sprintf("list by client %d at replica %d", q.client, q.replica), kind: get, outcome: missing, at: q.revision}
			if got, ok := q.items[k]; ok {
				s.outcome, s.got = done, got
			}
			histories[k] = append(histories[k], operation(at, true, s))
		}
	}
}

// fresh judges consistent reads by all earlier answers, of any key: revisions count the changes of
// all of etcd.
func (r *round) fresh(v *verdict, l *timeline) {
	type notice struct {
		at       time.Duration
		revision int64
	}
	var notices []notice
	for _, o := range r.ops {
		if o.outcome == done && o.got.revision > 0 {
			notices = append(notices, notice{o.ret, o.got.revision})
		}
	}
	for _, q := range r.lists {
		if q.outcome == done && q.fault == "" {
			notices = append(notices, notice{q.fixed, q.revision})
		}
	}
	slices.SortFunc(notices, func(a, b notice) int { return int(a.at - b.at) })
	for i := 1; i < len(notices); i++ {
		notices[i].revision = max(notices[i].revision, notices[i-1].revision)
	}
	before := func(at time.Duration) int64 {
		n := sort.Search(len(notices), func(i int) bool { return notices[i].at >= at })
		if n == 0 {
			return 0
		}
		return notices[n-1].revision
	}
	for _, o := range r.ops {
		if o.kind != get || o.mode != present || o.outcome != done && o.outcome != missing {
			continue
		}
		if min := before(o.call); !l.validFrom(o.key, o.got, min) {
			v.add(fresh, "%v: an earlier answer had revision %d", o, min)
		}
	}
	for _, q := range r.lists {
		if min := before(q.call); q.mode == present && q.outcome == done && q.fault == "" && q.revision < min {
			v.add(fresh, "%v: an earlier answer had revision %d", q, min)
		}
	}
}

// monotonic judges each client's reads from the cache of each server between two of its starts.
// Consistent GETs may be answered by etcd, which is ahead of the cache.
func (r *round) monotonic(v *verdict, l *timeline) {
	type server struct {
		client, replica int
		boot            int64
	}
	type reading struct {
		origin
		check func(min int64) (now int64, err string)
	}
	of := map[server][]reading{}
	add := func(o origin, check func(int64) (int64, string)) {
		if o.boot >= 0 {
			s := server{o.client, o.replica, o.boot}
			of[s] = append(of[s], reading{o, check})
		}
	}
	for _, o := range r.ops {
		if o.kind == get && o.mode != present && (o.outcome == done || o.outcome == missing) {
			add(o.origin, func(min int64) (int64, string) {
				if !l.validFrom(o.key, o.got, min) {
					return min, o.String()
				}
				return max(min, o.got.revision), ""
			})
		}
	}
	for _, q := range r.lists {
		if q.mode != exact && q.pages == 0 && q.outcome == done && q.fault == "" {
			add(q.origin, func(min int64) (int64, string) {
				if q.revision < min {
					return min, q.String()
				}
				return q.revision, ""
			})
		}
	}
	for _, readings := range of {
		slices.SortFunc(readings, func(a, b reading) int { return int(a.call - b.call) })
		min := int64(0)
		for _, each := range readings {
			now, wrong := each.check(min)
			if wrong != "" {
				v.add(monotonic, "%s: the same server had shown %d to the same client", wrong, min)
			}
			min = now
		}
	}
}

// watches judges all watches.
func (r *round) watches(v *verdict, l *timeline, h *watchcheck.History) {
	for _, w := range r.watchers {
		view := h.Under(w.resource.name + "/").View(w.selects)
		sessions, err := w.judged(view, l, h.From)
		if err == nil {
			err = view.Check(sessions)
		}
		if err != nil {
			v.add(watched, "%v: %v", w, err)
		}
		v.expiredWatches += len(w.expired)
		for _, e := range w.expired {
			if !e.by.historyLost(w.resource, e.after) {
				v.add(notExpired, "%v: a watch from %d was refused by replica %d with 410; etcd was compacted to %d", w, e.after, e.by.n, r.compacted.Load())
			}
		}
		v.sessions += len(w.fromAny)
		v.events += len(w.delivered)
		for _, e := range w.delivered {
			want, _ := l.at(e.key, e.state.revision)
			if e.kind == "DELETED" { // the state before the deletion
				want, _ = l.at(e.key, e.state.revision-1)
				want.revision = e.state.revision
			}
			if e.state != want {
				v.add(watched, "%v: session %d: %s %s with %+v, etcd has %+v", w, e.session, e.kind, e.key, e.state, want)
			}
		}
		if w.ended != nil {
			v.add(ended, "%v: %v", w, w.ended)
		}
	}
}
