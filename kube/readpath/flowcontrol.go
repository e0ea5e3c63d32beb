package readpath

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// costFunc returns the uncompressed response size of a read in bytes; for a watch, the size of its
// initial events. ok is false if the response does not come from memory, or if its size is not
// known in advance. It is called for each list and watch before queuing, so it must be cheap and
// must not block.
type costFunc func(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool)

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
func workEstimator(upstream flowcontrolrequest.WorkEstimatorFunc, cost costFunc, maxSeats func(priorityLevel string) uint64) flowcontrolrequest.WorkEstimatorFunc {
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

// cost is the costFunc of the server's own responses.
//
// The size is that of the items in the negotiated format if they have been encoded before, else
// their stored size. A page is charged its limit's share of the range. A selector does not reduce
// the cost: all objects visited count, as an upper bound of the bytes sent. For a shard that was
// listed before, only its own objects count.
//
// cost does not resolve storages: the first list of a resource is estimated by upstream.
func (s *Server) cost(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool) {
	resource := s.resolver.known(info)
	if resource == nil {
		return 0, false
	}
	r := &read{server: s, resource: resource, info: info, scope: resource.scope(), req: req}
	f, why := r.negotiate()
	if why != "" {
		return 0, false
	}
	enc, err := resource.encodings.get(resource, f)
	if err != nil {
		return 0, false
	}
	opts, err := r.listOptions()
	if err != nil {
		return 0, false
	}
	key, o, err := r.storageOptions(opts)
	if err != nil {
		return 0, false
	}
	if info.Verb == "watch" {
		asked := opts.SendInitialEvents != nil && *opts.SendInitialEvents
		if !asked && opts.ResourceVersion != "" && opts.ResourceVersion != "0" {
			return 0, false // starts from a revision; upstream estimates its cost
		}
		// The initial events are a list of all objects, always from memory.
		shard := o.Predicate.ShardSelector
		o = storage.ListOptions{ResourceVersion: "0", Recursive: o.Recursive}
		o.Predicate = storage.Everything
		o.Predicate.ShardSelector = shard
	}
	x, ok := resource.Store.Expect(key, o)
	if !ok {
		return 0, false
	}
	objects, bytes := x.Objects.Count(x.Start, x.End)
	if encoded, ok := enc.rep.Measure(x.Objects, x.Start, x.End); ok {
		bytes = encoded
	}
	if 0 < x.Limit && x.Limit < int64(objects) {
		bytes = int64(float64(bytes) / float64(objects) * float64(x.Limit))
	}
	return bytes, true
}
