package kubestorage_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/continuetoken"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/mirror"
)

// apply makes one step.
func (s *sim) apply(t *testing.T, op simOp) {
	rng := rand.New(rand.NewPCG(op.Seed, 3))
	// No timers of two steps end at once.
	time.Sleep(time.Duration(1 + rng.IntN(int(time.Millisecond))))
	server := s.servers[rng.IntN(len(s.servers))]
	c, m := server.client, s.etcd.members[rng.IntN(simMembers)]
	switch op.Do {
	case doWrite:
		if server.number == simReplica {
			server = s.followed()
		}
		s.write(server, rng)
	case doTxn:
		s.transaction(rng)
	case doGet:
		s.read(server, &simRecord{Verb: "get", Key: s.key(rng), RV: s.revision(rng)}, "", rng)
	case doList:
		s.list(server, rng)
	case doPage:
		s.page(server, rng)
	case doWatch:
		s.watch(server, &simWatch{RV: s.revision(rng), Initial: rng.IntN(3) == 0, Bookmarks: rng.IntN(2) == 0, Selector: simSelect(rng)}, rng)
	case doResume:
		if w := s.anyWatch(rng); w != nil && w.last(!s.exact) > 0 {
			w.end()
			s.watch(server, &simWatch{RV: strconv.FormatInt(w.last(!s.exact), 10), Bookmarks: w.Bookmarks, Selector: w.Selector}, rng)
		}
	case doEndWatch:
		if w := s.anyWatch(rng); w != nil {
			w.end()
		}
	case doPause:
		if w := s.anyWatch(rng); w != nil && !s.exact {
			w.pause()
		}
	case doDeliver:
		c.deliver(s.most(1+rng.IntN(4)), 1+rng.IntN(3), rng.IntN(20) == 0)
	case doProgress:
		c.progress(int64(rng.IntN(3)))
	case doAnswer:
		c.answer(rng.IntN(4))
	case doCalm:
		c.calm = !c.calm
	case doMove:
		c.at = m
	case doEnd:
		c.at = m
		if rng.IntN(2) == 0 {
			c.end()
		} else {
			c.disconnect()
		}
	case doFail:
		c.failing = !c.failing && rng.IntN(2) == 0
	case doLag:
		m.lags = !m.lags
	case doApply:
		s.etcd.apply(m, m.applied+1+int64(rng.IntN(8)))
	case doCutOff:
		if !s.exact {
			s.etcd.cutOff(m)
		}
	case doElect:
		s.etcd.elect(m)
		for _, server := range s.servers {
			server.client.leaderChanged(func() bool { return rng.IntN(2) == 0 })
		}
	case doForget:
		s.history.Forgotten = cmp.Or(s.history.Forgotten, s.etcd.Delete("/registry/strata/continue-token-keys"))
	case doCompact:
		if rev := s.etcd.Revision(); rev > s.etcd.base+4 {
			s.etcd.compact(rev - int64(rng.IntN(int(min(rev-s.etcd.base, 40)))))
		}
	case doRestore:
		s.etcd.restore(s.etcd.Revision() - int64(rng.IntN(20)))
		for _, server := range s.servers[:simReplica] {
			server.client.disconnect()
			synctest.Wait()
			server.client.end() // no stream of the cluster before goes on
		}
	case doRestart:
		s.stop(server)
		synctest.Wait()
		s.start(t, server)
	case doSleep:
		s.sleep(time.Duration(1+rng.IntN(100)) * []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second}[rng.IntN(3)])
	}
}

// transaction writes up to three keys in one revision.
func (s *sim) transaction(rng *rand.Rand) {
	keys := map[string]bool{}
	var ops []memory.Op
	for range 1 + rng.IntN(3) {
		key := s.key(rng)
		if keys[key] {
			continue
		}
		keys[key] = true
		if rng.IntN(3) == 0 {
			ops = append(ops, memory.Op{Key: simRoot + key, Delete: true})
			continue
		}
		ops = append(ops, s.put(key, rng))
	}
	s.history.Transactions[s.etcd.Txn(ops...)] = true
}

// put is the write of a new object that no update counts.
func (s *sim) put(key string, rng *rand.Rand) memory.Op {
	s.seq++
	data, err := runtime.Encode(simCodec, simPod(simItem{Key: key, Seq: s.seq, Tier: simTier(rng), Node: simNode(rng), Count: -1}))
	utilruntime.Must(err)
	return memory.Op{Key: simRoot + key, Value: string(data)}
}

// fill writes an object of every name.
func (s *sim) fill(rng *rand.Rand) {
	for i := range 2 * s.names {
		s.etcd.Txn(s.put(fmt.Sprintf("ns%d/pod%d", i%2, i/2), rng))
	}
}

// begin records a request of a client, which run sends. Too many waiting requests of a server are
// not begun.
func (s *sim) begin(server *simServer, r *simRecord, run func(ctx context.Context, store *kubestorage.Store) error) {
	if server.pending.Load() >= simPending && !r.Final {
		return
	}
	r.Op, r.Server, r.Process = s.step, server.number, server.process
	r.Began, r.Floor, r.Remaining = s.etcd.Revision(), server.floor.Load(), -1
	s.history.Records = append(s.history.Records, r)
	server.pending.Add(1)
	store, process := server.store, server.process
	// Before, small pages are etcd's, and memory may be behind them.
	ready := store.ReadinessCheck() == nil
	s.clients.Go(func() {
		defer server.pending.Add(-1)
		ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), simStep{}, r.Op), time.Minute)
		defer cancel()
		err := run(ctx, store)
		r.Ended = s.etcd.Revision()
		r.Err = simError(err)
		if r.Seq > 0 && (errors.Is(err, rpctypes.ErrNoLeader) || errors.Is(err, rpctypes.ErrLeaderChanged)) {
			r.Err = "unavailable" // a write returns the errors of etcd
		}
		if err != nil {
			r.Message = err.Error()
		}
		if r.Verb == "list" && err == nil && ready && r.From == nil && r.Match != metav1.ResourceVersionMatchExact && server.process == process {
			r.Shown = true
			server.floor.Store(max(server.floor.Load(), r.Rev))
		}
		r.Done.Store(true)
	})
}

// simError returns the class of an error.
func simError(err error) string {
	switch {
	case err == nil:
		return ""
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err):
		return "expired"
	case storage.IsTooLargeResourceVersion(err):
		return "too large"
	case storage.IsNotFound(err), apierrors.IsNotFound(err):
		return "not found"
	case storage.IsExist(err):
		return "exists"
	case storage.IsInvalidObj(err): // an unmet precondition
		return "conflict"
	case apierrors.IsBadRequest(err):
		return "invalid"
	case apierrors.IsTooManyRequests(err), storage.IsUnreachable(err), storage.IsRequestTimeout(err),
		apierrors.IsTimeout(err), apierrors.IsServerTimeout(err), apierrors.IsServiceUnavailable(err):
		return "unavailable"
	}
	for _, cause := range []error{mirror.ErrClosed, context.Canceled, context.DeadlineExceeded} {
		if strings.Contains(err.Error(), cause.Error()) { // the status of a watch has only its text
			return "unavailable"
		}
	}
	return "other"
}

// write creates, updates or deletes an object, on condition of its revision or of none.
func (s *sim) write(server *simServer, rng *rand.Rand) {
	s.seq++
	x := simItem{Key: s.key(rng), Seq: s.seq, Tier: simTier(rng), Node: simNode(rng)}
	r := &simRecord{Verb: []string{"create", "update", "update", "delete"}[rng.IntN(4)], Seq: x.Seq}
	if r.Verb != "create" && rng.IntN(4) == 0 {
		if versions := s.etcd.Changes(simRoot+x.Key, 0); len(versions) > 0 {
			r.Precondition = versions[max(0, len(versions)-1-rng.IntN(2))].ModRevision
		}
	}
	s.send(server, r, x)
}

// send sends a write.
func (s *sim) send(server *simServer, r *simRecord, x simItem) {
	key := "/pods/" + x.Key
	r.Key = x.Key
	var pre *storage.Preconditions
	if r.Precondition > 0 {
		pre = &storage.Preconditions{ResourceVersion: new(strconv.FormatInt(r.Precondition, 10))}
	}
	s.begin(server, r, func(ctx context.Context, store *kubestorage.Store) (err error) {
		out := &example.Pod{}
		switch r.Verb {
		case "create":
			err = store.Create(ctx, key, simPod(x), out, 0)
		case "update":
			err = store.GuaranteedUpdate(ctx, key, out, false, pre, storage.SimpleUpdate(func(old runtime.Object) (runtime.Object, error) {
				next := simPod(x)
				was := simItemOf(old)
				if was.Count >= 0 {
					was.Count++
				}
				next.Labels["count"] = strconv.Itoa(was.Count)
				next.ResourceVersion = old.(*example.Pod).ResourceVersion
				return next, nil
			}), nil)
		default:
			err = store.Delete(ctx, key, out, pre, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
		}
		if err == nil {
			r.Items = []simItem{simItemOf(out)}
			r.Rev = r.Items[0].Rev
		}
		return err
	})
}

func (s *sim) list(server *simServer, rng *rand.Rand) {
	r := &simRecord{Verb: "list", RV: s.revision(rng), Selector: simSelect(rng)}
	if rng.IntN(2) == 0 {
		r.Limit = int64(1 + rng.IntN(5))
	}
	if r.RV != "" {
		switch rng.IntN(3) {
		case 0:
			r.Match = metav1.ResourceVersionMatchNotOlderThan
		case 1:
			if r.RV != "0" {
				r.Match = metav1.ResourceVersionMatchExact
			}
		}
	}
	s.read(server, r, "", rng)
}

// page reads the next page of a list that has one.
func (s *sim) page(server *simServer, rng *rand.Rand) {
	var lists []*simRecord
	for _, r := range s.history.Records {
		if r.Done.Load() && r.Next != "" {
			lists = append(lists, r)
		}
	}
	if len(lists) == 0 {
		return
	}
	lists = lists[max(0, len(lists)-20):]
	from := lists[rng.IntN(len(lists))]
	r, token := &simRecord{Verb: "list", From: from, Limit: int64(1 + rng.IntN(5)), Selector: from.Selector}, from.Next
	if continuetoken.Sealed(token) && rng.IntN(10) == 0 {
		r.Forged = true
		at := len(token) / 2
		token = token[:at] + string('A'+(token[at]-'A'+1)%26) + token[at+1:]
	}
	s.read(server, r, token, rng)
}

// read sends a GET or a list, to the storage or to the read path.
func (s *sim) read(server *simServer, r *simRecord, token string, rng *rand.Rand) {
	r.HTTP, r.Protobuf = rng.IntN(2) == 0, rng.IntN(2) == 0
	reads := server.reads
	s.begin(server, r, func(ctx context.Context, store *kubestorage.Store) error {
		if r.Verb == "get" {
			out := &example.Pod{}
			err := readEither(ctx, reads, r, storage.ListOptions{ResourceVersion: r.RV, Predicate: storage.Everything}, out, func() error {
				return store.Get(ctx, "/pods/"+r.Key, storage.GetOptions{ResourceVersion: r.RV}, out)
			})
			if err == nil {
				r.Items = []simItem{simItemOf(out)}
			}
			return err
		}
		list := &example.PodList{}
		opts := storage.ListOptions{ResourceVersion: r.RV, ResourceVersionMatch: r.Match, Predicate: r.Selector.predicate(), Recursive: true}
		opts.Predicate.Limit, opts.Predicate.Continue = r.Limit, token
		if err := readEither(ctx, reads, r, opts, list, func() error { return store.GetList(ctx, r.Selector.key(), opts, list) }); err != nil {
			return err
		}
		r.Rev, _ = strconv.ParseInt(list.ResourceVersion, 10, 64)
		for i := range list.Items {
			r.Items = append(r.Items, simItemOf(&list.Items[i]))
		}
		if r.Next = list.Continue; list.RemainingItemCount != nil {
			r.Remaining = *list.RemainingItemCount
		}
		return nil
	})
}

// readEither answers a record by the read path, or by the storage if that passes it on.
func readEither(ctx context.Context, reads http.Handler, r *simRecord, opts storage.ListOptions, out runtime.Object, fromStorage func() error) error {
	if !r.HTTP {
		return fromStorage()
	}
	namespace, name := r.Selector.Namespace, ""
	if r.Verb == "get" {
		namespace, name, _ = strings.Cut(r.Key, "/")
	}
	answered, err := simRead(ctx, reads, r.Verb, namespace, name, simQuery(r.Selector, opts), r.Protobuf, out)
	if r.HTTP = answered; !answered {
		return fromStorage()
	}
	return err
}

// open returns the open watches, the oldest first.
func (s *sim) open() (open []*simWatch) {
	for _, w := range s.history.Watches {
		if !w.Closed {
			open = append(open, w)
		}
	}
	return open
}

// anyWatch returns an open watch, nil if there is none.
func (s *sim) anyWatch(rng *rand.Rand) *simWatch {
	open := s.open()
	if len(open) == 0 {
		return nil
	}
	return open[rng.IntN(len(open))]
}

// watch opens a watch. If too many are open the oldest ends.
func (s *sim) watch(server *simServer, w *simWatch, rng *rand.Rand) {
	if open := s.open(); len(open) >= simWatches && !w.Final {
		open[0].end()
	}
	w.HTTP = rng.IntN(2) == 0
	// upstream's default for requests of this form
	w.Initial = w.Initial || w.HTTP && w.Bookmarks && (w.RV == "" || w.RV == "0")
	w.Op, w.Server, w.Process, w.Began, w.Floor = s.step, server.number, server.process, s.etcd.Revision(), server.floor.Load()
	s.history.Watches = append(s.history.Watches, w)
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	opts := storage.ListOptions{ResourceVersion: w.RV, Predicate: w.Selector.predicate(), Recursive: true}
	opts.Predicate.AllowWatchBookmarks = w.Bookmarks
	if w.Initial {
		opts.SendInitialEvents, opts.ResourceVersionMatch, opts.Predicate.AllowWatchBookmarks = new(true), metav1.ResourceVersionMatchNotOlderThan, true
	}
	store, reads := server.store, server.reads
	s.clients.Go(func() {
		if !w.HTTP || !w.followHTTP(ctx, reads, opts) {
			w.follow(ctx, store, opts)
		}
		w.Ended = s.etcd.Revision()
	})
}
