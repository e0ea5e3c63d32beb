package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// etcdStart bounds the start of an etcd without data.
const etcdStart = 5 * time.Minute

// etcdServer is a process with an etcd without data, on a loopback port that it picked.
type etcdServer struct {
	url     string
	dir     string
	process *process.Child
}

// startEtcd starts the program that etcdMain is the source of and waits until it serves.
func startEtcd(ctx context.Context, program string) (_ *etcdServer, err error) {
	dir, err := os.MkdirTemp("", "strata-suites-etcd-")
	if err != nil {
		return nil, err
	}
	child, err := process.Start(process.Spec{
		Name: "etcd", Path: program, Args: []string{"loopback", "--data-dir=" + filepath.Join(dir, "data"), "--unsafe-no-fsync"},
		Log: filepath.Join(dir, "log"), Tee: os.Stderr, Lines: true,
	})
	if err != nil {
		os.RemoveAll(dir)
		return nil, err
	}
	s := &etcdServer{dir: dir, process: child}
	ctx, cancel := context.WithTimeoutCause(ctx, etcdStart, fmt.Errorf("not ready after %s", etcdStart))
	defer cancel()
	line, _, err := child.WaitLine(ctx, 0, "ready ")
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	s.url = strings.TrimPrefix(line, "ready ")
	return s, nil
}

// stop stops the process, waits for its end and removes the data.
func (s *etcdServer) stop() {
	_ = s.process.Stop(syscall.SIGTERM, killGrace) // gone in any case
	os.RemoveAll(s.dir)
}
