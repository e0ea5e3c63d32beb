package kubestorage

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
)

// Create implements storage.Interface.
func (s *Store) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	return s.etcd.Create(ctx, key, obj, out, ttl)
}

// Delete implements storage.Interface. It passes the object in memory as the suggestion, which
// saves a read.
func (s *Store) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validateDeletion storage.ValidateObjectFunc, _ runtime.Object, opts storage.DeleteOptions) error {
	var suggestion runtime.Object
	if opts == (storage.DeleteOptions{}) { // otherwise the deletion is of an undecodable object
		suggestion = suggest(ctx, s, key)
	}
	return s.etcd.Delete(ctx, key, out, preconditions, validateDeletion, suggestion, opts)
}

// GuaranteedUpdate implements storage.Interface. It passes the object in memory as the suggestion,
// so that an update without a conflict costs one etcd transaction.
func (s *Store) GuaranteedUpdate(ctx context.Context, key string, destination runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, _ runtime.Object) error {
	return s.etcd.GuaranteedUpdate(ctx, key, destination, ignoreNotFound, preconditions, tryUpdate, suggest(ctx, s, key))
}

// suggest returns a private copy of the cached object, decoded by the codec that encodes it again,
// or nil if it cannot be decoded: then the caller reads etcd, which reports the error.
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
	obj, err := s.view.CurrentGeneration().Decode(ctx, e, e.ModRevision())
	if err != nil {
		s.cluster.opts.Logger.Debug("Failed to decode cached object; reading it from etcd", "key", key, "err", err)
		return nil
	}
	return obj
}
