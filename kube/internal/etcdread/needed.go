package etcdread

import (
	"errors"

	"github.com/stratakube/strata/kube/internal/metrics"
)

// ErrNeeded is matched by the errors of reads that memory does not answer.
var ErrNeeded = errors.New("must be read from etcd")

// Needed is an ErrNeeded of a list, with the reason for the metrics.
type Needed struct{ Reason string }

func (e *Needed) Error() string { return ErrNeeded.Error() + ": " + e.Reason }

// Is makes errors.Is find ErrNeeded.
func (e *Needed) Is(target error) bool { return target == ErrNeeded }

// Reasons why a list has to be read from etcd.
var (
	GateOff    = &Needed{metrics.ReasonGate}
	NotLoaded  = &Needed{metrics.ReasonNotLoaded}
	NoProgress = &Needed{metrics.ReasonNoProgress}
)
