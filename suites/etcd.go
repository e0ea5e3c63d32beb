package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// etcdStart bounds the start of an etcd without data.
const etcdStart = time.Minute

// etcdServer is a process with an etcd without data, on a loopback port that it picked.
type etcdServer struct {
	url   string
	dir   string
	cmd   *exec.Cmd
	ended chan struct{} // closed when the process has ended
}

// startEtcd starts the program that etcdMain is the source of and waits until it serves.
func startEtcd(ctx context.Context, program string) (_ *etcdServer, err error) {
	dir, err := os.MkdirTemp("", "strata-suites-etcd-")
	if err != nil {
		return nil, err
	}
	s := &etcdServer{dir: dir, ended: make(chan struct{})}
	s.cmd = exec.Command(program, "loopback", "--data-dir="+filepath.Join(dir, "data"), "--unsafe-no-fsync")
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("start etcd: %w", err)
	}
	first := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(out)
		for lines.Scan() {
			select {
			case first <- lines.Text():
			default:
			}
		}
		s.cmd.Wait()
		close(s.ended)
	}()
	select {
	case line := <-first:
		url, ok := strings.CutPrefix(line, "ready ")
		if !ok {
			s.stop()
			return nil, fmt.Errorf("start etcd: it printed %q", line)
		}
		s.url = url
		return s, nil
	case <-s.ended:
		err = fmt.Errorf("start etcd: it ended")
	case <-ctx.Done():
		err = ctx.Err()
	case <-time.After(etcdStart):
		err = fmt.Errorf("start etcd: not ready after %s", etcdStart)
	}
	s.stop()
	return nil, err
}

// stop stops the process, waits for its end and removes the data.
func (s *etcdServer) stop() {
	s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.ended:
	case <-time.After(killGrace):
		s.cmd.Process.Kill()
		<-s.ended
	}
	os.RemoveAll(s.dir)
}
