package up

import (
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc/grpclog"
	"gopkg.in/natefinch/lumberjack.v2"
	"k8s.io/klog/v2"
)

const (
	// A log file is renamed when it holds logFileMB, and logBackups renamed ones are kept, so that a control plane left running does
	// not fill the disk. Guesses: days of a busy server at the default verbosity.
	logFileMB  = 20
	logBackups = 2
)

// logFile receives what the parts of the process log, so that the terminal shows the steps of `strata up` and nothing else.
type logFile struct {
	file   *lumberjack.Logger
	stderr *os.File // what os.Stderr was
	pipe   *os.File // what os.Stderr is now
	copied chan struct{}
}

// openLog redirects every logger of the process to the file at path until Close: etcd's, gRPC's, package log, and klog. The last writes to
// whatever os.Stderr is when logging is configured, and takes no writer that rotates; therefore os.Stderr becomes a pipe into the file.
// Crashes of the Go runtime still go to the process's own standard error. Call it before anything else logs.
func openLog(path string) (*logFile, error) {
	l := &logFile{
		file:   &lumberjack.Logger{Filename: path, MaxSize: logFileMB, MaxBackups: logBackups},
		stderr: os.Stderr,
		copied: make(chan struct{}),
	}
	if _, err := fmt.Fprintf(l.file, "--- strata up, process %d, %s\n", os.Getpid(), time.Now().Format(time.RFC3339)); err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("log: %w", err)
	}
	l.pipe = write
	go func() {
		defer close(l.copied)
		defer read.Close()
		if _, err := io.Copy(l.file, read); err != nil {
			fmt.Fprintln(l.stderr, "strata: log:", err)
			io.Copy(io.Discard, read) // whoever logs must not block
		}
	}()
	os.Stderr = write
	log.SetOutput(write)
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, write))
	klog.OsExit = l.exit
	return l, nil
}

// exit is what klog calls after a fatal message: the reason must get into the file, and the terminal must say where it is.
func (l *logFile) exit(int) {
	l.pipe.Close()
	select {
	case <-l.copied:
	case <-time.After(time.Second): // something went wrong with the file, too
	}
	fmt.Fprintf(l.stderr, "strata: a part of the control plane cannot go on; the end of %s says why\n", l.file.Filename)
	os.Exit(1)
}

// etcdLogger returns a logger of warnings and errors for the embedded etcd.
func (l *logFile) etcdLogger() *zap.Logger {
	encoding := zap.NewProductionEncoderConfig()
	encoding.EncodeTime = zapcore.ISO8601TimeEncoder
	return zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(encoding), zapcore.AddSync(l.file), zap.WarnLevel)).Named("etcd")
}

// Close gives os.Stderr back and returns when everything logged before is in the file.
func (l *logFile) Close() {
	os.Stderr = l.stderr
	log.SetOutput(l.stderr)
	klog.OsExit = os.Exit
	l.pipe.Close()
	<-l.copied
	l.file.Close()
}
