package watchset

import (
	"context"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
)

// direct is a watch that etcd serves. Its only bookmarks are those of etcd's progress, so it just
// ends.
type direct struct {
	watch.Interface
	watches *Watches
	cancel  context.CancelFunc
}

// Drain implements Watch.
func (w *direct) Drain() { w.cancel() }

// Abort implements Watch.
func (w *direct) Abort(Reason) { w.cancel() }

// Stop implements watch.Interface.
func (w *direct) Stop() {
	w.watches.Remove(w)
	w.cancel()
	w.Interface.Stop()
}

// Direct starts a watch that etcd serves and adds it to r. Errors: that of etcd, and
// ErrShuttingDown if it is rejected.
func (r *Watches) Direct(ctx context.Context, etcd storage.Interface, key string, opts storage.ListOptions, undrained bool) (watch.Interface, error) {
	w := &direct{watches: r}
	ctx, w.cancel = context.WithCancel(ctx)
	if !r.Add(w, undrained) {
		w.cancel()
		return nil, ErrShuttingDown()
	}
	var err error
	if w.Interface, err = etcd.Watch(ctx, key, opts); err != nil {
		r.Remove(w)
		w.cancel()
		return nil, err
	}
	return w, nil
}
