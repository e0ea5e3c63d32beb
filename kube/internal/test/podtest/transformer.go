package podtest

import (
	"context"
	"crypto/aes"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage/value"
	aestransformer "k8s.io/apiserver/pkg/storage/value/encrypt/aes"

	"github.com/stratakube/strata/mirror"
)

// Encryption returns AES-GCM with the keys of the names, of one character each. The first one
// encrypts.
func Encryption(t testing.TB, names ...string) value.Transformer {
	t.Helper()
	var keys []value.PrefixTransformer
	for _, name := range names {
		block, err := aes.NewCipher([]byte(strings.Repeat(name, 16)))
		if err != nil {
			t.Fatal(err)
		}
		gcm, err := aestransformer.NewGCMTransformer(block)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, value.PrefixTransformer{Transformer: gcm, Prefix: []byte("key" + name + ":")})
	}
	return value.NewPrefixTransformers(nil, keys...)
}

// Seal stores a pod as the transformer writes it.
func (c *Cluster) Seal(t testing.TB, tr value.Transformer, pod *example.Pod) mirror.Revision {
	t.Helper()
	data, err := tr.TransformToStorage(Context(t), []byte(Stored(t, pod)), value.DefaultContext(Key(pod)))
	if err != nil {
		t.Fatal(err)
	}
	return c.Etcd.Put(Key(pod), string(data))
}

// Swappable is a transformer that a test replaces while it is in use.
type Swappable struct {
	current atomic.Pointer[value.Transformer]
}

// NewSwappable returns a transformer that is t at first.
func NewSwappable(t value.Transformer) *Swappable {
	s := &Swappable{}
	s.Set(t)
	return s
}

// Set replaces the transformer.
func (s *Swappable) Set(t value.Transformer) { s.current.Store(&t) }

// Keys identifies the current transformer: see objects.Config.
func (s *Swappable) Keys() any { return s.current.Load() }

// TransformFromStorage implements value.Transformer.
func (s *Swappable) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	return (*s.current.Load()).TransformFromStorage(ctx, data, dataCtx)
}

// TransformToStorage implements value.Transformer.
func (s *Swappable) TransformToStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, error) {
	return (*s.current.Load()).TransformToStorage(ctx, data, dataCtx)
}

// With makes a cluster use the transformer, whose keys change when it is replaced.
func (s *Swappable) With(o *Options) { o.Config.Transformer, o.Config.Keys = s, s.Keys }

// Pausing is a transformer that can wait before it returns a decrypted value.
type Pausing struct {
	value.Transformer
	Entered, Release chan struct{} // sent when it waits; ends the wait
	on               atomic.Bool
}

// NewPausing returns a transformer that does not wait yet.
func NewPausing(t value.Transformer) *Pausing {
	return &Pausing{Transformer: t, Entered: make(chan struct{}), Release: make(chan struct{})}
}

// Pause makes the next decryption wait.
func (p *Pausing) Pause() { p.on.Store(true) }

// TransformFromStorage implements value.Transformer.
func (p *Pausing) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	out, stale, err := p.Transformer.TransformFromStorage(ctx, data, dataCtx)
	if p.on.CompareAndSwap(true, false) {
		p.Entered <- struct{}{}
		<-p.Release
	}
	return out, stale, err
}
