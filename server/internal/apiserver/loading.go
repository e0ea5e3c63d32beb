package apiserver

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/kubestorage"
)

// logLoad logs the progress of the load of memory while it takes long, and then that of the restore
// of history. stop ends it early.
func logLoad(ctx context.Context, state func(context.Context) kubestorage.LoadState) (stop func()) {
	return statusline.Every(func(elapsed time.Duration) bool {
		s := state(ctx)
		switch {
		case s.Loading:
			keysAndValues := []any{"resource", s.Resource, "objects", s.Objects, "took", elapsed.Round(time.Millisecond)}
			if s.Total > 0 {
				keysAndValues = append(keysAndValues, "of", s.Total)
			}
			klog.InfoS("Loading memory from etcd", keysAndValues...)
		case s.Restoring:
			klog.InfoS("Restoring history from etcd; objects are served", "events", s.Changes, "took", elapsed.Round(time.Millisecond))
		}
		return s.Loading || s.Restoring
	})
}
