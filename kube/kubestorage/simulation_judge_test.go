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
)

// simModel is the plain model of etcd: every revision of every object.
type simModel struct {
	lineages []*simStates // ascending
	bySeq    map[int]simChange
}

// simStates are the states of one lineage.
type simStates struct {
	base, last, compacted int64
	changes               []simChange            // of objects, in order
	versions              map[string][]simChange // of each key
}

// simChange is a write or deletion of an object.
type simChange struct {
	simItem
	Deleted bool
}

func newSimModel(lineages []lineage) (*simModel, error) {
	m := &simModel{bySeq: map[int]simChange{}}
	for _, l := range lineages {
		s := &simStates{base: l.base, last: l.last, compacted: l.compacted, versions: map[string][]simChange{}}
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
	switch {
	case !r.Done.Load():
		return "never answered"
	case r.Err == "unavailable":
		return ""
	case r.Forged && r.Err == "":
		return "a token that no server has sealed is accepted"
	case r.Err == "invalid":
		// The keys that sealed it are gone, also with a restore of etcd.
		if r.From != nil && (r.Forged || h.Forgotten > 0 || len(m.lineages) > 1) {
			return ""
		}
	case r.Err == "too large":
		// etcd had a later revision from the start, and the server has waited for it in vain.
		if r.From == nil && asked > 0 {
			return ""
		}
	case r.Err == "expired":
		if (h.expires(m, asked) || r.From != nil && h.Forgotten > 0) && r.Verb == "list" {
			return ""
		}
	case r.Verb != "list" && r.Verb != "get":
		return m.judgeWrite(r)
	case r.Verb == "get" && (r.Err == "" || r.Err == "not found"):
		return m.judgeGet(r, asked)
	case r.Verb == "list" && r.Err == "":
		return m.judgeList(r, asked)
	}
	return "wrong error"
}

// expires reports whether 410 is allowed for a revision: etcd has compacted it, a restore has
// removed it, or it is of the time between a restore and the list that follows.
func (h *simHistory) expires(m *simModel, rev int64) bool {
	s := m.states(rev)
	return rev > 0 && (h.Window || s == nil || rev < s.compacted || s != m.newest() || s.base > 1)
}

// judgeWrite: a write has the effect that it reports, once, and an update is made from the version
// before it.
func (m *simModel) judgeWrite(r *simRecord) string {
	c, written := m.bySeq[r.Seq]
	switch {
	case r.Verb != "delete" && written != (r.Err == ""):
		return "the answer contradicts etcd"
	case r.Err == "exists" && r.Verb == "create", r.Err == "not found" && r.Verb != "create", r.Err == "conflict":
		return ""
	case r.Err != "":
		return "wrong error"
	case r.Verb == "delete":
		s := m.states(r.Rev)
		if s == nil {
			return "deleted at a revision that etcd does not have"
		}
		old, had := s.at(r.Key, r.Rev-1)
		if _, remains := s.at(r.Key, r.Rev); !had || remains {
			return "nothing was deleted at the revision"
		}
		if old.Rev = r.Rev; old != r.Items[0] {
			return fmt.Sprintf("deleted %v", old)
		}
		return ""
	case c.simItem != r.Items[0]:
		return fmt.Sprintf("etcd has %v", c.simItem)
	}
	if r.Verb == "update" {
		old, had := m.states(c.Rev).at(r.Key, c.Rev-1)
		if !had || old.Count >= 0 && c.Count != old.Count+1 {
			return fmt.Sprintf("the update has lost %v", old)
		}
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
	if first > last && r.Err == "not found" {
		return "" // refused, or a revision that did not exist yet
	}
	return fmt.Sprintf("no state of revisions %d to %d has this", first, last)
}

func (m *simModel) judgeList(r *simRecord, asked int64) string {
	s := m.states(r.Rev)
	first, last := m.within(r, asked)
	switch {
	case r.From != nil, r.Match == metav1.ResourceVersionMatchExact, r.Match == "" && r.Limit > 0 && asked > 0:
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

// judgeWatch returns what is wrong with a watch, "" if nothing is: it delivers every change after
// where it begins, once and in order; a bookmark comes after all changes up to its revision; a
// watch that is open when all have caught up has delivered all.
func (h *simHistory) judgeWatch(m *simModel, w *simWatch) string {
	asked, _ := strconv.ParseInt(w.RV, 10, 64)
	switch {
	case w.Err == "other":
		return "wrong error"
	case w.Err == "expired" && asked > 0 && len(w.Events) == 0 && !h.expires(m, asked):
		return "expired, and etcd has the revision"
	case w.Err == "too large" && asked <= w.Began && !w.Initial:
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
