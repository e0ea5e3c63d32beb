package readpath

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// cost is the handlerchain.CostFunc of the server's own responses.
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
	r := &readRequest{server: s, resource: resource, info: info, scope: resource.scope(), req: req}
	n := r.negotiateAs(false) // the client is not authorized yet
	if n.reason != "" || n.refused {
		return 0, false
	}
	enc, err := resource.encodings.get(resource, n.format)
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
	x, ok := resource.Store.EstimateList(key, o)
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
