package readpath

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// brokenResponse is a ResponseWriter whose writes fail.
type brokenResponse struct {
	httptest.ResponseRecorder
	err error
}

func (b *brokenResponse) Write([]byte) (int, error) { return 0, b.err }

// TestBody_ClientDisconnects_HandlerReturns: if the client has disconnected, the handler returns
// like upstream's handlers, and the request is audited and counted like any other. Only a response
// that the client could mistake for a complete one is aborted.
func TestBody_ClientDisconnects_HandlerReturns(t *testing.T) {
	t.Parallel()
	w := watchedPods(t)
	w.put(t, w.object("small", nil))
	w.put(t, w.object("large", map[string]string{"a": strings.Repeat("x", 2*gzipThreshold)}))
	w.catchUp(t)
	for name, test := range map[string]struct {
		err     error
		aborted bool
	}{
		"gone":      {errors.New("broken pipe"), false},
		"too large": {http.ErrContentLength, true},
	} {
		for _, encoding := range []string{"", "gzip"} {
			t.Run(name+encoding, func(t *testing.T) {
				req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?resourceVersion=0", nil)
				req.Header.Set("Accept", string(mediaJSON))
				req.Header.Set("Accept-Encoding", encoding)
				defer func() {
					if x := recover(); test.aborted != (x == http.ErrAbortHandler) || !test.aborted && x != nil {
						t.Errorf("the handler ended with %v", x)
					}
				}()
				w.ServeHTTP(&brokenResponse{*httptest.NewRecorder(), test.err}, req)
			})
		}
	}
}
