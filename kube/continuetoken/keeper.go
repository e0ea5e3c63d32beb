package continuetoken

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
)

const (
	// refreshInterval is how often the ring is read again: changes by other replicas or an operator
	// take effect here within that time. A guess: one read of one key.
	refreshInterval = time.Minute
	// readGap is the time between the starts of two reads: it bounds the load of invalid tokens on
	// etcd.
	readGap = 100 * time.Millisecond
	// readTimeout bounds one read, including its decryption and a write.
	readTimeout = 10 * time.Second
	// patience is how long a request waits for a read; answerTime is the part of its own deadline
	// reserved for the answer.
	patience   = 3 * time.Second
	answerTime = 250 * time.Millisecond
	// retryPause is the pause after the first attempt in the background to get a ring; it doubles.
	// Requests that need a ring read it themselves.
	retryPause = time.Second
	// minKeep is the lower bound of Options.Keep: other replicas seal with a replaced key until
	// they read the ring again, and clients request their next page after that.
	minKeep = 10 * refreshInterval
	// maxConflicts bounds the retries of a read after writes by other replicas.
	maxConflicts = 10
)

// Options configures a Keeper.
type Options struct {
	KV  clientv3.KV
	Key string // of the ring in etcd; the associated data of its encryption
	// Transformer encrypts the ring in etcd; nil stores it in plain text.
	Transformer value.Transformer
	// Seal creates a ring if there is none, replaces its keys, and reads it in the background.
	// Without Seal the ring is read when a sealed token has to be opened.
	Seal bool
	// ReadOnly makes the Keeper read the ring only. With Seal it reads in the background, and seals
	// with keys that others make; ErrUnavailable while there are none.
	ReadOnly bool
	// Rotation is how long a key seals before it is replaced; 0 disables rotation.
	Rotation time.Duration
	// Keep is how long a replaced key still opens; at least 10 minutes.
	Keep   time.Duration
	Logger *slog.Logger
}

// Keeper seals and opens tokens with the key ring of one etcd. Any replica may create the ring and
// change it, by compare-and-put, so that all use the same one. All methods may be called
// concurrently; with a cached ring they take no lock and send no request to etcd.
type Keeper struct {
	opts    Options
	stored  register
	current atomic.Pointer[ringState] // nil: never read
	// overdue: the current read takes longer than requests wait, so that further requests do not
	// wait for it.
	overdue atomic.Bool

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// mu is a leaf; it is not held during a wait.
	mu struct {
		sync.Mutex
		next    *ringRead // not started yet
		running bool      // a reader goroutine runs; it ends when next is nil
	}
	// Owned by the reader goroutine.
	began   time.Time // of the last read
	checked time.Time // when the stored value was last decrypted
	failing bool      // reads fail, which has been logged
	stuck   bool      // the ring cannot be changed, which has been logged
}

// ringState is the result of a read. It is immutable.
type ringState struct {
	ring *ring     // nil: there is no ring
	at   time.Time // when it was read
	// The stored value, encrypted, and its revision: 0 if there is none.
	data []byte
	mod  int64
}

// ringRead is one read of the ring, shared by all waiting requests.
type ringRead struct {
	done chan struct{}
	err  error // written before done is closed
}

// NewKeeper returns a Keeper; with Seal it begins to read the ring. Close ends it.
func NewKeeper(o Options) *Keeper {
	return newKeeper(o, etcdKey{o.KV, o.Key})
}

func newKeeper(o Options, stored register) *Keeper {
	if o.Transformer == nil {
		o.Transformer = identity.NewEncryptCheckTransformer()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	o.Keep = max(o.Keep, minKeep)
	k := &Keeper{opts: o, stored: stored}
	k.ctx, k.cancel = context.WithCancel(context.Background())
	if o.Seal {
		k.wg.Go(k.maintain)
	}
	return k
}

// Close ends all reads and returns when they have ended.
func (k *Keeper) Close() {
	k.mu.Lock()
	k.cancel()
	k.mu.Unlock()
	k.wg.Wait()
}

// Seal returns a token for the list. Errors: ErrUnavailable, ctx's.
func (k *Keeper) Seal(ctx context.Context, scope Scope, t Token) (string, error) {
	h := k.current.Load()
	if h == nil || h.ring == nil {
		var err error
		if h, err = k.fresh(ctx); err != nil {
			return "", err
		}
		if h.ring == nil {
			return "", ErrUnavailable // only if this Keeper makes no ring
		}
	}
	return h.ring.keys[0].seal(scope, t), nil
}

// Open reads a sealed token of the list. Errors: ErrInvalid, ErrExpired, ErrUnavailable, ctx's.
func (k *Keeper) Open(ctx context.Context, scope Scope, token string) (Token, error) {
	id, sealed, err := parse(token)
	if err != nil {
		return Token{}, err
	}
	h := k.current.Load()
	if h != nil && time.Since(h.at) > 2*refreshInterval {
		// Keys may have been retired meanwhile. If etcd is not available, the cached ring stays
		// valid.
		if newer, err := k.fresh(ctx); err == nil {
			h = newer
		}
	}
	var key *key
	gone := false
	if h != nil {
		key, gone = h.ring.find(id)
	}
	if key == nil && !gone {
		// Another replica may have made it just now.
		if h, err = k.fresh(ctx); err != nil {
			return Token{}, err
		}
		key, gone = h.ring.find(id)
	}
	switch {
	case gone:
		return Token{}, fmt.Errorf("%w: the key that sealed it has been removed", ErrExpired)
	case key == nil:
		return Token{}, fmt.Errorf("%w: token was not sealed by this cluster", ErrInvalid)
	}
	return key.open(scope, sealed)
}

// fresh returns the result of a read that starts after the call. Errors: ErrUnavailable, ctx's.
func (k *Keeper) fresh(ctx context.Context) (*ringState, error) {
	r := k.join()
	if k.overdue.Load() {
		return nil, ErrUnavailable
	}
	limit := patience
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		limit = min(limit, max(left-answerTime, left/2))
	}
	late := time.NewTimer(limit)
	defer late.Stop()
	select {
	case <-r.done:
		if r.err != nil {
			return nil, ErrUnavailable
		}
		return k.current.Load(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-late.C:
		if limit == patience {
			k.overdue.Store(true)
		}
		return nil, ErrUnavailable
	}
}

// join returns the next read to start.
func (k *Keeper) join() *ringRead {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.ctx.Err(); err != nil {
		r := &ringRead{done: make(chan struct{}), err: err}
		close(r.done)
		return r
	}
	if k.mu.next == nil {
		k.mu.next = &ringRead{done: make(chan struct{})}
	}
	if !k.mu.running {
		k.mu.running = true
		k.wg.Go(k.readAll)
	}
	return k.mu.next
}

// readAll reads until there are no more requests for a read.
func (k *Keeper) readAll() {
	for {
		k.sleep(time.Until(k.began.Add(readGap)))
		k.mu.Lock()
		r := k.mu.next
		k.mu.next = nil
		if r == nil {
			k.mu.running = false
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()

		k.began = time.Now()
		ctx, cancel := context.WithTimeout(k.ctx, readTimeout)
		r.err = k.readRing(ctx)
		cancel()
		k.note(r.err)
		close(r.done)
	}
}

// note records the outcome of a read, and logs the start and the end of an outage.
func (k *Keeper) note(err error) {
	k.overdue.Store(false)
	switch {
	case k.ctx.Err() != nil: // it fails because the Keeper is closed
	case err != nil && !k.failing:
		k.failing = true
		k.opts.Logger.Error("Failed to read the continue token keys; if they are permanently unreadable, delete the etcd key: "+
			"the server then creates new keys, and clients restart paginated lists",
			"key", k.opts.Key, "err", err.Error())
	case err == nil && k.failing:
		k.failing = false
		k.opts.Logger.Info("Continue token keys are readable again", "key", k.opts.Key)
	}
}

// sleep returns after d, or when the Keeper is closed.
func (k *Keeper) sleep(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.ctx.Done():
	}
}

// maintain reads the ring periodically; a read makes the changes that are due.
func (k *Keeper) maintain() {
	retry := retryPause
	for k.ctx.Err() == nil {
		r := k.join()
		<-r.done
		pause := refreshInterval
		h := k.current.Load()
		switch {
		case h == nil || h.ring == nil:
			pause = min(pause, retry)
			retry = 2 * pause
		case r.err == nil:
			retry = retryPause
			// An overdue change has failed, and is retried with the next read.
			if wait := time.Until(h.ring.due(k.opts.Rotation, k.opts.Keep)); wait > 0 {
				pause = min(pause, wait)
			}
		}
		k.sleep(pause)
	}
}

// readRing updates current and, if sealing is on, the stored ring.
func (k *Keeper) readRing(ctx context.Context) error {
	for range maxConflicts {
		done, err := k.tryRead(ctx)
		if done || err != nil {
			return err
		}
	}
	return errors.New("too many conflicting updates of the key ring by other replicas")
}

// tryRead is one attempt of readRing; done is false if another replica has changed the ring
// meanwhile.
func (k *Keeper) tryRead(ctx context.Context) (done bool, err error) {
	stored, mod, err := k.stored.get(ctx)
	if err != nil {
		return false, fmt.Errorf("read key ring: %w", err)
	}
	now := time.Now()
	before := k.current.Load()
	if before == nil {
		before = &ringState{}
	}
	var current *ring
	stale := false
	switch {
	case mod == 0:
	case mod == before.mod && bytes.Equal(stored, before.data):
		current = before.ring
		if now.Sub(k.checked) >= refreshInterval/2 {
			// If the value is no longer readable, because the key that encrypted it left the
			// configuration, it is written again with the current one.
			_, stale, err = k.opts.Transformer.TransformFromStorage(ctx, stored, k.context())
			stale = stale || err != nil
			k.checked = now
		}
	default:
		var data []byte
		if data, stale, err = k.opts.Transformer.TransformFromStorage(ctx, stored, k.context()); err != nil {
			return false, fmt.Errorf("decrypt key ring: %w", err)
		}
		if current, err = decodeRing(data); err != nil {
			return false, err
		}
		k.checked = now
	}
	present := &ringState{ring: current, at: now, data: stored, mod: mod}
	if !k.opts.Seal || k.opts.ReadOnly {
		k.current.Store(present)
		return true, nil
	}
	var next *ring
	if current == nil {
		next = newRing(now, before.ring)
	} else {
		next = current.maintained(now, k.opts.Rotation, k.opts.Keep)
	}
	if next == current && !stale {
		k.current.Store(present)
		return true, nil
	}
	changed, err := k.write(ctx, next, mod)
	switch {
	case err != nil && current != nil:
		// The present ring stays in use; a later read retries the change.
		k.current.Store(present)
		if !k.stuck && k.ctx.Err() == nil {
			k.stuck = true
			k.opts.Logger.Warn("Failed to update the continue token keys; the current keys stay in use", "key", k.opts.Key, "err", err.Error())
		}
		return true, nil
	case err != nil:
		return false, err
	case changed == nil:
		return false, nil
	}
	k.current.Store(changed)
	k.checked, k.stuck = now, false
	return true, nil
}

// write stores a ring in place of the one with revision mod; it returns nil if the stored revision
// is another.
func (k *Keeper) write(ctx context.Context, r *ring, mod int64) (*ringState, error) {
	data, err := r.encode()
	if err != nil {
		return nil, err
	}
	if data, err = k.opts.Transformer.TransformToStorage(ctx, data, k.context()); err != nil {
		return nil, fmt.Errorf("encrypt key ring: %w", err)
	}
	written, ok, err := k.stored.put(ctx, data, mod)
	if err != nil {
		return nil, fmt.Errorf("write key ring: %w", err)
	}
	if !ok {
		return nil, nil
	}
	return &ringState{ring: r, at: time.Now(), data: data, mod: written}, nil
}

// context is the authenticated data of the encryption: the key in etcd, as in upstream's store.
func (k *Keeper) context() value.Context { return value.DefaultContext(k.opts.Key) }

// register is one stored value with revisions.
type register interface {
	// get returns the latest value, linearizably; mod is 0 if there is none.
	get(ctx context.Context) (data []byte, mod int64, err error)
	// put replaces the value with revision mod, 0 for none, and returns the new one's revision; ok
	// is false, and the value is unchanged, if its revision is another.
	put(ctx context.Context, data []byte, mod int64) (written int64, ok bool, err error)
}

// etcdKey is a register in etcd.
type etcdKey struct {
	kv  clientv3.KV
	key string
}

func (e etcdKey) get(ctx context.Context) ([]byte, int64, error) {
	resp, err := e.kv.Get(ctx, e.key)
	if err != nil || len(resp.Kvs) == 0 {
		return nil, 0, err
	}
	return resp.Kvs[0].Value, resp.Kvs[0].ModRevision, nil
}

func (e etcdKey) put(ctx context.Context, data []byte, mod int64) (int64, bool, error) {
	resp, err := e.kv.Txn(ctx).
		If(clientv3.Compare(clientv3.ModRevision(e.key), "=", mod)).
		Then(clientv3.OpPut(e.key, string(data))).
		// not needed by us; kine recognizes transactions by their form, and supports this one
		Else(clientv3.OpGet(e.key)).
		Commit()
	if err != nil {
		return 0, false, err
	}
	return resp.Header.Revision, resp.Succeeded, nil
}
