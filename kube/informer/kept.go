package informer

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/stratakube/strata/mirror"
)

// kept has the objects of a source that keeps them, as they were last decoded. A store of client-go
// shows such an object while a newer state, or the same one after its key was removed, cannot be
// decoded: a policy does not cease to exist because it cannot be read.
type kept struct {
	mu      sync.Mutex            // leaf
	objects map[string]keptObject // by key of etcd
}

type keptObject struct {
	entry *mirror.Entry
	obj   any
}

// last returns the object of a key as it was last decoded, false if it never was.
func (k *kept) last(key string) (keptObject, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	o, ok := k.objects[key]
	return o, ok
}

func (k *kept) put(e *mirror.Entry, obj any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.objects == nil {
		k.objects = map[string]keptObject{}
	}
	k.objects[e.Key()] = keptObject{e, obj}
}

func (k *kept) drop(key string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.objects, key)
}

// dropGone drops the objects whose keys are not in a version.
func (k *kept) dropGone(snap mirror.Snapshot) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key := range k.objects {
		if _, ok := snap.Get(key); !ok {
			delete(k.objects, key)
		}
	}
}

// keeper follows a source that keeps its objects, on one goroutine.
type keeper struct {
	in     *Informer
	source *Source
	failed map[string]*mirror.Entry // by key of etcd; they are tried again
}

// load decodes the objects of the newest version that are not kept yet. It returns the version, and
// false when ctx has ended.
func (k *keeper) load(ctx context.Context) (mirror.Snapshot, bool) {
	for {
		if err := k.source.Resource.WaitReady(ctx); err != nil {
			<-ctx.Done() // the mirror may have closed before
			return mirror.Snapshot{}, false
		}
		snap, err := k.source.Resource.Latest()
		if err != nil {
			continue // it is being relisted again
		}
		k.failed = map[string]*mirror.Entry{}
		k.in.view.kept.dropGone(snap)
		for e := range snap.All("", "") {
			if was, ok := k.in.view.kept.last(e.Key()); !ok || was.entry != e {
				k.decode(ctx, e)
			}
			if ctx.Err() != nil {
				return mirror.Snapshot{}, false
			}
		}
		return snap, true
	}
}

// decode keeps the object of an entry, or leaves the last one if it cannot be decoded.
func (k *keeper) decode(ctx context.Context, e *mirror.Entry) {
	obj, err := k.source.Shared(ctx, e)
	if err == nil {
		delete(k.failed, e.Key())
		k.in.view.kept.put(e, obj)
		return
	}
	if k.failed[e.Key()] != e && ctx.Err() == nil {
		k.in.report(ctx, fmt.Errorf("decode %s: %w", e.Key(), err))
	}
	k.failed[e.Key()] = e
}

// begin returns a version all of whose objects are kept, and false when ctx has ended: until then
// the informer has not synced, as one of client-go whose list fails.
func (k *keeper) begin(ctx context.Context) (mirror.Snapshot, bool) {
	for pause := firstRetry; ; pause = min(2*pause, lastRetry) {
		snap, ok := k.load(ctx)
		if !ok || len(k.failed) == 0 {
			return snap, ok
		}
		if !sleep(ctx, pause) {
			return snap, false
		}
	}
}

// follow keeps the objects of events after a version, until ctx ends.
func (k *keeper) follow(ctx context.Context, snap mirror.Snapshot) {
	cursor := snap.Cursor("", "")
	for ctx.Err() == nil {
		changed := cursor.Changed()
		events, err := cursor.Next(nil, readAhead)
		if err != nil {
			var ok bool
			if snap, ok = k.load(ctx); !ok {
				return
			}
			cursor = snap.Cursor("", "")
			continue
		}
		for _, ev := range events {
			if ev.Entry != nil {
				k.decode(ctx, ev.Entry)
				continue
			}
			delete(k.failed, ev.Key())
			k.in.view.kept.drop(ev.Key())
		}
		if len(events) == 0 {
			k.wait(ctx, changed)
		}
	}
}

// wait returns when there may be events, or ctx has ended. Meanwhile it tries again to decode.
func (k *keeper) wait(ctx context.Context, changed <-chan struct{}) {
	for pause := firstRetry; len(k.failed) > 0; pause = min(2*pause, lastRetry) {
		timer := time.NewTimer(pause)
		select {
		case <-changed:
		case <-ctx.Done():
		case <-timer.C:
			for _, e := range k.failed {
				k.decode(ctx, e)
			}
			continue
		}
		timer.Stop()
		return
	}
	select {
	case <-changed:
	case <-ctx.Done():
	}
}
