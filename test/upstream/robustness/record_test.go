package robustness

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/client"
	"go.etcd.io/etcd/tests/v3/robustness/identity"
	"go.etcd.io/etcd/tests/v3/robustness/model"
	"go.etcd.io/etcd/tests/v3/robustness/report"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
)

// reader reads a mirror and records each read in the form of etcd's client, for etcd's validators.
// Its methods are for one goroutine.
type reader struct {
	mirror   *mirror.Mirror
	resource *mirror.Resource
	base     time.Time // that all clients of a run count from
	id       int
	defect   *defect // nil: none

	kv      *model.AppendableHistory
	watches []model.WatchOperation
	counts  counts
}

// counts are the numbers of operations that a reader recorded.
type counts struct {
	present, past int // reads of the present and of a revision
	events, marks int // of watches: events, and progress without events
	// watches that began at a revision of the past, and watches that ended with an error
	resumed, ended int
	// operations that the mirror refused as compacted, and revisions of more than one event
	refused, atomic int
}

func newReader(m *mirror.Mirror, r *mirror.Resource, ids identity.Provider, base time.Time, d *defect) *reader {
	return &reader{mirror: m, resource: r, base: base, id: ids.NewClientID(), defect: d, kv: model.NewAppendableHistory(ids)}
}

// report returns all recorded operations.
func (r *reader) report() report.ClientReport {
	return report.ClientReport{ClientID: r.id, KeyValue: r.kv.Operations(), Watch: r.watches}
}

// read reads the keys start <= key < end, or the key start if end is empty, linearizably (I6) if
// rev is 0 and otherwise exactly at rev; limit 0 means all. The recorded revision of the answer is
// that of the store, as in etcd's header.
func (r *reader) read(ctx context.Context, start, end string, rev mirror.Revision, limit int) error {
	called := time.Since(r.base)
	current, err := r.mirror.ReadRevision(ctx)
	if err != nil {
		return err
	}
	if !r.defect.is(readsWithoutWait) {
		if err := r.mirror.Wait(ctx, current); err != nil {
			return err
		}
	}
	latest, err := r.resource.Latest()
	if err != nil {
		return err
	}
	snapshot := latest
	if rev != 0 {
		at := rev
		// A read at the revision of the answer is one of the latest state too: another validator
		// would find that.
		if r.defect.is(readsRevisionBefore) && rev < latest.Rev {
			at--
		}
		if snapshot, err = r.resource.At(at); err != nil {
			return err
		}
	}
	answer := &clientv3.GetResponse{Header: &etcdserverpb.ResponseHeader{Revision: latest.Rev}}
	if end == "" {
		if e, ok := snapshot.Get(start); ok {
			answer.Kvs, answer.Count = []*mvccpb.KeyValue{keyValue(e)}, 1
		}
	} else {
		for e := range snapshot.All(start, end) {
			if limit > 0 && len(answer.Kvs) == limit {
				break
			}
			answer.Kvs = append(answer.Kvs, keyValue(e))
		}
		count, _ := snapshot.Count(start, end)
		answer.Count = int64(count)
	}
	r.kv.AppendRange(start, end, rev, int64(limit), false, called, time.Since(r.base), answer, nil)
	if rev == 0 {
		r.counts.present++
	} else {
		r.counts.past++
	}
	return nil
}

// keyValue returns an entry in the form of etcd's client.
func keyValue(e *mirror.Entry) *mvccpb.KeyValue {
	return &mvccpb.KeyValue{
		Key:            []byte(e.Key()),
		Value:          e.Value(),
		CreateRevision: e.CreateRevision(),
		ModRevision:    e.ModRevision(),
		Version:        int64(e.WriteCount()),
	}
}

// event returns an event in the form of etcd's client.
func event(e *mirror.Event) *clientv3.Event {
	out := &clientv3.Event{Type: mvccpb.Event_PUT}
	if e.Entry != nil {
		out.Kv = keyValue(e.Entry)
	} else {
		out.Type, out.Kv = mvccpb.Event_DELETE, &mvccpb.KeyValue{Key: []byte(e.Key()), ModRevision: e.Rev}
	}
	if e.Prev != nil {
		out.PrevKv = keyValue(e.Prev)
	}
	return out
}

// watching is a cursor and the watch operation that is recorded of it.
type watching struct {
	*reader
	cursor    *mirror.Cursor
	operation model.WatchOperation
	only      string            // the key of the events that are recorded; empty: all
	pending   []*clientv3.Event // of a revision of which events are still to come
}

// watch records a cursor that begins after the revision and selects key, or all keys with that
// prefix.
func (r *reader) watch(key string, prefix bool, after mirror.Revision, open func(after mirror.Revision) (*mirror.Cursor, error)) (*watching, error) {
	request := model.WatchRequest{Key: key, Revision: after + 1, WithPrefix: prefix, WithProgressNotify: true, WithPrevKV: true}
	if r.defect.is(startsOneLate) {
		after++
	}
	cursor, err := open(after)
	if err != nil {
		return nil, err
	}
	return &watching{reader: r, cursor: cursor, operation: model.WatchOperation{Request: request}}, nil
}

// next records the events that are due, at most limit, and the position as progress if progress is
// true. Events of one revision are one answer, as in etcd: Cursor.Position shows that a revision is
// complete (I4).
func (w *watching) next(limit int, progress bool) error {
	if w.defect.is(announcesProgress) {
		w.answer(w.mirror.PublishedRevision(), nil)
	}
	events, err := w.cursor.Next(nil, limit)
	complete := w.cursor.Position()
	if w.defect.is(splitsRevisions) {
		complete = max(complete, w.mirror.PublishedRevision())
	}
	for _, e := range events {
		if w.only == "" || w.only == e.Key() {
			w.pending = append(w.pending, event(e))
		}
	}
	n := 0
	for n < len(w.pending) && w.pending[n].Kv.ModRevision <= complete {
		n++
	}
	due := w.pending[:n:n]
	w.pending = w.pending[n:]
	if w.defect != nil && w.defect.events != nil {
		due = w.defect.events(due)
	}
	if len(due) > 0 {
		w.answer(w.cursor.Position(), due)
		w.counts.events += len(due)
		for i := 1; i < len(due); i++ {
			if due[i].Kv.ModRevision == due[i-1].Kv.ModRevision {
				w.counts.atomic++
			}
		}
	}
	if err != nil {
		w.operation.Responses = append(w.operation.Responses, model.WatchResponse{Time: time.Since(w.base), Error: err.Error()})
		w.counts.ended++
		return err
	}
	if progress && len(w.pending) == 0 {
		w.answer(w.cursor.Position(), nil)
		w.counts.marks++
	}
	return nil
}

// answer records one response; without events it is progress.
func (w *watching) answer(rev mirror.Revision, events []*clientv3.Event) {
	response := clientv3.WatchResponse{Header: &etcdserverpb.ResponseHeader{Revision: rev}, Events: events}
	w.operation.Responses = append(w.operation.Responses, client.ToWatchResponse(response, w.base))
}

// close ends the watch.
func (w *watching) close() {
	w.cursor.Unfollow()
	w.watches = append(w.watches, w.operation)
}

// retriable reports whether another operation may follow one that failed with err: the mirror
// returned the error before any data, or the connection to etcd was lost.
func retriable(err error) bool {
	return errors.Is(err, mirror.ErrNotReady) || errors.Is(err, mirror.ErrCompacted) || errors.Is(err, mirror.ErrFutureRevision) || disconnected(err)
}

// disconnected reports whether the connection of a recording client to etcd was lost. It waits 100
// ms for an answer to a keepalive, so that happens on a busy machine. The validators take the
// request for one that may have had its effect.
func disconnected(err error) bool { return status.Code(err) == codes.Unavailable }

func (c counts) String() string {
	return fmt.Sprintf("%d latest reads, %d reads at a revision; watches: %d events, %d of them in the revision of the event before, "+
		"%d progress notifications, %d resumed, %d ended early; %d operations refused as compacted",
		c.present, c.past, c.events, c.atomic, c.marks, c.resumed, c.ended, c.refused)
}

func (c *counts) add(o counts) {
	c.present += o.present
	c.past += o.past
	c.events += o.events
	c.marks += o.marks
	c.resumed += o.resumed
	c.ended += o.ended
	c.refused += o.refused
	c.atomic += o.atomic
}
