package kubestorage_test

import (
	"fmt"
	"maps"
	"slices"
	"sort"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/kube/continuetoken"
)

// simModel is the plain model of etcd: every revision of every object.
type simModel struct {
	lineages []*simStates // ascending
	bySeq    map[int]simChange
	again    []simChange // writes that etcd has a second time
}

// simStates are the states of one lineage.
type simStates struct {
	base, last  int64
	compactions []compaction
	changes     []simChange            // of objects, in order
	versions    map[string][]simChange // of each key
}

// simChange is a write or deletion of an object.
type simChange struct {
	simItem
	Deleted bool
}

func newSimModel(lineages []lineage) (*simModel, error) {
	m := &simModel{bySeq: map[int]simChange{}}
	for _, l := range lineages {
		s := &simStates{base: l.base, last: l.last, compactions: l.compactions, versions: map[string][]simChange{}}
		for _, c := range l.changes {
			key, ok := strings.CutPrefix(string(c.Key), simRoot)
			if !ok {
				continue
			}
			change := simChange{simItem: simItem{Key: key, Rev: c.ModRevision}, Deleted: c.Deleted}
			if !c.Deleted {
				obj, err := runtime.Decode(simCodec, c.Value)
				if err != nil {
					return nil, err
				}
				change.simItem = simItemOf(obj)
				change.Rev = c.ModRevision
				if _, again := m.bySeq[change.Seq]; !again {
					m.bySeq[change.Seq] = change
				} else if change.Rev > l.base {
					m.again = append(m.again, change)
				}
			}
			s.changes = append(s.changes, change)
			s.versions[key] = append(s.versions[key], change)
		}
		m.lineages = append(m.lineages, s)
	}
	return m, nil
}

// states returns the lineage that has the revision, nil if none has.
func (m *simModel) states(rev int64) *simStates {
	for _, s := range slices.Backward(m.lineages) {
		if rev >= s.base && rev <= s.last {
			return s
		}
	}
	return nil
}

func (m *simModel) newest() *simStates { return m.lineages[len(m.lineages)-1] }

// at returns an object at a revision.
func (s *simStates) at(key string, rev int64) (simItem, bool) {
	versions := s.versions[key]
	i := sort.Search(len(versions), func(i int) bool { return versions[i].Rev > rev })
	if i == 0 || versions[i-1].Deleted {
		return simItem{}, false
	}
	return versions[i-1].simItem, true
}

// list returns the selected objects at a revision, ordered by key.
func (s *simStates) list(rev int64, selector simSelector) (all []simItem) {
	for _, key := range slices.Sorted(maps.Keys(s.versions)) {
		if x, ok := s.at(key, rev); ok && selector.matches(x) {
			all = append(all, x)
		}
	}
	return all
}

// events returns the events of a watch with the selector after a revision.
func (s *simStates) events(after int64, selector simSelector) (all []simEvent) {
	first := sort.Search(len(s.changes), func(i int) bool { return s.changes[i].Rev > after })
	for _, c := range s.changes[first:] {
		old, had := s.at(c.Key, c.Rev-1)
		before, now := had && selector.matches(old), !c.Deleted && selector.matches(c.simItem)
		switch {
		case now && before:
			all = append(all, simEvent{Type: watch.Modified, simItem: c.simItem})
		case now:
			all = append(all, simEvent{Type: watch.Added, simItem: c.simItem})
		case before:
			old.Rev = c.Rev
			all = append(all, simEvent{Type: watch.Deleted, simItem: old})
		}
	}
	return all
}

// judge returns what is wrong with a history.
func (h *simHistory) judge() (wrong []string) {
	m, err := newSimModel(h.Lineages)
	if err != nil {
		return []string{err.Error()}
	}
	wrong = append(wrong, h.Left...)
	for _, c := range m.again {
		wrong = append(wrong, fmt.Sprintf("etcd has %v twice", c))
	}
	wrong = append(wrong, h.judgeDeletions(m)...)
	for _, r := range h.Records {
		if text := h.judgeRecord(m, r); text != "" {
			wrong = append(wrong, text+"\n  "+r.String())
		}
	}
	for _, w := range h.Watches {
		if text := h.judgeWatch(m, w); text != "" {
			wrong = append(wrong, text+"\n  "+w.String())
		}
	}
	return wrong
}

// judgeRecord returns what is wrong with a request, "" if nothing is.
func (h *simHistory) judgeRecord(m *simModel, r *simRecord) string {
	asked, _ := strconv.ParseInt(r.RV, 10, 64)
	if r.From != nil {
		asked = r.From.Rev
	}
	read := r.Verb == "list" || r.Verb == "get"
	switch {
	case !r.Done.Load():
		return "never answered"
	case r.Err == "unavailable" && r.Final:
		return "refused, and all faults were repaired"
	case !read:
		return m.judgeWrite(r)
	case r.Err == "unavailable":
		return ""
	case r.Forged && r.Err == "":
		return "a token that no server has sealed is accepted"
	case r.Err == "invalid":
		if r.Forged || h.forgotten(m, r) {
			return ""
		}
	case r.Err == "too large":
		// etcd had a later revision from the start, and the server has waited for it in vain.
		if r.From == nil && asked > r.Floor {
			return ""
		}
	case r.Err == "expired":
		// A list of before the history in memory is read from etcd, and by a replica from a feed,
		// which has no older history.
		if r.Verb == "list" && (m.lost(asked, r.Ended) || h.forgotten(m, r) || r.Server == simReplica && h.dropped(m, r.Server, r.Process, r.Floor, asked, r.Ended)) {
			return ""
		}
	case r.Verb == "get" && (r.Err == "" || r.Err == "not found"):
		return m.judgeGet(r, asked)
	case r.Verb == "list" && r.Err == "":
		return m.judgeList(r, asked)
	}
	return "wrong error"
}

// forgotten reports whether the key that sealed the token of a page may be gone before the answer:
// the keys were deleted, or a restore of etcd has removed them.
func (h *simHistory) forgotten(m *simModel, r *simRecord) bool {
	restored := len(m.lineages) > 1 && m.lineages[1].base <= r.Ended
	return r.From != nil && continuetoken.Sealed(r.From.Next) && (restored || h.Forgotten > 0 && h.Forgotten <= r.Ended)
}

// lost reports whether etcd had no longer a revision when it was at another one: it was compacted,
// or a restore has removed it.
func (m *simModel) lost(rev, now int64) bool {
	return rev > 0 && slices.ContainsFunc(m.lineages, func(s *simStates) bool {
		return s.base <= now && rev < s.base || slices.ContainsFunc(s.compactions, func(c compaction) bool { return c.at <= now && rev < c.rev })
	})
}

// judgeDeletions returns the deletions that etcd has and no request: each was reported, or is that
// of a request whose result is unknown.
func (h *simHistory) judgeDeletions(m *simModel) (wrong []string) {
	for _, s := range m.lineages {
		for _, c := range s.changes {
			if c.Deleted && !h.Transactions[c.Rev] && !slices.ContainsFunc(h.Records, func(r *simRecord) bool {
				return r.Verb == "delete" && r.Key == c.Key && (r.Err == "" && r.Rev == c.Rev || r.Err == "unavailable" && r.Began < c.Rev && c.Rev <= r.Ended)
			}) {
				wrong = append(wrong, fmt.Sprintf("%s is deleted at %d, and no request has reported that", c.Key, c.Rev))
			}
		}
	}
	return wrong
}

// judgeWrite: a write has the effect that it reports, once, and an update is made from the version
// before it. A refusal is true of a revision between call and answer.
func (m *simModel) judgeWrite(r *simRecord) string {
	c, written := m.bySeq[r.Seq]
	if r.Verb == "delete" {
		c.Rev, written = r.Rev, r.Err == ""
	}
	refused := func(is func(x simItem, ok bool) bool) string {
		for rev := r.Began; rev <= r.Ended; rev++ {
			if s := m.states(rev); s != nil && is(s.at(r.Key, rev)) {
				return ""
			}
		}
		return fmt.Sprintf("true of no revision from %d to %d", r.Began, r.Ended)
	}
	switch {
	case written && (c.Rev <= r.Began || c.Rev > r.Ended || m.states(c.Rev) == nil):
		return fmt.Sprintf("written at %d", c.Rev)
	case r.Err == "unavailable":
		return ""
	case written != (r.Err == ""):
		return "the answer contradicts etcd"
	case r.Err == "exists" && r.Verb == "create":
		return refused(func(_ simItem, ok bool) bool { return ok })
	case r.Err == "not found" && r.Verb != "create":
		return refused(func(_ simItem, ok bool) bool { return !ok })
	case r.Err == "conflict" && r.Precondition > 0:
		return refused(func(x simItem, ok bool) bool { return ok && x.Rev != r.Precondition })
	case r.Err != "":
		return "wrong error"
	}
	s := m.states(c.Rev)
	old, had := s.at(r.Key, c.Rev-1)
	switch {
	case had != (r.Verb != "create"):
		return fmt.Sprintf("done with %v", old)
	case r.Precondition > 0 && old.Rev != r.Precondition:
		return fmt.Sprintf("done with %v, and not of revision %d", old, r.Precondition)
	case r.Verb == "update" && old.Count >= 0 && c.Count != old.Count+1:
		return fmt.Sprintf("the update has lost %v", old)
	}
	if r.Verb == "delete" {
		if _, remains := s.at(r.Key, c.Rev); remains {
			return "nothing was deleted at the revision"
		}
		c.simItem = old
		c.Rev = r.Rev
	}
	if c.simItem != r.Items[0] {
		return fmt.Sprintf("etcd has %v", c.simItem)
	}
	return ""
}

// within returns the revisions that a read may be of: consistent reads of one that was the newest
// between call and answer, others of one that etcd had before the answer, and that is neither older
// than what was asked for nor than what the process has shown before.
func (m *simModel) within(r *simRecord, asked int64) (first, last int64) {
	if r.RV == "" {
		return r.Began, r.Ended
	}
	return max(asked, r.Floor), r.Ended
}

func (m *simModel) judgeGet(r *simRecord, asked int64) string {
	first, last := m.within(r, asked)
	for rev := last; rev >= first; rev-- {
		if s := m.states(rev); s != nil {
			x, ok := s.at(r.Key, rev)
			if ok == (r.Err == "") && (!ok || x == r.Items[0]) {
				return ""
			}
		}
	}
	return fmt.Sprintf("no state of revisions %d to %d has this", first, last)
}

// exact reports whether a list is of the revision that it asks for, which etcd may have answered.
func (r *simRecord) exact() bool {
	return r.From != nil || r.Match == metav1.ResourceVersionMatchExact || r.Match == "" && r.Limit > 0 && r.RV != "" && r.RV != "0"
}

func (m *simModel) judgeList(r *simRecord, asked int64) string {
	s := m.states(r.Rev)
	first, last := m.within(r, asked)
	if r.exact() {
		first, last = asked, asked
	}
	if s == nil || r.Rev < first || r.Rev > last {
		return fmt.Sprintf("not of the revisions %d to %d", first, last)
	}
	if r.Floor > s.last {
		return "of before a restore of etcd that the process has seen"
	}
	want := s.list(r.Rev, r.Selector)
	if r.From != nil {
		start := 0
		for f := r.From; f != nil; f = f.From {
			start += len(f.Items)
		}
		want = want[min(start, len(want)):]
	}
	limited := r.Limit > 0 && (r.RV != "0" || r.Next != "")
	rest := 0
	if limited && int64(len(want)) > r.Limit {
		rest = len(want) - int(r.Limit)
		want = want[:r.Limit]
	}
	switch {
	case !slices.Equal(want, r.Items):
		return fmt.Sprintf("etcd has %v", want)
	case r.Next == "" && rest > 0, r.Next != "" && rest == 0 && !m.unselected(r):
		return fmt.Sprintf("%d objects are left, and the continue token is %q", rest, r.Next)
	case r.Remaining >= 0 && r.Remaining != int64(rest):
		return fmt.Sprintf("remainingItemCount is %d, and %d are left", r.Remaining, rest)
	}
	return ""
}

// unselected reports whether objects follow the page that the selector does not select: a page that
// is read from etcd ends before them with a continue token.
func (m *simModel) unselected(r *simRecord) bool {
	all := m.states(r.Rev).list(r.Rev, simSelector{Namespace: r.Selector.Namespace})
	return len(r.Items) > 0 && r.Items[len(r.Items)-1].Key < all[len(all)-1].Key
}

// dropped reports whether a process may have no history after a revision that etcd still has: its
// history is bounded tightly, and the revision is not the newest; or etcd was restored, and the
// process, which had published floor at the begin, followed later: nothing shows that its history
// begins at or before the revision.
func (h *simHistory) dropped(m *simModel, server, process int, floor, rev, now int64) bool {
	if h.Window && rev < now {
		return true
	}
	s := m.states(rev)
	return s != nil && s.base > 1 && (floor < s.base || !slices.ContainsFunc(h.Records, func(r *simRecord) bool {
		return r.Shown && !r.exact() && r.Server == server && r.Process == process && r.Rev >= s.base && r.Rev <= rev
	}))
}

// judgeWatch returns what is wrong with a watch, "" if nothing is: it delivers every change after
// where it begins, once and in order; a bookmark comes after all changes up to its revision; a
// watch that is open when all have caught up has delivered all.
func (h *simHistory) judgeWatch(m *simModel, w *simWatch) string {
	asked, _ := strconv.ParseInt(w.RV, 10, 64)
	reached := max(asked, w.last(true), 1)
	switch {
	case w.RV == "":
		reached = max(reached, w.Began)
	case asked == 0:
		reached = max(reached, w.Floor)
	}
	switch {
	case w.Final && !w.Live:
		return "ended, and all faults were repaired"
	case !slices.Contains([]string{"", "unavailable", "too large", "expired"}, w.Err):
		return "wrong error"
	case w.Err == "expired" && !m.lost(reached, w.Ended) && !h.dropped(m, w.Server, w.Process, w.Floor, reached, w.Ended):
		return fmt.Sprintf("expired, and has the history after %d", reached)
	case w.Err == "too large" && (!w.Initial || asked <= w.Floor):
		return "wrong error"
	case w.Err != "" && len(w.Events) == 0:
		return ""
	}
	starts := []int64{asked}
	if w.Initial || asked == 0 {
		starts = nil
		first := max(asked, w.Floor)
		if w.RV == "" {
			first = w.Began
		}
		for _, s := range m.lineages {
			for rev := max(first, s.base); rev <= s.last; rev++ {
				starts = append(starts, rev)
			}
		}
		if len(w.Events) == 0 && !w.Live {
			return ""
		}
	}
	var text string
	for _, start := range slices.Backward(starts) {
		if text = m.follows(w, start); text == "" {
			return ""
		}
	}
	if len(starts) > 1 {
		text = fmt.Sprintf("from none of revisions %d to %d; from the oldest: %s", starts[0], starts[len(starts)-1], text)
	}
	return text
}

// follows compares a watch with the changes after a revision.
func (m *simModel) follows(w *simWatch, start int64) string {
	s := m.states(start)
	if s == nil {
		if len(w.Events) > 0 || w.Live && start <= m.newest().last {
			return "goes on from a revision that etcd does not have"
		}
		return ""
	}
	events, listing := w.Events, w.Initial || w.RV == "" || w.RV == "0"
	if listing {
		state := s.list(start, w.Selector)
		for i, x := range state {
			if i == len(events) && !w.Live {
				return "" // ended meanwhile
			}
			if i >= len(events) || events[i].Type != watch.Added || events[i].simItem != x {
				return fmt.Sprintf("initial event %d is not %v", i, x)
			}
		}
		events = events[len(state):]
	}
	want, at := s.events(start, w.Selector), start
	announced := !w.Initial
	for i, e := range events {
		switch {
		case e.Type == watch.Bookmark && e.End:
			if announced || e.Rev != start || i > 0 {
				return fmt.Sprintf("event %d ends the initial events", i)
			}
			announced = true
		case e.Type == watch.Bookmark:
			if e.Rev < at || e.Rev > s.last || len(want) > 0 && want[0].Rev <= e.Rev || !w.Bookmarks && !w.Initial {
				return fmt.Sprintf("event %d is a bookmark at %d after %d", i, e.Rev, at)
			}
			at = e.Rev
		case len(want) == 0 || e != want[0]:
			return fmt.Sprintf("event %d is %v, want the first of %v", i, e, want[:min(2, len(want))])
		default:
			want, at = want[1:], e.Rev
		}
	}
	switch {
	case w.Live && s != m.newest():
		return "goes on after a restore of etcd"
	case w.Live && (len(want) > 0 || !announced):
		return fmt.Sprintf("has not delivered %v", want)
	}
	return ""
}
