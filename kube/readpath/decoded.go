package readpath

import (
	"context"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/routine"

	"github.com/stratakube/strata/kube/internal/handlerchain"
	"github.com/stratakube/strata/kube/internal/slowclient"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/listadmission"
)

// Memory of a list that upstream's handlers build from decoded objects, as a multiple of the stored
// bytes of its objects and of their overhead (listadmission.Decoded). Measured with 20,000
// ConfigMaps of 1 KB, as the growth of a server's memory.
const (
	decodedFactor  = 2  // tables, and JSON or protobuf, whose encoders process one object at a time
	indentedFactor = 5  // indented JSON is encoded as a whole
	yamlFactor     = 18 // YAML is converted from JSON, through a tree of all its values
)

// BoundDecoded bounds the lists of the API server that c configures by lists, and ends watches
// whose clients do not read the initial events. It is for an API server without a mounted Server.
// It wraps c.BuildHandlerChainFunc and must be called before c is completed.
func BoundDecoded(c *genericapiserver.Config, lists *listadmission.Admission) {
	build := c.BuildHandlerChainFunc
	if build == nil {
		build = genericapiserver.DefaultBuildHandlerChain
	}
	c.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		return build((&Server{lists: lists, levels: handlerchain.WatchLevels(c), conns: slowclient.TrackServed(c)}).boundDecoded(apiHandler), c)
	}
}

// boundDecoded wraps next, which builds lists from decoded objects. Their memory is admitted from
// the call of an engine storage until next has returned. A client that does not read such a list,
// or the initial events of a watch, is cut off. The handler runs after the filters of an API
// server, inside the timeout filter.
func (s *Server) boundDecoded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		switch {
		case !ok || !info.IsResourceRequest || req.Method != http.MethodGet || info.Verb != "list" && info.Verb != "watch":
			next.ServeHTTP(w, req)
			return
		case info.Verb == "watch":
			s.passWatch(next, w, req)
			return
		}
		level := s.levels.Of(w, req)
		ctx, list := s.lists.Begin(req.Context(), level, formOf(req))
		conn, cut := s.pacing.Begin(req), slowclient.NewCutoff(w, req, s.conns)
		paced := &slowclient.Writer{ResponseWriter: w, Counts: true, Yield: func(write func()) { list.Yield(ctx, write) }, Pace: slowclient.NewPace(conn, slowclient.MinBytesPerSecond, func() {
			// After the request's timeout the response may have ended.
			if list.Held() > 0 && req.Context().Err() == nil && cut.Cut() {
				s.lists.Slow(level)
			}
		})}
		defer list.End()
		defer conn.End()
		defer cut.Finish()
		next.ServeHTTP(responsewriter.WrapForHTTP1Or2(paced), req.WithContext(ctx))
	})
}

// passWatch lets next answer a watch. The response is cut off if the client does not read the
// initial events and then, within stallTimeout, does not read the final status of the watch either.
func (s *Server) passWatch(next http.Handler, w http.ResponseWriter, req *http.Request) {
	slow, isSlow := context.WithCancel(context.Background())
	cut := slowclient.NewCutoff(w, req, s.conns)
	stop := cut.After(slow, stallTimeout)
	finish := func() {
		stop()
		isSlow() // releases the context
	}
	ctx := watch.WithSlowClient(req.Context(), isSlow)
	task := routine.TaskFrom(ctx)
	defer func() {
		if task == nil || task.Func == nil {
			finish()
			return
		}
		serve := task.Func // runs after the handlers have returned
		task.Func = func() {
			defer finish()
			serve()
		}
	}()
	next.ServeHTTP(w, req.WithContext(ctx))
}

// formOf returns the form in which a list may be answered; if several are possible, the one with
// the largest factor.
func formOf(req *http.Request) listadmission.Form {
	form := listadmission.Form{Factor: decodedFactor, Plain: true}
	for _, accept := range req.Header["Accept"] {
		if strings.Contains(accept, "yaml") {
			return listadmission.Form{Factor: yamlFactor}
		}
		if strings.Contains(accept, "as=Table") {
			form.Plain = false
		}
	}
	if asksForPretty(req) {
		return listadmission.Form{Factor: indentedFactor}
	}
	return form
}
