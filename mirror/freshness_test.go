package mirror

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/stratakube/strata/mirror/driver"
)

// progressSource answers progress requests with an error, or none.
type progressSource struct {
	driver.Source
	err error
}

func (s progressSource) RequestProgress(context.Context) error { return s.err }

// TestRequestProgress_Failure_IsLogged, unless the mirror is closed. A source that delivers every
// revision gets no requests.
func TestRequestProgress_Failure_IsLogged(t *testing.T) {
	failed := errors.New("no feed")
	for name, c := range map[string]struct {
		err                                 error
		closed, everyRevision, sent, logged bool
	}{
		"answered":       {nil, false, false, true, false},
		"failed":         {failed, false, false, true, true},
		"closed":         {failed, true, false, true, false},
		"every revision": {failed, false, true, false, false},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		if c.closed {
			cancel()
		}
		var log bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
		s := &shared{ctx: ctx, opts: Options{Source: progressSource{err: c.err}, Logger: logger, EveryRevision: c.everyRevision}}
		s.requestProgress(t.Context())
		if sent := s.stats.ProgressRequests.Load() == 1; sent != c.sent || strings.Contains(log.String(), "Progress request failed") != c.logged {
			t.Errorf("%s: sent: %t, log %q", name, sent, log.String())
		}
		cancel()
	}
}
