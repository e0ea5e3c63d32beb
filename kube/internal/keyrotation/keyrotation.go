// Package keyrotation observes when the keys that decrypt a resource are replaced.
package keyrotation

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/kube/internal/objects"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage/value"
)

// Transformer is implemented by a transformer whose keys change while it is in use. Derived data is
// dropped when they change. The transformers of an automatically reloaded EncryptionConfiguration
// need not implement it.
type Transformer interface {
	value.Transformer

	// Keys returns a comparable value that identifies the keys in use, and that is never reused for
	// other keys. It is called by each read, and before a value is decrypted: it must not take
	// locks or allocate.
	Keys() any
}

// KeysOf returns a function that identifies the keys which the transformer of a resource uses at
// present, as Transformer describes; nil if they never change. It supports two kinds of
// transformers with changing keys: those that implement Transformer, and those of upstream's
// DynamicTransformers. All others are assumed constant, as in upstream's watch cache. Error:
// upstream's type has an unexpected layout.
func KeysOf(t value.Transformer, resource schema.GroupResource) (func() any, error) {
	if r, ok := t.(Transformer); ok {
		return r.Keys, nil
	}
	if t == nil || reflect.TypeOf(t) != dynamicType {
		return nil, nil
	}
	fields, err := dynamicFields()
	if err != nil {
		return nil, err
	}
	keys := &dynamicKeys{tracker: fields.tracker(t), overrides: fields.overrides, resource: resource}
	return keys.current, nil
}

// dynamicType is the type of the transformers that DynamicTransformers returns.
var dynamicType = reflect.TypeOf(encryptionconfig.NewDynamicTransformers(nil, nil, func() {}, 0).
	TransformerForResource(schema.GroupResource{}))

// dynamicKeys identifies the keys of one resource in upstream's DynamicTransformers. Safe for
// concurrent use.
type dynamicKeys struct {
	tracker   *atomic.Value // holds a pointer that each reload replaces
	overrides int           // see dynamicLayout
	resource  schema.GroupResource
	seen      atomic.Pointer[seenKeys]
}

// seenKeys is the identity of the keys of the resource under a tracker.
type seenKeys struct{ tracker, identity any }

// plain is the identity of the keys of a resource that the configuration does not mention: it is
// not encrypted, and a reload that does not change that invalidates nothing.
type plain struct{}

// current returns the identity of the keys in use. Cost is two loads, and some reflection after
// a reload.
func (k *dynamicKeys) current() any {
	tracker := k.tracker.Load()
	if s := k.seen.Load(); s != nil && s.tracker == tracker {
		return s.identity
	}
	s := &seenKeys{tracker: tracker, identity: tracker}
	if !k.mentioned(tracker) {
		s.identity = plain{}
	}
	k.seen.Store(s)
	return s.identity
}

// mentioned reports whether the configuration has transformers for the resource.
func (k *dynamicKeys) mentioned(tracker any) bool {
	overrides := reflect.ValueOf(tracker).Elem().Field(k.overrides)
	for _, gr := range []schema.GroupResource{k.resource, {Group: k.resource.Group, Resource: "*"}, {Group: "*", Resource: "*"}} {
		if overrides.MapIndex(reflect.ValueOf(gr)).IsValid() {
			return true
		}
	}
	return false
}

// dynamicLayout has the positions of the fields of upstream's types. Upstream exports no way to
// detect that a configuration was reloaded, and decrypting a sample does not show that one of
// several keys was removed. The fields are found by their types, and the result is tested, so an
// upstream version with another layout is detected when the first storage is made.
type dynamicLayout struct {
	field     int // of the transformer: a pointer to an atomic.Value, which all transformers share
	overrides int // of the struct that a pointer in it points to: the transformers by resource
}

// tracker returns the value that a reload replaces.
func (l dynamicLayout) tracker(t value.Transformer) *atomic.Value {
	return (*atomic.Value)(reflect.ValueOf(t).Elem().Field(l.field).UnsafePointer())
}

var dynamicFields = sync.OnceValues(func() (l dynamicLayout, err error) {
	defer func() {
		if x := recover(); x != nil {
			err = fmt.Errorf("unexpected layout of %v: %v", dynamicType, x)
		}
	}()
	secrets := schema.GroupResource{Resource: "secrets"}
	some := map[schema.GroupResource]value.Transformer{secrets: value.NewPrefixTransformers(nil)}
	dynamic := encryptionconfig.NewDynamicTransformers(nil, nil, func() {}, 0)
	t := dynamic.TransformerForResource(secrets)
	if l.field, err = fieldOf(reflect.TypeOf(t).Elem(), reflect.TypeFor[*atomic.Value]()); err != nil {
		return l, err
	}
	if l.overrides, err = fieldOf(reflect.TypeOf(l.tracker(t).Load()).Elem(), reflect.TypeOf(some)); err != nil {
		return l, err
	}
	keys := dynamicKeys{tracker: l.tracker(t), overrides: l.overrides, resource: secrets}
	before := keys.current()
	dynamic.Set(some, func() {}, nil, 0)
	first := keys.current()
	dynamic.Set(some, func() {}, nil, 0)
	second := keys.current()
	dynamic.Set(nil, func() {}, nil, 0)
	if before != any(plain{}) || first == before || second == first || second == before || keys.current() != before {
		return l, errors.New("a reload of the encryption configuration does not replace the transformers of this k8s.io/apiserver version")
	}
	return l, nil
})

// fieldOf returns the index of the only field of the type.
func fieldOf(s, field reflect.Type) (int, error) {
	found := -1
	for i := range s.NumField() {
		if s.Field(i).Type == field {
			if found >= 0 {
				return 0, fmt.Errorf("%v has several fields of type %v", s, field)
			}
			found = i
		}
	}
	if found < 0 {
		return 0, fmt.Errorf("%v has no field of type %v", s, field)
	}
	return found, nil
}

// reloadInterval is how often views without readers check for replaced keys. Those with readers
// check at each read. It bounds how long data decrypted with removed keys stays in memory.
const reloadInterval = time.Second

// Reloads polls the keys of the views whose keys can change, while there are any. The zero value
// has no views.
type Reloads struct {
	mu     sync.Mutex // leaf
	views  map[*objects.View]struct{}
	cancel chan struct{} // nil: not running
	wg     sync.WaitGroup
}

// Add follows the keys of the view until remove is called.
func (r *Reloads) Add(v *objects.View) (remove func()) {
	if !v.Rekeyed() {
		return func() {}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.views == nil {
		r.views = map[*objects.View]struct{}{}
	}
	r.views[v] = struct{}{}
	if r.cancel == nil {
		cancel := make(chan struct{})
		r.cancel = cancel
		r.wg.Go(func() { r.run(cancel) })
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.views, v)
	}
}

func (r *Reloads) run(cancel <-chan struct{}) {
	ticker := time.NewTicker(reloadInterval)
	defer ticker.Stop()
	var views []*objects.View
	for {
		select {
		case <-ticker.C:
		case <-cancel:
			return
		}
		r.mu.Lock()
		for v := range r.views {
			views = append(views, v)
		}
		r.mu.Unlock()
		for _, v := range views {
			v.CurrentGeneration()
		}
		clear(views)
		views = views[:0]
	}
}

// Close ends and waits for the goroutine.
func (r *Reloads) Close() {
	r.mu.Lock()
	if r.cancel != nil {
		close(r.cancel)
		r.cancel = nil
	}
	r.mu.Unlock()
	r.wg.Wait()
}
