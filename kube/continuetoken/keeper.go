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
	// refreshInterval is how often the ring is read again: what other replicas have done to
	// it, or an operator, holds here within that time. A guess: one read of one key.
	refreshInterval = time.Minute
	// readGap is the time between the beginnings of two reads: what garbage can ask of etcd.
	readGap = 100 * time.Millisecond
	// readTimeout bounds one read, with its decryption and what is written.
	readTimeout = 10 * time.Second
	// patience is how long a request waits for a read; answerTime is what is left of its own
	// deadline if that comes first.
	patience   = 3 * time.Second
	answerTime = 250 * time.Millisecond
	// retryPause lies between the first attempts in the background to get a ring; it doubles.
	// Requests that need one try on their own.
	retryPause = time.Second
	// minKeep bounds Options.Keep from below: other replicas seal with a replaced key until
	// they read the ring again, and clients want their next page then.
	minKeep = 10 * refreshInterval
	// maxConflicts is how often another replica may come first before a read gives up.
	maxConflicts = 10
)

// Options configures a Keeper.
type Options struct {
	KV  clientv3.KV
	Key string // of the ring in etcd; the associated data of its encryption
	// Transformer encrypts the ring in etcd; nil stores it as it is.
	Transformer value.Transformer
	// Seal makes a ring if there is none, replaces its keys, and reads it in the background.
	// Without it a ring is read when a sealed token has to be opened.
	Seal bool
	// Rotation is how long a key seals before it is replaced; 0 means for ever.
	Rotation time.Duration
	// Keep is how long a replaced key still opens; at least 10 minutes.
	Keep   time.Duration
	Logger *slog.Logger
}

// Keeper seals and opens tokens with the ring of keys of one etcd. Any replica may make
// the ring and change it, by compare-and-put, so that all have the same one. All methods may be
// called concurrently; with a ring at hand they take no lock and ask nothing of etcd.
type Keeper struct {
	opts   Options
	stored register
	held   atomic.Pointer[held] // nil: never read
	// overdue: a read is under way that takes longer than requests wait, so that others do not wait at all.
	overdue atomic.Bool

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	// mu is a leaf; nothing waits while it is held.
	mu struct {
		sync.Mutex
		next    *read // has not begun
		reading bool  // there is a goroutine that reads until next is nil
	}
	// Of that goroutine alone.
	began   time.Time // of the last read
	checked time.Time // when the stored value was last decrypted
	failing bool      // reads do, which has been logged
	stuck   bool      // the ring cannot be changed, which has been logged
}

// held is what a read has found. It is immutable.
type held struct {
	ring *ring     // nil: there is none
	at   time.Time // when it was read
	// What is stored, encrypted, and its revision: 0 if there is none.
	data []byte
	mod  int64
}

// read is a read of the ring that all who want one share.
type read struct {
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
	h := k.held.Load()
	if h == nil || h.ring == nil {
		var err error
		if h, err = k.fresh(ctx); err != nil {
			return "", err
		}
		if h.ring == nil {
			return "", ErrUnavailable // only if it is not for this Keeper to make one
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
	h := k.held.Load()
	if h != nil && time.Since(h.at) > 2*refreshInterval {
		// Keys may have been taken out of use meanwhile. If etcd does not tell, what was known holds.
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
		return Token{}, fmt.Errorf("%w: the key that it was sealed with is not kept any more", ErrExpired)
	case key == nil:
		return Token{}, fmt.Errorf("%w: it was not sealed by this cluster", ErrInvalid)
	}
	return key.open(scope, sealed)
}

// fresh returns what a read finds that begins after the call. Errors: ErrUnavailable, ctx's.
func (k *Keeper) fresh(ctx context.Context) (*held, error) {
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
		return k.held.Load(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-late.C:
		if limit == patience {
			k.overdue.Store(true)
		}
		return nil, ErrUnavailable
	}
}

// join returns the next read that begins.
func (k *Keeper) join() *read {
	k.mu.Lock()
	defer k.mu.Unlock()
	if err := k.ctx.Err(); err != nil {
		r := &read{done: make(chan struct{}), err: err}
		close(r.done)
		return r
	}
	if k.mu.next == nil {
		k.mu.next = &read{done: make(chan struct{})}
	}
	if !k.mu.reading {
		k.mu.reading = true
		k.wg.Go(k.readAll)
	}
	return k.mu.next
}

// readAll reads as long as somebody asks for it.
func (k *Keeper) readAll() {
	for {
		k.sleep(time.Until(k.began.Add(readGap)))
		k.mu.Lock()
		r := k.mu.next
		k.mu.next = nil
		if r == nil {
			k.mu.reading = false
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()

		k.began = time.Now()
		ctx, cancel := context.WithTimeout(k.ctx, readTimeout)
		r.err = k.read(ctx)
		cancel()
		k.note(r.err)
		close(r.done)
	}
}

// note takes note of how a read has ended, and logs where an outage begins and ends.
func (k *Keeper) note(err error) {
	k.overdue.Store(false)
	switch {
	case k.ctx.Err() != nil: // it fails because it is ended
	case err != nil && !k.failing:
		k.failing = true
		k.opts.Logger.Error("The keys of continue tokens cannot be read from etcd. If they never can be again, delete the etcd key: new ones are made, and lists in pages start over",
			"key", k.opts.Key, "err", err.Error())
	case err == nil && k.failing:
		k.failing = false
		k.opts.Logger.Info("The keys of continue tokens can be read again", "key", k.opts.Key)
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

// maintain reads the ring now and then, which changes it when that is due.
func (k *Keeper) maintain() {
	retry := retryPause
	for k.ctx.Err() == nil {
		r := k.join()
		<-r.done
		pause := refreshInterval
		h := k.held.Load()
		switch {
		case h == nil || h.ring == nil:
			pause = min(pause, retry)
			retry = 2 * pause
		case r.err == nil:
			retry = retryPause
			// What is overdue has failed, and is tried again with the next read.
			if wait := time.Until(h.ring.due(k.opts.Rotation, k.opts.Keep)); wait > 0 {
				pause = min(pause, wait)
			}
		}
		k.sleep(pause)
	}
}

// read brings held up to date and, if sealing is on, the stored ring.
func (k *Keeper) read(ctx context.Context) error {
	for range maxConflicts {
		done, err := k.tryRead(ctx)
		if done || err != nil {
			return err
		}
	}
	return errors.New("other replicas change the ring all the time")
}

// tryRead is read; done is false if another replica has changed the ring meanwhile.
func (k *Keeper) tryRead(ctx context.Context) (done bool, err error) {
	stored, mod, err := k.stored.get(ctx)
	if err != nil {
		return false, fmt.Errorf("read: %w", err)
	}
	now := time.Now()
	before := k.held.Load()
	if before == nil {
		before = &held{}
	}
	var current *ring
	stale := false
	switch {
	case mod == 0:
	case mod == before.mod && bytes.Equal(stored, before.data):
		current = before.ring
		if now.Sub(k.checked) >= refreshInterval/2 {
			// What was readable and is not, because the key that encrypted it left the
			// configuration, is written with the one that is used now.
			_, stale, err = k.opts.Transformer.TransformFromStorage(ctx, stored, k.context())
			stale = stale || err != nil
			k.checked = now
		}
	default:
		var data []byte
		if data, stale, err = k.opts.Transformer.TransformFromStorage(ctx, stored, k.context()); err != nil {
			return false, fmt.Errorf("decrypt: %w", err)
		}
		if current, err = decodeRing(data); err != nil {
			return false, err
		}
		k.checked = now
	}
	present := &held{ring: current, at: now, data: stored, mod: mod}
	if !k.opts.Seal {
		k.held.Store(present)
		return true, nil
	}
	var next *ring
	if current == nil {
		next = newRing(now, before.ring)
	} else {
		next = current.maintained(now, k.opts.Rotation, k.opts.Keep)
	}
	if next == current && !stale {
		k.held.Store(present)
		return true, nil
	}
	changed, err := k.write(ctx, next, mod)
	switch {
	case err != nil && current != nil:
		// The present ring serves; what is due is tried again at a later read.
		k.held.Store(present)
		if !k.stuck && k.ctx.Err() == nil {
			k.stuck = true
			k.opts.Logger.Warn("The keys of continue tokens cannot be replaced now, the present ones go on", "key", k.opts.Key, "err", err.Error())
		}
		return true, nil
	case err != nil:
		return false, err
	case changed == nil:
		return false, nil
	}
	k.held.Store(changed)
	k.checked, k.stuck = now, false
	return true, nil
}

// write stores a ring in place of the one with revision mod; it returns nil if that is not there any more.
func (k *Keeper) write(ctx context.Context, r *ring, mod int64) (*held, error) {
	data, err := r.encode()
	if err != nil {
		return nil, err
	}
	if data, err = k.opts.Transformer.TransformToStorage(ctx, data, k.context()); err != nil {
		return nil, fmt.Errorf("encrypt: %w", err)
	}
	written, ok, err := k.stored.put(ctx, data, mod)
	if err != nil {
		return nil, fmt.Errorf("write: %w", err)
	}
	if !ok {
		return nil, nil
	}
	return &held{ring: r, at: time.Now(), data: data, mod: written}, nil
}

// context is what the encryption binds the value to: as upstream's store has it, its key in etcd.
func (k *Keeper) context() value.Context { return value.DefaultContext(k.opts.Key) }

// register is one value with revisions.
type register interface {
	// get returns the latest value, linearizably; mod is 0 if there is none.
	get(ctx context.Context) (data []byte, mod int64, err error)
	// put replaces the value with revision mod, 0 for none, and returns the new one's; ok is
	// false, and nothing is changed, if the present value is another.
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
		Else(clientv3.OpGet(e.key)). // not needed; kine knows a transaction by its form, and this one so
		Commit()
	if err != nil {
		return 0, false, err
	}
	return resp.Header.Revision, resp.Succeeded, nil
}
