// Package component gives the components of Kubernetes that run in the process of strata up a
// logger that reports errors only, and the user agents of their own programs.
package component

import (
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// ErrorLogger returns a logger that writes errors to klog, and messages only if klog's verbosity is
// 1 or more (--v).
func ErrorLogger() logr.Logger {
	background := klog.Background()
	inner := background.GetSink()
	if s, ok := inner.(logr.CallDepthLogSink); ok {
		inner = s.WithCallDepth(1) // of sink's methods
	}
	return background.WithSink(sink{inner})
}

// sink passes on errors, and messages with verbosity.
type sink struct{ inner logr.LogSink }

func (s sink) Init(logr.RuntimeInfo) {} // klog.Background has initialized inner

func (s sink) Enabled(level int) bool { return klog.V(1).Enabled() && s.inner.Enabled(level) }

func (s sink) Info(level int, msg string, keysAndValues ...any) {
	s.inner.Info(level, msg, keysAndValues...)
}

func (s sink) Error(err error, msg string, keysAndValues ...any) {
	s.inner.Error(err, msg, keysAndValues...)
}

func (s sink) WithValues(keysAndValues ...any) logr.LogSink {
	return sink{s.inner.WithValues(keysAndValues...)}
}

func (s sink) WithName(name string) logr.LogSink { return sink{s.inner.WithName(name)} }

// WithCallDepth makes the loggers of helper functions print the position of their callers.
func (s sink) WithCallDepth(depth int) logr.LogSink {
	if inner, ok := s.inner.(logr.CallDepthLogSink); ok {
		return sink{inner.WithCallDepth(depth)}
	}
	return s
}

// UserAgent returns a user agent of client-go with the name of another program: "strata/v1
// (linux/amd64)" as "kwok" is "kwok/v1 (linux/amd64)". The API server names a field manager after
// the part before the first slash, which client-go sets to the name of the process. Without another
// name, each controller would be "strata" in metadata.managedFields and in the output of strata
// history log.
func UserAgent(program, agent string) string {
	_, rest, _ := strings.Cut(agent, "/")
	return program + "/" + rest
}
