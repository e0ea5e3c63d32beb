package replica

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"time"

	"golang.org/x/net/http/httpguts"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	// proxyGrace is added to the request timeout, at which a primary answers with 504.
	proxyGrace = 5 * time.Second
	// refusalTime is the time in which a client takes an answer of 400 or above, and in which the
	// rest of its body is read. A guess.
	refusalTime = 10 * time.Second
)

type controllerKey struct{}

// withDeadlines bounds the time of a request that is not long-running, whatever its client sends or
// reads: a client that waits cannot hold a place among the requests in flight. A long-running
// request has no bound, except for its refusal; see boundRefusal.
func withDeadlines(next http.Handler, timeout time.Duration, longRunning request.LongRunningRequestCheck) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		rc := http.NewResponseController(w)
		// Deadlines are those of the connection with HTTP/1.1, and would end later requests. Errors
		// mean that there are none, as in tests.
		defer func() { _ = rc.SetWriteDeadline(time.Time{}) }()
		ctx := context.WithValue(req.Context(), controllerKey{}, rc)
		info, _ := request.RequestInfoFrom(ctx)
		if timeout > 0 && (info == nil || longRunning == nil || !longRunning(req, info)) {
			limited, cancel := context.WithTimeout(ctx, timeout+proxyGrace)
			defer cancel()
			ctx = limited
			setDeadlines(rc, timeout+2*proxyGrace)
		}
		next.ServeHTTP(w, req.WithContext(ctx))
	})
}

// boundRefusal bounds the time in which the client of withDeadlines takes a refusal. net/http reads
// the rest of a body before it sends one.
func boundRefusal(ctx context.Context) {
	if rc, ok := ctx.Value(controllerKey{}).(*http.ResponseController); ok {
		setDeadlines(rc, refusalTime)
	}
}

func setDeadlines(rc *http.ResponseController, limit time.Duration) {
	end := time.Now().Add(limit)
	_ = errors.Join(rc.SetReadDeadline(end), rc.SetWriteDeadline(end)) // see withDeadlines
}

// withSendableIdentity answers 403 to a user whose names a header cannot have: HTTP/1.1 removes
// spaces at both ends of a value, so the primary would see another user or group.
func withSendableIdentity(next http.Handler, codecs runtime.NegotiatedSerializer) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if u, ok := request.UserFrom(req.Context()); ok { // otherwise see setIdentity
			if err := checkSendable(u); err != nil {
				responsewriters.ErrorNegotiated(apierrors.NewForbidden(schema.GroupResource{}, "", err), codecs, groupVersionOf(req), w, req)
				return
			}
		}
		next.ServeHTTP(w, req)
	})
}

// checkSendable returns an error if the identity of a user would change in the headers of a front
// proxy.
func checkSendable(u user.Info) error {
	if u.GetName() == "" {
		return errors.New("the user has no name")
	}
	values := append([]string{u.GetName(), u.GetUID()}, u.GetGroups()...)
	for _, extra := range u.GetExtra() {
		values = append(values, extra...)
	}
	for _, value := range values {
		if textproto.TrimString(value) != value || !httpguts.ValidHeaderFieldValue(value) {
			return fmt.Errorf("the user or group %q has characters that cannot be sent to an API server of --primary; send the request to one of them", value)
		}
	}
	return nil
}
