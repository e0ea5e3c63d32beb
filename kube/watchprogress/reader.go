package watchprogress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

// Request requests bookmarks for the watches of the client's user below path, the path of a collection: /api/v1/configmaps. client is that
// of any group. Errors are API errors: 406 from a server without the form.
func Request(ctx context.Context, client rest.Interface, path string) (WatchProgress, error) {
	data, err := client.Get().AbsPath(path).SetHeader("Accept", MediaType).Do(ctx).Raw()
	if err != nil {
		return WatchProgress{}, err
	}
	var p WatchProgress
	if err := json.Unmarshal(data, &p); err != nil {
		return WatchProgress{}, fmt.Errorf("decode the watch progress of %s: %w", path, err)
	}
	if p.Kind != Kind || p.APIVersion != APIVersion {
		return WatchProgress{}, fmt.Errorf("%s answered a %s of %q, want a %s of %q", path, p.Kind, p.APIVersion, Kind, APIVersion)
	}
	return p, nil
}

// Pauses of a Reader between two requests for one read. Another request is needed only if the watch restarts meanwhile, or is on
// another server than the one that answered.
const (
	firstPause = 50 * time.Millisecond
	maxPause   = time.Second
)

// Reader makes reads of a Cache consistent. Concurrent calls of Wait share requests. Safe for concurrent use.
type Reader struct {
	cache   *Cache
	request func(context.Context) (WatchProgress, error)

	turn chan struct{} // has an element while a request is in flight
	mu   sync.Mutex    // leaf
	next *sharedRequest
}

// sharedRequest is one request, sent or not, and the calls that wait for it.
type sharedRequest struct {
	done   chan struct{} // closed with the answer
	answer WatchProgress
	err    error
}

// NewReader returns a Reader of a Cache, which a reflector of the same user feeds from path. The reflector should use the transport of
// client, so that the requests reach the server of its watch.
func NewReader(c *Cache, client rest.Interface, path string) *Reader {
	return newReader(c, func(ctx context.Context) (WatchProgress, error) { return Request(ctx, client, path) })
}

func newReader(c *Cache, request func(context.Context) (WatchProgress, error)) *Reader {
	return &Reader{cache: c, request: request, turn: make(chan struct{}, 1)}
}

// Wait returns a revision that the cache has reached: the cache has every write that was acknowledged before the call. The read after
// it is linearizable. Errors: those of Request, and the cause of ctx's end.
func (r *Reader) Wait(ctx context.Context) (revision int64, err error) {
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		p, err := r.share(ctx)
		if err != nil {
			return 0, err
		}
		if revision == 0 {
			revision = p.ResourceVersion // that of a later request is not needed
		}
		waitCtx, cancel := context.WithTimeoutCause(ctx, pause, errPause)
		err = r.cache.Wait(waitCtx, revision)
		cancel()
		if err == nil || !errors.Is(err, errPause) {
			return revision, err
		}
	}
}

var errPause = errors.New("the watch has not reported the revision yet")

// share returns the answer of a request that began after the call: the next one, never the one in flight. One of the calls that wait for
// it sends it; if that call's context ends meanwhile, another one does.
func (r *Reader) share(ctx context.Context) (WatchProgress, error) {
	r.mu.Lock()
	if r.next == nil {
		r.next = &sharedRequest{done: make(chan struct{})}
	}
	mine := r.next
	r.mu.Unlock()
	select {
	case <-mine.done:
		return mine.answer, mine.err
	case <-ctx.Done():
		return WatchProgress{}, context.Cause(ctx)
	case r.turn <- struct{}{}:
	}
	defer func() { <-r.turn }()
	select {
	case <-mine.done:
		return mine.answer, mine.err
	default:
	}
	r.mu.Lock()
	if r.next == mine {
		r.next = nil // later calls join another request
	}
	r.mu.Unlock()
	answer, err := r.request(ctx)
	if err != nil && ctx.Err() != nil {
		return WatchProgress{}, context.Cause(ctx)
	}
	mine.answer, mine.err = answer, err
	close(mine.done)
	return answer, err
}
