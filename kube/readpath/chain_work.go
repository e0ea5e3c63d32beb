package readpath

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// CostFunc returns how many bytes the answer to a read will have, uncompressed: of a
// watch, those of its initial events. ok is false if the answer does not come from
// memory, or if its size is not known beforehand. It is called for each list and
// watch before it waits for its turn, so it must be cheap and must not wait.
type CostFunc func(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool)

const (
	// bytesPerSeat is upstream's measure: what a seat of priority and fairness may hold
	// in memory (flowcontrol/request, list_work_estimator.go).
	bytesPerSeat = 100_000
	// maxReadSeats is the most that a read from memory occupies: upstream's bound for a
	// list that is streamed from its cache, 1 MB. The answer is written from bytes that
	// are there anyway, so that a longer one occupies its seats for longer, not more of them.
	maxReadSeats = 10
)

// WorkEstimator returns the work of a request for priority and fairness. A list, or a watch
// with initial events, whose size cost knows occupies a seat for each bytesPerSeat
// begun, at least one and at most maxReadSeats, and never more than maxSeats, which
// is what its priority level allows a single request (0: no bound). Where upstream
// counts the objects of the whole resource, this counts what will be sent: a list
// of one namespace occupies what that namespace has. Everything else is estimated
// by upstream.
//
// No latency is added: a read is over when it has been sent.
func WorkEstimator(upstream flowcontrolrequest.WorkEstimatorFunc, cost CostFunc, maxSeats func(priorityLevel string) uint64) flowcontrolrequest.WorkEstimatorFunc {
	if cost == nil {
		return upstream
	}
	return func(req *http.Request, flowSchema, priorityLevel string) flowcontrolrequest.WorkEstimate {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || (info.Verb != "list" && info.Verb != "watch") {
			return upstream(req, flowSchema, priorityLevel)
		}
		bytes, ok := cost(req, info)
		if !ok {
			return upstream(req, flowSchema, priorityLevel)
		}
		seats := uint64(maxReadSeats)
		if bytes < maxReadSeats*bytesPerSeat {
			seats = uint64(max(bytes, 1)+bytesPerSeat-1) / bytesPerSeat
		}
		if bound := maxSeats(priorityLevel); bound > 0 && seats > bound {
			seats = bound
		}
		return flowcontrolrequest.WorkEstimate{InitialSeats: seats}
	}
}
