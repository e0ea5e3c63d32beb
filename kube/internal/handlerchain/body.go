package handlerchain

import (
	"net/http"
	"time"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// bodyGrace is added to the request timeout for the read deadline of the body: by then the request
// was answered.
const bodyGrace = time.Second

// boundRequestBody makes reads of a request's body over HTTP/1.1 fail once the request has timed
// out. Upstream answers such a request with 504, but net/http does not send the answer while the
// abandoned handler reads the body: a client that sends a byte from time to time would keep its
// connection, two goroutines and a seat of priority and fairness indefinitely. An HTTP/2 stream is
// reset instead. A long-running request has no deadline, and gets none here, because sending a
// proxied body may take hours.
func (h *Chain) boundRequestBody(w http.ResponseWriter, req *http.Request) {
	if req.ProtoMajor != 1 || req.Body == nil || req.Body == http.NoBody || h.requestTimeout <= 0 {
		return
	}
	info, err := h.requestInfo.NewRequestInfo(req)
	if err == nil && h.longRunning != nil && h.longRunning(req, info) && !bodyless(info) {
		return
	}
	// An error means that the connection has no deadlines, as in tests.
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(h.requestTimeout + bodyGrace))
}

// bodyless reports whether the request ignores its body, even if it is long-running.
func bodyless(info *request.RequestInfo) bool { return info.Verb == "watch" }
