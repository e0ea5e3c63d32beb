package handlerchain

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// CostFunc returns the uncompressed response size of a read in bytes; for a watch, the size of its
// initial events. ok is false if the response does not come from memory, or if its size is not
// known in advance. It is called for each list and watch before queuing, so it must be cheap and
// must not block.
type CostFunc func(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool)

const (
	// bytesPerSeat is upstream's estimate of the memory that one seat of priority and fairness
	// covers (flowcontrol/request, list_work_estimator.go).
	bytesPerSeat = 100_000
	// maxReadSeats is the maximum number of seats of a read from memory: upstream's bound for a
	// list that is streamed from its cache, 1 MB. The response is written from cached bytes, so a
	// longer response occupies its seats for longer rather than more seats.
	maxReadSeats = 10
)

// workEstimator returns the work estimator of priority and fairness. A list, or a watch with
// initial events, of a size known to cost occupies one seat per started bytesPerSeat, at least one
// and at most maxReadSeats, and never more than maxSeats, the bound of its priority level for a
// single request (0: no bound). Upstream counts the objects of the whole resource; this estimator
// counts the bytes to be sent, so a list of one namespace is charged for that namespace only. All
// other requests are estimated by upstream.
//
// It adds no latency: a read has no further work after its response was sent.
func workEstimator(upstream flowcontrolrequest.WorkEstimatorFunc, cost CostFunc, maxSeats func(priorityLevel string) uint64) flowcontrolrequest.WorkEstimatorFunc {
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
