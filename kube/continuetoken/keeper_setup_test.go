package continuetoken

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/storage/value"
)

// fakeEtcd is a register with faults. It counts calls.
type fakeEtcd struct {
	mu      sync.Mutex
	data    []byte
	mod     int64 // 0: no value
	last    int64 // revision of the last change
	gets    int
	puts    int
	err     error         // of every call
	hang    bool          // calls end with their context
	between func()        // called once, after the next get
	delay   time.Duration // of every call
}

var errDown = errors.New("etcd is down")

func (e *fakeEtcd) set(change func(*fakeEtcd)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change(e)
}

func (e *fakeEtcd) fault(ctx context.Context) error {
	e.mu.Lock()
	hang, err, delay := e.hang, e.err, e.delay
	e.mu.Unlock()
	if hang {
		<-ctx.Done()
		return ctx.Err()
	}
	if delay > 0 {
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return err
}

func (e *fakeEtcd) get(ctx context.Context) ([]byte, int64, error) {
	e.set(func(e *fakeEtcd) { e.gets++ })
	if err := e.fault(ctx); err != nil {
		return nil, 0, err
	}
	e.mu.Lock()
	data, mod, between := e.data, e.mod, e.between
	e.between = nil
	e.mu.Unlock()
	if between != nil {
		between()
	}
	return data, mod, nil
}

func (e *fakeEtcd) put(ctx context.Context, data []byte, mod int64) (int64, bool, error) {
	if err := e.fault(ctx); err != nil {
		return 0, false, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.mod != mod {
		return 0, false, nil
	}
	e.puts++
	e.last++
	e.data, e.mod = data, e.last
	return e.mod, true, nil
}

func (e *fakeEtcd) remove() { e.set(func(e *fakeEtcd) { e.last++; e.data, e.mod = nil, 0 }) }

func (e *fakeEtcd) counts() (gets, puts int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.gets, e.puts
}

// fakeKMS encrypts with numbered keys: a value is "<number>:<its context>:" and the reversed plain
// text.
type fakeKMS struct {
	mu     sync.Mutex
	writes int          // the key that writes
	reads  map[int]bool // other keys that can decrypt
	err    error
	hang   bool
}

func (f *fakeKMS) set(change func(*fakeKMS)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fakeKMS) state(ctx context.Context) (writes int, reads map[int]bool, err error) {
	f.mu.Lock()
	hang := f.hang
	writes, reads, err = f.writes, f.reads, f.err
	f.mu.Unlock()
	if hang {
		<-ctx.Done()
		err = ctx.Err()
	}
	return writes, reads, err
}

func reversed(b []byte) string {
	r := make([]byte, len(b))
	for i, c := range b {
		r[len(b)-1-i] = c
	}
	return string(r)
}

func (f *fakeKMS) TransformToStorage(ctx context.Context, data []byte, c value.Context) ([]byte, error) {
	writes, _, err := f.state(ctx)
	return fmt.Appendf(nil, "%d:%s:%s", writes, c.AuthenticatedData(), reversed(data)), err
}

func (f *fakeKMS) TransformFromStorage(ctx context.Context, data []byte, c value.Context) ([]byte, bool, error) {
	writes, reads, err := f.state(ctx)
	if err != nil {
		return nil, false, err
	}
	var n int
	head, rest, _ := strings.Cut(string(data), ":"+string(c.AuthenticatedData())+":")
	if _, err := fmt.Sscan(head, &n); err != nil || (n != writes && !reads[n]) {
		return nil, false, errors.New("no key for this")
	}
	return []byte(reversed([]byte(rest))), n != writes, nil
}

const (
	testRotation = 24 * time.Hour
	testKeep     = time.Hour
)

// cluster is an etcd and a KMS shared by replicas, in a synctest bubble.
type cluster struct {
	etcd     fakeEtcd
	kms      fakeKMS
	replicas []*Keeper
}

// stop ends all replicas.
func (c *cluster) stop() {
	for _, k := range c.replicas {
		k.Close()
	}
}

func (c *cluster) start(t *testing.T, seal bool) *Keeper { return c.startAs(t, seal, false) }

func (c *cluster) startAs(t *testing.T, seal, readOnly bool) *Keeper {
	k := newKeeper(Options{
		Key: "/registry/strata/keys", Transformer: &c.kms, Seal: seal, ReadOnly: readOnly, Rotation: testRotation, Keep: testKeep,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}, &c.etcd)
	t.Cleanup(k.Close)
	c.replicas = append(c.replicas, k)
	return k
}

func mustSeal(t *testing.T, k *Keeper) string {
	t.Helper()
	token, err := k.Seal(t.Context(), widgets, page)
	if err != nil {
		t.Fatalf("seal: %v", err)
	}
	return token
}

// idOf returns the id of the key that a token was sealed with.
func idOf(token string) keyID {
	id, _, err := parse(token)
	if err != nil {
		panic(err)
	}
	return id
}

// requireOpens fails unless the replica opens the token, or fails with the error want.
func requireOpens(t *testing.T, k *Keeper, token string, want error) {
	t.Helper()
	got, err := k.Open(t.Context(), widgets, token)
	if !errors.Is(err, want) || (err == nil && got != page) || (err != nil && got != Token{}) {
		t.Fatalf("open: %+v, %v, want error %v", got, err, want)
	}
}
