package watchset

import "sync/atomic"

// Reason is the reason why a watch has ended.
type Reason int32

// Reasons. NotEnded is the zero value.
const (
	NotEnded Reason = iota
	ByTimeout
	ByClient
	ByShutdown
	ByStorage
	Expired
	ByError
	BySlowness // of the client
)

// String is a label of a metric.
func (e Reason) String() string {
	return [...]string{"", "timeout", "client", "shutdown", "storage", "expired", "error", "slow_client"}[e]
}

// Ended is the first reason that was set. The zero value is NotEnded. Safe for concurrent use.
type Ended struct{ reason atomic.Int32 }

// Set sets the reason if none was set before.
func (e *Ended) Set(reason Reason) { e.reason.CompareAndSwap(int32(NotEnded), int32(reason)) }

// Get returns the reason.
func (e *Ended) Get() Reason { return Reason(e.reason.Load()) }
