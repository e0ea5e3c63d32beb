package kubestorage

import (
	"errors"

	"github.com/stratakube/strata/kube/internal/metrics"
)

// ErrReadEtcd: this read is served by etcd through upstream's store, not from memory. For a list: a
// gate is off, the resource is not loaded and the page is small, or etcd's progress is unreliable.
// For a single key: the resource is not loaded, or the mirror does not catch up soon.
var ErrReadEtcd = errors.New("must be read from etcd")

// readEtcd is an ErrReadEtcd of a list, with the reason for the metrics.
type readEtcd struct{ reason string }

func (e *readEtcd) Error() string { return ErrReadEtcd.Error() + ": " + e.reason }

func (e *readEtcd) Is(target error) bool { return target == ErrReadEtcd }

var (
	errGate       = &readEtcd{metrics.ReasonGate}
	errNotLoaded  = &readEtcd{metrics.ReasonNotLoaded}
	errNoProgress = &readEtcd{metrics.ReasonNoProgress}
)
