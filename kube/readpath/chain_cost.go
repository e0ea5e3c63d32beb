package readpath

import (
	"net/http"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage"
)

// Cost is the CostFunc of what the server answers.
//
// The bytes are those of the items in the form that was negotiated, exactly if they have
// been encoded before, else as they are stored. Of a page it is the share that its limit
// has in the range. A selector does not make a list cheaper: what is walked counts, and
// is an upper bound of what is sent. Of a shard that has been listed before, its own objects count.
//
// It does not look for storages: the first list of a resource is estimated by upstream.
func (s *Server) Cost(req *http.Request, info *request.RequestInfo) (bytes int64, ok bool) {
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

// known returns what a request reads if it is known already, and nil otherwise. It
// looks nothing up and waits for nobody.
func (r *Resolver) known(info *request.RequestInfo) *Resource {
	c := (*r.routes.Load())[routeOf(info)]
	if c == nil {
		return nil
	}
	b := c.bound.Load()
	if b == nil || !r.holds(b) {
		return nil
	}
	return b.resource
}
