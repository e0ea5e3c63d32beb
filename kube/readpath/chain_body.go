package readpath

import (
	"net/http"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// bodyGrace is how much later than a request its body has to be there: by then the request was
// answered.
const bodyGrace = time.Second

// boundBody makes reads of a body over HTTP/1.1 fail once the request has timed out. Upstream answers
// such a request with 504, but net/http sends no answer while the handler, which was left
// behind, waits for the body: a client that sends a byte now and then would keep its
// connection, two goroutines and a seat of priority and fairness for as long as it likes.
// (A stream of HTTP/2 is reset.) Requests without an end of their own keep theirs: what is
// proxied may be sent for hours.
func (h *chain) boundBody(w http.ResponseWriter, req *http.Request) {
	if req.ProtoMajor != 1 || req.Body == nil || req.Body == http.NoBody || h.requestTimeout <= 0 {
		return
	}
	info, err := h.requestInfo.NewRequestInfo(req)
	if err == nil && h.longRunning != nil && h.longRunning(req, info) && !bodyless(info) {
		return
	}
	// An error means that the connection cannot do that, as in tests.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(h.requestTimeout + bodyGrace))
}

// bodyless reports whether a body means nothing to the request, however long it runs.
func bodyless(info *request.RequestInfo) bool { return info.Verb == "watch" }
