package embedetcd

import (
	"fmt"
	"os"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// quietLogger writes errors to standard error, one line each.
func quietLogger() (*zap.Logger, error) {
	c := zap.NewProductionConfig()
	c.Level = zap.NewAtomicLevelAt(zap.ErrorLevel)
	c.Encoding = "console"
	c.EncoderConfig.EncodeTime = zapcore.ISO8601TimeEncoder
	c.DisableStacktrace = true
	logger, err := c.Build()
	if err != nil {
		return nil, fmt.Errorf("etcd logger: %w", err)
	}
	return logger, nil
}

// expected are warnings and errors that etcd logs at every start of a single embedded member and
// that need no action.
var expected = map[string]bool{
	// A new store has no term before its first commit (at most 100 ms after the start), but a
	// single member elects itself, and tries to write the version, before that. etcd retries 4 s
	// later.
	"failed to update storage version": true,
	"Failed to detect schema version":  true,
	// Advice for clusters of several members, and for HTTP clients, of which there are none.
	"Running http and grpc server on single port. This is not recommended for production.": true,
	// About etcd's own users and passwords, which are off.
	"simple token is not cryptographically signed": true,
}

func dropExpected(c zapcore.Core) zapcore.Core { return expectedFilter{c} }

// expectedFilter is a Core that drops the expected messages.
type expectedFilter struct{ zapcore.Core }

func (f expectedFilter) With(fields []zapcore.Field) zapcore.Core {
	return expectedFilter{f.Core.With(fields)}
}

func (f expectedFilter) Check(entry zapcore.Entry, checked *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	if expected[entry.Message] {
		return checked
	}
	return f.Core.Check(entry, checked)
}

// fatalHook is called after a fatal message of etcd.
type fatalHook struct {
	started atomic.Bool
	report  func(error) // see Config.Fatal
}

// OnWrite panics during the start, which startEtcd converts to an error. Later it reports the
// message with its cause, and ends the process.
func (h *fatalHook) OnWrite(entry *zapcore.CheckedEntry, fields []zapcore.Field) {
	if !h.started.Load() {
		zapcore.WriteThenPanic.OnWrite(entry, fields)
	}
	err := fmt.Errorf("etcd cannot continue: %s", entry.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok {
			err = fmt.Errorf("%w: %w", err, cause)
		}
	}
	if h.report != nil {
		h.report(err)
	} else {
		fmt.Fprintln(os.Stderr, "strata:", err)
	}
	os.Exit(1)
}
