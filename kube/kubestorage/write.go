package kubestorage

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/klog/v2"
)

// Create implements storage.Interface.
func (s *Store) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.etcd.Create(ctx, key, obj, out, ttl)
}

// Delete implements storage.Interface. The object in memory is the suggestion
// that saves a read.
func (s *Store) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validateDeletion storage.ValidateObjectFunc, _ runtime.Object, opts storage.DeleteOptions) error {
	var suggestion runtime.Object
	if opts == (storage.DeleteOptions{}) { // else the deletion is about an object that cannot be decoded
		suggestion = suggest(ctx, s, key)
	}
	return s.etcd.Delete(ctx, key, out, preconditions, validateDeletion, suggestion, opts)
}

// GuaranteedUpdate implements storage.Interface. The object in memory is the
// suggestion, so that an update without a conflict costs one etcd transaction.
func (s *Store) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, _ runtime.Object) error {
	return s.etcd.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, tryUpdate, suggest(ctx, s, key))
}

// suggest returns the object in memory, decoded for the caller alone by the
// codec that will encode it again, or nil if there is none that can be decoded:
// then etcd is read, and reports what is wrong.
func suggest(ctx context.Context, s *Store, key string) runtime.Object {
	key, err := s.keys.Prepare(key, false)
	if err != nil {
		return nil
	}
	snap, err := s.resource.Latest()
	if err != nil {
		return nil
	}
	e, ok := snap.Get(key)
	if !ok {
		return nil
	}
	obj, err := s.view.Now().Decode(ctx, e, e.ModRevision())
	if err != nil {
		klog.FromContext(ctx).V(4).Info("Object in memory cannot be decoded, reading etcd", "key", key, "err", err)
		return nil
	}
	return obj
}
