package kubestorage

import (
	"errors"

	"github.com/stratakube/strata/kube/internal/metrics"
)

// ErrReadEtcd: memory does not answer this read, etcd does, through upstream's store. Of a
// list: a gate is off, the resource is not loaded and the page is small, or etcd's progress
// cannot be believed. Of a single key: the resource is not loaded, or memory does not catch
// up soon.
var ErrReadEtcd = errors.New("to be read from etcd")

// readEtcd is an ErrReadEtcd of a list, with the reason that metrics tell.
type readEtcd struct{ reason string }

func (e *readEtcd) Error() string { return ErrReadEtcd.Error() + ": " + e.reason }

func (e *readEtcd) Is(target error) bool { return target == ErrReadEtcd }

var (
	errGate       = &readEtcd{metrics.ReasonGate}
	errNotLoaded  = &readEtcd{metrics.ReasonNotLoaded}
	errNoProgress = &readEtcd{metrics.ReasonNoProgress}
)
