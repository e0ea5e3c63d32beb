package up

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/grpclog"
	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/kubestorage"
)

const (
	// The log file is rotated at logFileMB, and logBackups rotated files are kept, so that a
	// long-running control plane does not fill the disk. Guesses: days of a busy server at the
	// default verbosity.
	logFileMB  = 20
	logBackups = 2
)

// logFile receives the logs of all components of the process, so that the terminal shows only the
// steps of `strata up`.
type logFile struct {
	file   *lumberjack.Logger
	stderr *os.File // the original os.Stderr
	pipe   *os.File // the current os.Stderr
	copied chan struct{}
}

// openLog redirects every logger of the process to the file at path until Close: etcd's, gRPC's,
// package log, and klog. klog writes to the value of os.Stderr at the time when logging is
// configured, and does not accept a rotating writer; therefore os.Stderr is replaced by a pipe into
// the file. Crashes of the Go runtime still go to the process's own standard error. openLog must be
// called before the first log message.
func openLog(path string) (*logFile, error) {
	l := &logFile{
		file:   &lumberjack.Logger{Filename: path, MaxSize: logFileMB, MaxBackups: logBackups},
		stderr: os.Stderr,
		copied: make(chan struct{}),
	}
	if _, err := fmt.Fprintf(l.file, "--- strata up, process %d, %s\n", os.Getpid(), time.Now().Format(time.RFC3339)); err != nil {
		return nil, fmt.Errorf("log: %w; make the file writable, or free space on its file system", err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	l.pipe = write
	go func() {
		defer close(l.copied)
		defer read.Close()
		_, _ = io.Copy(&lossyWriter{to: l.file, stderr: l.stderr}, read) // read does not fail
	}()
	os.Stderr = write
	log.SetOutput(write)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, write))
	klog.OsExit = l.exit
	return l, nil
}

// lossyWriter drops what it cannot write, for example while the disk is full: writers to the log
// must not block. It reports the first of consecutive failures.
type lossyWriter struct {
	to, stderr io.Writer
	failed     bool
}

func (w *lossyWriter) Write(p []byte) (int, error) {
	_, err := w.to.Write(p)
	if err != nil && !w.failed {
		fmt.Fprintf(w.stderr, "strata: log: %v; messages are lost until the file can be written\n", err)
	}
	w.failed = err != nil
	return len(p), nil
}

// etcdFailed prints why etcd cannot continue to the terminal, since the log may be on the same full
// file system. The process exits afterwards.
func (l *logFile) etcdFailed(err error) {
	next := "see " + l.file.Filename
	if errors.Is(err, syscall.ENOSPC) {
		next = "free space on the file system of the data directory, and start again"
	}
	fmt.Fprintf(l.stderr, "strata: %v; %s\n", err, next)
}

// exit is called by klog after a fatal message. It waits until the message is in the file, and
// prints the path of the file to the terminal.
func (l *logFile) exit(int) {
	_ = l.pipe.Close()
	select {
	case <-l.copied:
	case <-time.After(time.Second): // writing the file may have failed, too
	}
	fmt.Fprintf(l.stderr, "strata: a component of the control plane failed; see the end of %s\n", l.file.Filename)
	os.Exit(1)
}

// etcdLogger returns a logger of warnings and errors for the embedded etcd.
func (l *logFile) etcdLogger() *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.ISO8601TimeEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(encoding), zapcore.AddSync(l.file), zap.WarnLevel)).Named("etcd")
}

// Close restores os.Stderr and returns when all earlier log messages are in the file.
func (l *logFile) Close() {
	os.Stderr = l.stderr
	log.SetOutput(l.stderr)
	klog.OsExit = os.Exit
	_ = l.pipe.Close()
	<-l.copied
	_ = l.file.Close()
}

// stepPrinter prints the steps of startup and shutdown for the user, one line each, with the time
// since the start. Its methods may be called concurrently.
type stepPrinter struct {
	line  *statusline.Line
	start time.Time
}

func newStepPrinter(out io.Writer) *stepPrinter {
	return &stepPrinter{line: statusline.NewLine(out), start: time.Now()}
}

func (p *stepPrinter) step(format string, args ...any) {
	p.line.Print(p.text(format, args...))
}

func (p *stepPrinter) text(format string, args ...any) string {
	return fmt.Sprintf("%7.2fs  %s", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// waiting shows a step that lasts until stop is called.
func (p *stepPrinter) waiting(state func() string) (stop func()) {
	return p.line.Watch(func(time.Duration) string { return p.text("%s", state()) })
}

// loading is the state of an API server that starts. The zero value is one that has not begun to
// load.
type loading struct {
	state atomic.Pointer[func(context.Context) kubestorage.LoadState]
}

// begin sets the function that returns the state of the load.
func (l *loading) begin(state func(context.Context) kubestorage.LoadState) { l.state.Store(&state) }

// text returns the state for the user; log is the path of the log.
func (l *loading) text(ctx context.Context, log string) string {
	if state := l.state.Load(); state != nil {
		if s := (*state)(ctx); s.Loading {
			return fmt.Sprintf("API server: loading objects from etcd: %s, at %s", statusline.Count(s.Objects, s.Total), s.Resource)
		}
	}
	return "API server: not ready yet; see " + log
}
