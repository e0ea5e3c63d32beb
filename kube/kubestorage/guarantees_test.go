package kubestorage

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"strconv"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/internal/test/watchcheck"
)

// resumingClient watches with one selection, and resumes.
type resumingClient struct {
	rnd      *rand.Rand
	selects  watchcheck.Select
	pred     storage.SelectionPredicate
	sessions []watchcheck.Session
}

// newResumingClient returns the client i: one third each selects every pod, the pods of a color,
// and one pod by name.
func newResumingClient(seed uint64, i, colors int) *resumingClient {
	c := &resumingClient{rnd: rand.New(rand.NewPCG(seed, uint64(i))), pred: storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: podAttrs, AllowWatchBookmarks: true}}
	color := fmt.Sprint(i % colors)
	switch i % 3 {
	case 0:
		c.selects = func(string, any) bool { return true }
	case 1:
		c.pred.Label = labels.SelectorFromSet(labels.Set{"color": color})
		c.selects = func(_ string, state any) bool { return state.(*example.Pod).Labels["color"] == color }
	default:
		c.pred.Field = fields.OneTermEqualSelector("metadata.name", "pod-"+color)
		c.selects = func(key string, _ any) bool { return key == "ns/pod-"+color }
	}
	return c
}

// run records sessions. Each starts after the last complete revision of the one before or, half of
// the time, at a random revision between that and from.
func (c *resumingClient) run(t *testing.T, f *fixture, from int64, sessions int) {
	after := from
	for range sessions {
		whole, ok := c.session(t, f, after)
		if !ok {
			return
		}
		if after = max(from, whole); c.rnd.IntN(2) == 0 {
			after = from + c.rnd.Int64N(after-from+1)
		}
	}
}

// session records up to 30 events after the revision. It returns the revision up to which the
// client has every event.
func (c *resumingClient) session(t *testing.T, f *fixture, after int64) (whole int64, ok bool) {
	w, err := f.Watch(contextFor(t), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(after), Predicate: c.pred})
	if err != nil {
		t.Errorf("watch after %d: %v", after, err)
		return 0, false
	}
	defer w.Stop()
	session := watchcheck.Session{After: after}
	whole = after
	for range 1 + c.rnd.IntN(30) {
		e, err := recordedEvent(<-w.ResultChan())
		if err != nil {
			t.Errorf("watch after %d: %v", after, err)
			return 0, false
		}
		session.Events = append(session.Events, e)
		if whole = e.Revision; e.Kind != watchcheck.Bookmark {
			whole-- // more events of this revision may follow
		}
	}
	c.sessions = append(c.sessions, session)
	return whole, true
}

// TestWatch_Resumed_KeepsWatchGuarantees: watches with different selectors resume at random
// revisions while transactions change several pods each, with labels that start and cease to match.
// Every guarantee is checked by its validator.
func TestWatch_Resumed_KeepsWatchGuarantees(t *testing.T) {
	t.Parallel()
	const (
		watchers, reconnects = 60, 8
		colors               = 4
	)
	seed := testseed.New(t)
	f := setupInMemory(t)
	h := &watchcheck.History{Base: map[string]any{}}
	first := f.create(t, newPod("first"))[0] // selected only by clients without a selector
	h.From = int64(parseRevision(t, first.ResourceVersion))
	h.Base["ns/first"] = first

	writing, stop := context.WithCancel(contextFor(t))
	var writer sync.WaitGroup
	defer writer.Wait()
	defer stop()
	writer.Go(func() {
		rnd := rand.New(rand.NewPCG(seed, watchers))
		for n := 0; writing.Err() == nil; n++ {
			f.writeMany(t, writing, rnd, h, n, colors)
			select { // about as fast as an etcd
			case <-time.After(time.Millisecond):
			case <-writing.Done():
			}
		}
	})

	var clients []*resumingClient
	for i := range watchers {
		clients = append(clients, newResumingClient(seed, i, colors))
	}
	from := h.From
	var reading sync.WaitGroup
	for _, c := range clients {
		reading.Go(func() { c.run(t, f, from, reconnects) })
	}
	reading.Wait()
	stop()
	writer.Wait()
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
	events := 0
	for _, c := range clients {
		for _, s := range c.sessions {
			events += len(s.Events)
		}
		if err := h.View(c.selects).Check(c.sessions); err != nil {
			t.Errorf("watch of labels %q, fields %q: %v", c.pred.Label, c.pred.Field, err)
		}
	}
	t.Logf("%d changes, %d watches, %d events", len(h.Changes), watchers*reconnects, events)
}

// writeMany changes several pods in one transaction, for the n-th time, and adds the changes to the
// history.
func (f *fixture) writeMany(t testing.TB, ctx context.Context, rnd *rand.Rand, h *watchcheck.History, n, colors int) {
	const pods, atOnce = 12, 3
	var ops []clientv3.Op
	var changes []watchcheck.Change
	for k := range atOnce {
		pod := newPod(fmt.Sprintf("pod-%d", (n*atOnce+k)%pods))
		pod.Labels = map[string]string{"color": fmt.Sprint(rnd.IntN(colors))}
		change := watchcheck.Change{Key: pod.Namespace + "/" + pod.Name}
		key := testPrefix + "pods/" + change.Key
		if round := n * atOnce / pods; round%4 == 3 {
			ops = append(ops, clientv3.OpDelete(key))
		} else {
			data, err := runtime.Encode(f.codec, pod)
			if err != nil {
				t.Error(err)
				return
			}
			ops = append(ops, clientv3.OpPut(key, string(data)))
			change.State = pod
		}
		changes = append(changes, change)
	}
	r, err := f.client.Txn(context.WithoutCancel(ctx)).Then(ops...).Commit()
	if err != nil {
		t.Error(err)
		return
	}
	for _, c := range changes {
		c.Revision = r.Header.Revision
		h.Changes = append(h.Changes, c)
	}
	h.Through = r.Header.Revision
}

// recordedEvent returns an event in watchcheck's form. The zero Event, of a watch that has ended,
// is an error.
func recordedEvent(e watch.Event) (watchcheck.Event, error) {
	kind, err := watchcheck.KindOf(string(e.Type))
	if err != nil {
		return watchcheck.Event{}, fmt.Errorf("%w: %+v", err, e.Object)
	}
	o := e.Object
	if shared, ok := o.(runtime.CacheableObject); ok {
		o = shared.GetObject()
	}
	pod, ok := o.(*example.Pod)
	if !ok {
		return watchcheck.Event{}, fmt.Errorf("%v of a %T", kind, o)
	}
	out := watchcheck.Event{Kind: kind}
	if out.Revision, err = strconv.ParseInt(pod.ResourceVersion, 10, 64); err != nil {
		return out, err
	}
	if kind != watchcheck.Bookmark {
		out.Key = pod.Namespace + "/" + pod.Name
		return out, nil
	}
	rest := pod.DeepCopy()
	rest.ResourceVersion = ""
	if !reflect.DeepEqual(rest, &example.Pod{}) {
		out.Extra = fmt.Sprintf("%+v", rest)
	}
	return out, nil
}
