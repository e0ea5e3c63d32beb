package readpath

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

// costFunc returns how many bytes the answer to a read will have, uncompressed: of a
// watch, those of its initial events. ok is false if the answer does not come from
// memory, or if its size is not known beforehand. It is called for each list and
// watch before it waits for its turn, so it must be cheap and must not wait.
type costFunc func(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool)

const (
	// bytesPerSeat is upstream's measure: what a seat of priority and fairness may hold
	// in memory (flowcontrol/request, list_work_estimator.go).
	bytesPerSeat = 100_000
	// maxReadSeats is the most that a read from memory occupies: upstream's bound for a
	// list that is streamed from its cache, 1 MB. The answer is written from bytes that
	// are there anyway, so that a longer one occupies its seats for longer, not more of them.
	maxReadSeats = 10
)

// workEstimator returns the work of a request for priority and fairness. A list, or a watch
// with initial events, whose size cost knows occupies a seat for each bytesPerSeat
// begun, at least one and at most maxReadSeats, and never more than maxSeats, which
// is what its priority level allows a single request (0: no bound). Where upstream
// counts the objects of the whole resource, this counts what will be sent: a list
// of one namespace occupies what that namespace has. Everything else is estimated
// by upstream.
//
// No latency is added: a read is over when it has been sent.
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

// cost is the costFunc of what the server answers.
//
// The bytes are those of the items in the form that was negotiated, exactly if they have
// been encoded before, else as they are stored. Of a page it is the share that its limit
// has in the range. A selector does not make a list cheaper: what is walked counts, and
// is an upper bound of what is sent. Of a shard that has been listed before, its own objects count.
//
// It does not look for storages: the first list of a resource is estimated by upstream.
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
			return 0, false // begins with a revision, and costs what upstream says
		}
		// The initial events are a list of everything, from memory in any case.
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
