package stratatest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// protocol is the version of the protocol. It is the one of server/internal/testserver, which
// describes it.
const protocol = 1

// request asks for one thing; the other fields are nil.
type request struct {
	Start *startRequest `json:"start,omitempty"`
	User  *userRequest  `json:"user,omitempty"`
	Stop  *stopRequest  `json:"stop,omitempty"`
}

type startRequest struct {
	Flags []string `json:"flags,omitempty"`
}

type userRequest struct {
	ControlPlane string   `json:"controlPlane"`
	Name         string   `json:"name"`
	Groups       []string `json:"groups,omitempty"`
}

type stopRequest struct {
	ControlPlane string `json:"controlPlane"`
}

type response struct {
	Error        string `json:"error"`
	ControlPlane string `json:"controlPlane"`
	URL          string `json:"url"`
	CA           []byte `json:"ca"`
	Cert         []byte `json:"cert"`
	Key          []byte `json:"key"`
}

// testServer is a process of the strata program that runs control planes. There is no goroutine for
// it, so that tests may look for leaked ones: a call is a connection to its socket, its log is a
// file, and the end of this process closes its standard input, which ends it.
type testServer struct {
	dir   string // with the socket and the data; the test server removes it
	cmd   *exec.Cmd
	stdin io.Closer // never closed
	log   *os.File  // readable also after dir was removed
}

// testServers has the running processes, by their flags. The lock is held while one is started,
// which takes some 50 ms.
var testServers = struct {
	sync.Mutex
	running map[string]*testServer
}{running: map[string]*testServer{}}

// acquire returns the process with the flags, and starts it if there is none.
func acquire(ctx context.Context, flags []string) (*testServer, error) {
	testServers.Lock()
	defer testServers.Unlock()
	key := quoted(flags)
	if g := testServers.running[key]; g != nil {
		return g, nil
	}
	g, err := startTestServer(ctx, flags)
	if err != nil {
		return nil, err
	}
	testServers.running[key] = g
	return g, nil
}

// startTestServer starts a process and returns when its socket accepts requests.
func startTestServer(ctx context.Context, flags []string) (_ *testServer, err error) {
	binary, err := findBinary()
	if err != nil {
		return nil, err
	}
	g := &testServer{}
	if g.dir, err = os.MkdirTemp("", "stratatest-"); err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w%s", binary, err, g.lastLines())
			if started {
				_ = g.cmd.Process.Kill()
				_ = g.cmd.Wait()
			}
			_ = os.RemoveAll(g.dir)
		}
	}()
	if g.log, err = os.Create(filepath.Join(g.dir, "log")); err != nil {
		return nil, err
	}
	stdout, child, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer stdout.Close()
	g.cmd = exec.Command(binary, append([]string{"testserver", "--dir=" + g.dir, "--"}, flags...)...)
	g.cmd.Stdout, g.cmd.Stderr = child, g.log
	if g.stdin, err = g.cmd.StdinPipe(); err != nil {
		_ = child.Close()
		return nil, err
	}
	err = g.cmd.Start()
	_ = child.Close()
	if err != nil {
		return nil, err
	}
	started = true
	return g, awaitTestServer(ctx, stdout)
}

// awaitTestServer reads the line that a test server prints when it accepts requests.
func awaitTestServer(ctx context.Context, stdout *os.File) error {
	if deadline, ok := ctx.Deadline(); ok {
		if err := stdout.SetReadDeadline(deadline); err != nil {
			return err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = stdout.SetReadDeadline(time.Now()) })
	defer stop()
	var line []byte
	for !bytes.HasSuffix(line, []byte("\n")) {
		var one [1]byte
		if _, err := stdout.Read(one[:]); err != nil {
			if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
				return fmt.Errorf("not ready in time: %w", context.DeadlineExceeded)
			}
			return errors.New("exited before it was ready; it is another program, or an older release of strata")
		}
		line = append(line, one[0])
	}
	var got int
	if _, err := fmt.Sscanf(string(line), "strata testserver, protocol %d\n", &got); err != nil {
		return fmt.Errorf("printed %q; it is another program, or an older release of strata", line)
	}
	if got != protocol {
		return fmt.Errorf("has version %d of the protocol, package stratatest has %d; use the same release of both", got, protocol)
	}
	return nil
}

// call sends a request and returns the response.
func (g *testServer) call(ctx context.Context, r request) (response, error) {
	answer, err := g.exchange(ctx, r)
	switch {
	case err != nil && ctx.Err() != nil:
		return response{}, fmt.Errorf("no answer in time: %w%s", ctx.Err(), g.lastLines())
	case err != nil:
		g.forget()
		return response{}, fmt.Errorf("the process of strata ended: %w%s", err, g.lastLines())
	case answer.Error != "" && r.Start != nil:
		return response{}, fmt.Errorf("%s%s", answer.Error, g.lastLines())
	case answer.Error != "":
		return response{}, errors.New(answer.Error)
	}
	return answer, nil
}

func (g *testServer) exchange(ctx context.Context, r request) (answer response, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(g.dir, "control.sock"))
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Now()) })
	defer stop()
	if err := json.NewEncoder(conn).Encode(r); err != nil {
		return answer, err
	}
	err = json.NewDecoder(conn).Decode(&answer)
	return answer, err
}

// forget makes the next start use another process, and removes the files of this one.
func (g *testServer) forget() {
	testServers.Lock()
	defer testServers.Unlock()
	for key, running := range testServers.running {
		if running == g {
			delete(testServers.running, key)
			_ = g.cmd.Process.Kill() // it does not answer
			_ = g.cmd.Wait()
			_ = os.RemoveAll(g.dir)
		}
	}
}

const (
	logLines = 15
	logBytes = 8 << 10
)

// lastLines returns the last lines of the log, as the end of an error message.
func (g *testServer) lastLines() string {
	if g.log == nil {
		return ""
	}
	info, err := g.log.Stat()
	if err != nil {
		return ""
	}
	tail := make([]byte, min(info.Size(), logBytes))
	n, _ := g.log.ReadAt(tail, info.Size()-int64(len(tail)))
	lines := strings.Split(strings.TrimSpace(string(tail[:n])), "\n")
	lines = lines[max(0, len(lines)-logLines):]
	if lines[0] == "" {
		return ""
	}
	return "\nlast lines of its log:\n\t" + strings.Join(lines, "\n\t")
}
