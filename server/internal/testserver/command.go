// Package testserver implements the hidden command `strata testserver`, the server process of
// package stratatest: several API servers in one process, on one embedded etcd, each with its own
// prefix, certificates and port.
//
//	test process ─▶ strata testserver --dir DIR -- flags of the process
//	                  stdout: one line when the socket accepts requests
//	                  DIR/control.sock: one request per connection, one JSON object each way (Request, Response)
//	                  stdin: never written; at its end, which is that of the test process, the test server stops and removes DIR
package testserver

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/klog/v2"
)

// Protocol is the version of the protocol, which the client compares with its own. A client and a
// server of different versions do not work together.
const Protocol = 1

// SocketName is the name of the control socket in the directory of the test server.
const SocketName = "control.sock"

// gcPercent is the target of the garbage collector unless GOGC is set: starts allocate much, and
// the heap is small. The collector then takes a seventh of the processor time of starts.
const gcPercent = 200

// processFlags are flags of the API server that apply to the whole process. They are arguments of
// the test server.
var processFlags = []string{
	"allow-privileged", "contention-profiling", "emulated-version", "feature-gates", "log-flush-frequency", "log-json-info-buffer-size",
	"log-json-split-stream", "log-text-info-buffer-size", "log-text-split-stream", "logging-format", "max-connection-bytes-per-sec",
	"min-compatibility-version", "v", "vmodule",
}

// Request asks for one thing; the other fields are nil.
type Request struct {
	Start *StartRequest `json:"start,omitempty"`
	User  *UserRequest  `json:"user,omitempty"`
	Stop  *StopRequest  `json:"stop,omitempty"`
}

// StartRequest starts a control plane.
type StartRequest struct {
	Flags []string `json:"flags,omitempty"` // of the API server
}

// UserRequest issues a client certificate.
type UserRequest struct {
	ControlPlane string   `json:"controlPlane"`
	Name         string   `json:"name"`
	Groups       []string `json:"groups,omitempty"`
}

// StopRequest stops a control plane and deletes its data.
type StopRequest struct {
	ControlPlane string `json:"controlPlane"`
}

// Response answers a Request. Fields that do not apply are empty.
type Response struct {
	Error string `json:"error,omitempty"`

	ControlPlane string `json:"controlPlane,omitempty"` // identifies the control plane in requests
	URL          string `json:"url,omitempty"`
	CA           []byte `json:"ca,omitempty"`   // PEM
	Cert         []byte `json:"cert,omitempty"` // PEM, of the administrator or the user
	Key          []byte `json:"key,omitempty"`  // PEM
}

// NewCommand returns `strata testserver`. It serves until its standard input ends or the context of
// the command is cancelled.
func NewCommand() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:           "testserver --dir DIR [-- flags of the process]",
		Short:         "Run control planes for package stratatest",
		Hidden:        true,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			return run(cmd.Context(), dir, args, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the socket and the data, removed at the end")
	if err := cmd.MarkFlagRequired("dir"); err != nil {
		panic(err) // the flag is declared above
	}
	return cmd
}

// run serves requests until in ends or ctx is cancelled, and removes dir. The process ends next:
// control planes are not stopped, because upstream's server exits the process if it is stopped
// while its start hooks run.
func run(ctx context.Context, dir string, args []string, in io.Reader, out io.Writer) (err error) {
	if err := checkDir(dir); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// The test process ends the test server: an interrupt of the terminal reaches both, and the
	// tests' own cleanup may still need the servers. After the end of the test process, writes to
	// the log fail; they must not end the test server before it has removed dir.
	signal.Ignore(syscall.SIGINT, syscall.SIGPIPE)
	go func() {
		_, _ = io.Copy(io.Discard, in) // an error is an end, too
		cancel()
	}()
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	socket := filepath.Join(dir, SocketName)
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("control socket %s: %w; a shorter TMPDIR may help", socket, err)
	}
	defer removeDir(dir)
	context.AfterFunc(ctx, func() { listener.Close() })
	if _, err := fmt.Fprintf(out, "strata testserver, protocol %d\n", Protocol); err != nil {
		return fmt.Errorf("standard output: %w", err)
	}
	h := newHost(ctx, dir, args)
	for {
		conn, err := listener.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("control socket %s: %w", socket, err)
		}
		go h.serve(ctx, conn)
	}
}

// logName is the file of a directory to which the client redirects standard error before the start.
const logName = "log"

// checkDir returns an error if dir has files of others: the end of the process would delete them.
func checkDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("directory of the test server: %w", err)
	}
	for _, entry := range entries {
		if entry.Name() != logName {
			return fmt.Errorf("directory of the test server: %s contains %s, and is removed at the end; choose an empty directory with --dir", dir, entry.Name())
		}
	}
	return nil
}

// removeDir removes dir while etcd, which creates files in it, still runs.
func removeDir(dir string) {
	for range 10 {
		if os.RemoveAll(dir) == nil {
			return
		}
	}
}

// serve answers the request of conn. A client that closes conn cancels its request.
func (h *host) serve(ctx context.Context, conn net.Conn) {
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	context.AfterFunc(ctx, func() { conn.Close() })
	decoder := json.NewDecoder(conn)
	var request Request
	if err := decoder.Decode(&request); err != nil {
		return // the client has gone
	}
	go func() {
		_, _ = io.Copy(io.Discard, conn)
		cancel()
	}()
	started := time.Now()
	response, err := h.answer(ctx, request)
	if err != nil {
		response = Response{Error: err.Error()}
	}
	klog.InfoS("Answered a request", "controlPlane", response.ControlPlane, "err", err, "duration", time.Since(started))
	if err := json.NewEncoder(conn).Encode(response); err != nil && request.Start != nil && response.ControlPlane != "" {
		if err := h.stop(response.ControlPlane); err != nil { // it has no client
			klog.ErrorS(err, "Failed to stop a control plane without a client", "controlPlane", response.ControlPlane)
		}
	}
}

func (h *host) answer(ctx context.Context, r Request) (Response, error) {
	switch {
	case r.Start != nil:
		return h.start(ctx, r.Start.Flags)
	case r.User != nil:
		return h.user(*r.User)
	case r.Stop != nil:
		return Response{}, h.stop(r.Stop.ControlPlane)
	}
	return Response{}, fmt.Errorf("the request is empty")
}

// checkFlags returns an error for flags of the process or of the test server.
func checkFlags(flags []string) error {
	for _, flag := range flags {
		name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
		name = strings.ReplaceAll(name, "_", "-")
		switch {
		case !strings.HasPrefix(flag, "--"):
			return fmt.Errorf("%q is not a flag of the form --name=value", flag)
		case slices.Contains(processFlags, name):
			return fmt.Errorf("--%s applies to the process; the control plane needs a process of its own", name)
		case slices.Contains(ownFlags, name):
			return fmt.Errorf("--%s is set by stratatest and cannot be changed", name)
		}
	}
	return nil
}

// ownFlags are flags that the test server sets, and on which it relies.
var ownFlags = []string{
	"bind-address", "secure-port", "etcd-servers", "etcd-prefix", "client-ca-file", "tls-cert-file", "tls-private-key-file",
}
