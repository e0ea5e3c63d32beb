package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/continuetoken"
	"github.com/stratakube/strata/mirror"
)

// podState is the compared part of a pod: its key, its revision, the id of its last write, and its
// labels and field that selectors name.
type podState struct {
	key         string // namespace/name
	revision    mirror.Revision
	write       string // unique to the write
	shard, rare string // "" if the pod has no such label
	node        string
}

func (p podState) String() string { return fmt.Sprintf("%s@%d:%s", p.key, p.revision, p.write) }

func stateOf(pod *example.Pod) (podState, error) {
	rev, err := strconv.ParseInt(pod.ResourceVersion, 10, 64)
	return podState{pod.Namespace + "/" + pod.Name, rev, pod.Annotations["write"], pod.Labels["shard"], pod.Labels["rare"], pod.Spec.NodeName}, err
}

// extent is the part of all pods that a list selects.
type extent struct {
	namespace    string // "" for all
	labels, node string // a label selector, and the selected node; "" for any
}

func (p extent) within(s podState) bool {
	return p.namespace == "" || strings.HasPrefix(s.key, p.namespace+"/")
}

func (p extent) selects(s podState) bool {
	if p.node != "" && s.node != p.node {
		return false
	}
	set := labels.Set{"shard": s.shard, "rare": s.rare}
	for name, value := range set {
		if value == "" {
			delete(set, name)
		}
	}
	return p.selector().Matches(set)
}

// selector returns the label selector, which is one of labelSelectors.
func (p extent) selector() labels.Selector {
	selector, err := labels.Parse(p.labels)
	if err != nil {
		panic(err)
	}
	return selector
}

func (p extent) selective() bool { return p.labels+p.node != "" }

// predicate selects the extent's pods; by node with the index that registries declare for it.
func (p extent) predicate() storage.SelectionPredicate {
	pred := storage.SelectionPredicate{Field: fields.Everything(), GetAttrs: podAttrs}
	if p.node != "" {
		pred = onNode(p.node, true)
	}
	pred.Label = p.selector()
	return pred
}

// pageSeen is one page of a walk.
type pageSeen struct {
	limit     int64
	end       int // items of the walk through this page
	remaining *int64
	more      bool
}

// pageWalk checks the pages of one walk: each on arrival, and all of them against etcd's contents.
type pageWalk struct {
	extent extent
	after  string // the walk started after this key
	rev    mirror.Revision
	items  []podState
	pages  []pageSeen
}

// add adds the next page.
func (w *pageWalk) add(limit int64, list *example.PodList) error {
	rev, err := strconv.ParseInt(list.ResourceVersion, 10, 64)
	if err != nil {
		return err
	}
	if len(w.pages) > 0 && rev != w.rev {
		return fmt.Errorf("page %d is of revision %d, those before are of %d", len(w.pages)+1, rev, w.rev)
	}
	w.rev = rev
	if limit > 0 && int64(len(list.Items)) > limit {
		return fmt.Errorf("%d items, the limit is %d", len(list.Items), limit)
	}
	last := w.last()
	for i := range list.Items {
		s, err := stateOf(&list.Items[i])
		if err != nil {
			return err
		}
		if s.key <= last {
			return fmt.Errorf("%s follows %s", s.key, last)
		}
		if s.revision > rev {
			return fmt.Errorf("%s in a list of revision %d", s, rev)
		}
		w.items, last = append(w.items, s), s.key
	}
	more := list.Continue != ""
	if more && limit == 0 {
		return errors.New("a token without a limit")
	}
	if list.RemainingItemCount != nil && (w.extent.selective() || !more) {
		return fmt.Errorf("remainingItemCount %d with a selector or on the last page", *list.RemainingItemCount)
	}
	w.pages = append(w.pages, pageSeen{limit, len(w.items), list.RemainingItemCount, more})
	return nil
}

// last returns the key after which the next page starts.
func (w *pageWalk) last() string {
	if len(w.items) > 0 {
		return w.items[len(w.items)-1].key
	}
	return w.after
}

// finish compares the walk, which is complete, with all pods at its revision.
func (w *pageWalk) finish(state []podState) error {
	var want []podState
	walked := 0 // objects that the walk had to read
	var keys []string
	for _, s := range state {
		if !w.extent.within(s) || s.key <= w.after {
			continue
		}
		walked++
		keys = append(keys, s.key)
		if w.extent.selects(s) {
			want = append(want, s)
		}
	}
	if !slices.Equal(w.items, want) {
		return fmt.Errorf("%d items %v, etcd has %d at revision %d: %v", len(w.items), w.items, len(want), w.rev, want)
	}
	for i, p := range w.pages {
		if p.more != (i < len(w.pages)-1) {
			return fmt.Errorf("page %d of %d has a token: %t", i+1, len(w.pages), p.more)
		}
		if !p.more {
			continue
		}
		if !w.extent.selective() {
			if left := int64(walked - p.end); left == 0 || p.remaining == nil || *p.remaining != left {
				return fmt.Errorf("page %d ends after %d of %d, and reports that %s remain", i+1, p.end, walked, show(p.remaining))
			}
			begin := 0
			if i > 0 {
				begin = w.pages[i-1].end
			}
			if int64(p.end-begin) != p.limit {
				return fmt.Errorf("page %d has %d items and a token, the limit is %d", i+1, p.end-begin, p.limit)
			}
		} else if p.end > 0 && keys[len(keys)-1] == w.items[p.end-1].key {
			return fmt.Errorf("page %d has a token, but is the last page", i+1)
		}
	}
	return nil
}

func show(n *int64) string {
	if n == nil {
		return "no number"
	}
	return fmt.Sprint(*n)
}

// pager walks an extent in pages, one in each round or fewer.
type pager struct {
	world  *walksWorld
	rnd    *rand.Rand
	extent extent
	limit  int64 // of all pages; 0 for another each time
	lazy   bool  // it may be overtaken by a compaction
	last   bool  // it ends soon
	opts   storage.ListOptions
	least  mirror.Revision // of the first page
	exact  bool            // whether it must be of that revision

	pin  mirror.Revision // must not be compacted; 0 for no limit
	walk pageWalk
	done bool
}

// begin draws the extent of a walk, and its first revision.
func (p *pager) begin(present mirror.Revision) {
	w := p.world
	p.extent = drawExtent(p.rnd)
	p.lazy = p.rnd.IntN(2) == 0
	if p.rnd.IntN(2) == 0 {
		p.limit = 1 + p.rnd.Int64N(40)
		if p.extent.namespace == "" {
			p.limit += 10
		}
	}
	p.opts = storage.ListOptions{Recursive: true, Predicate: p.extent.predicate()}
	p.least = present
	if form := p.rnd.IntN(5); form > 1 {
		p.least = w.floor + p.rnd.Int64N(present-w.floor+1)
		p.opts.ResourceVersion = fmt.Sprint(p.least)
		switch form {
		case 2:
			p.opts.ResourceVersionMatch = metav1.ResourceVersionMatchExact
		case 3:
			p.opts.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
		}
		p.exact = form != 3
	}
	p.walk = pageWalk{extent: p.extent}
	if !p.lazy {
		p.pin = p.least
	}
}

// page reads the next page, or none in this round.
func (p *pager) page(ctx context.Context) error {
	w := p.world
	if p.lazy && !p.last && len(p.walk.pages) > 0 && p.walk.rev >= w.floor && p.rnd.IntN(8) > 0 {
		return nil // may be overtaken meanwhile
	}
	limit := p.limit
	if limit == 0 {
		limit = 1 + p.rnd.Int64N(60)
	}
	if p.last {
		limit = 1000
	}
	p.opts.Predicate.Limit = limit
	list, err := w.list(ctx, p.rnd, p.extent, p.opts)
	rev := p.least
	if len(p.walk.pages) > 0 {
		rev = p.walk.rev
	}
	if apierrors.IsResourceExpired(err) {
		if rev >= w.floorC {
			return fmt.Errorf("410 of %d, compacted to %d: %w", rev, w.floorC, err)
		}
		return p.expire(err)
	}
	if err != nil {
		return fmt.Errorf("page %d at %d: %w", len(p.walk.pages)+1, rev, err)
	}
	if rev < w.floor && (p.exact || len(p.walk.pages) > 0) {
		return fmt.Errorf("page %d at %d, which is compacted: the floor is %d", len(p.walk.pages)+1, rev, w.floor)
	}
	if err := p.walk.add(limit, list); err != nil {
		return fmt.Errorf("page %d: %w", len(p.walk.pages)+1, err)
	}
	w.pages.Add(1)
	if len(p.walk.pages) == 1 && (p.walk.rev < p.least || p.exact && p.walk.rev != p.least) {
		return fmt.Errorf("the first page has revision %d, want %d", p.walk.rev, p.least)
	}
	if !p.lazy {
		p.pin = p.walk.rev
	}
	p.opts.ResourceVersion, p.opts.ResourceVersionMatch = "", ""
	if p.opts.Predicate.Continue = list.Continue; list.Continue != "" {
		if continuetoken.Sealed(list.Continue) {
			w.sealed.Add(1)
		} else {
			w.plain.Add(1)
		}
		return nil
	}
	p.done = true
	if p.walk.rev < w.floorC {
		return nil // may have been overtaken after the last page
	}
	state, err := w.state(ctx, p.walk.rev)
	if err != nil {
		return err
	}
	if p.pin = 0; p.walk.after != "" {
		w.continued.Add(1)
	}
	w.complete.Add(1)
	return p.walk.finish(state)
}

// expire continues in the present, if the walk had started. From then on it must complete.
func (p *pager) expire(err error) error {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return err
	}
	token := status.Status().Continue
	if len(p.walk.pages) == 0 {
		p.done = true
		if token != "" {
			return fmt.Errorf("a token for a list that had none: %w", err)
		}
		return nil
	}
	if token == "" {
		return fmt.Errorf("no continue token: %w", err)
	}
	p.world.expired.Add(1)
	p.walk = pageWalk{extent: p.extent, after: p.walk.last()}
	p.opts.Predicate.Continue = token
	p.lazy, p.exact = false, false
	// The next page is at least as new as the writes acknowledged by then.
	p.least = p.world.acked.Load()
	p.pin = p.least
	return nil
}
