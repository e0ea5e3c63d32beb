package readpath

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/slowclient"
)

// blockedClient reads each write for a time.
type blockedClient struct {
	*httptest.ResponseRecorder
	reads time.Duration
}

func (c *blockedClient) Write(p []byte) (int, error) {
	time.Sleep(c.reads)
	return c.ResponseRecorder.Write(p)
}

// TestWatchWriter_AfterInitialEvents_IsNotPaced: a client that blocks after its initial events is
// not slow, also if a gzip member continues.
func TestWatchWriter_AfterInitialEvents_IsNotPaced(t *testing.T) {
	for name, gzip := range map[string]bool{"plain": false, "gzip": true} {
		t.Run(name, func(t *testing.T) {
			for _, listed := range []bool{false, true} {
				synctest.Test(t, func(t *testing.T) {
					client := &blockedClient{ResponseRecorder: httptest.NewRecorder()}
					w := &watchWriter{w: client, flusher: client, gzip: gzip}
					var connections slowclient.Connections
					conn := connections.Begin(httptest.NewRequest(http.MethodGet, "/", nil))
					defer conn.End()
					slow := false
					w.pace(conn, func() { slow = true })
					testcheck.NoError(t, w.write([]byte("an initial event\n")))
					if listed {
						w.unpace()
					}
					client.reads = time.Minute // longer than a slow client may take
					for range 2 {
						testcheck.NoError(t, w.write([]byte("an event\n")))
					}
					testcheck.NoError(t, w.endMember())
					synctest.Wait()
					if slow == listed {
						t.Errorf("initial events sent: %v; the client is slow: %v", listed, slow)
					}
				})
			}
		})
	}
}
