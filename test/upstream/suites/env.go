package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Env contains the directories and options that suites share.
type Env struct {
	Root string // of the repository
	Bin  string // for programs and copies: bin/suites
	// Parallel is the number of parallel tests that a unit runs at once (-test.parallel).
	Parallel int
	// Workspace is the go.work file for go commands, "" for none.
	Workspace string
}

// in returns the same with a workspace.
func (e *Env) in(workspace string) *Env {
	with := *e
	with.Workspace = workspace
	return &with
}

// inRepository returns the same with the workspace of the repository, as `make build`.
func (e *Env) inRepository() *Env { return e.in(filepath.Join(e.Root, "go.work")) }

// goCommand returns a go command in dir, in the workspace of e.
func (e *Env) goCommand(ctx context.Context, dir string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK="+cmp.Or(e.Workspace, "off"), "GOFLAGS=-buildvcs=false")
	cmd.Stderr = os.Stderr
	return cmd
}

// goOutput runs go and returns its output without surrounding space.
func (e *Env) goOutput(ctx context.Context, dir string, args ...string) (string, error) {
	out, err := e.goCommand(ctx, dir, args...).Output()
	if err != nil {
		return "", fmt.Errorf("go %s (in %s): %w", strings.Join(args, " "), dir, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// goRun runs go and shows its output.
func (e *Env) goRun(ctx context.Context, dir string, args ...string) error {
	cmd := e.goCommand(ctx, dir, args...)
	cmd.Stdout = os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s (in %s): %w", strings.Join(args, " "), dir, err)
	}
	return nil
}

// module is a module of the build list of server/.
type module struct{ Path, Version, Dir string }

// serverModule returns a module that the server is built with, after downloading it.
func (e *Env) serverModule(ctx context.Context, path string) (module, error) {
	server := filepath.Join(e.Root, "server")
	if err := e.goRun(ctx, server, "mod", "download", path); err != nil {
		return module{}, err
	}
	line, err := e.goOutput(ctx, server, "list", "-m", "-f", "{{.Version}} {{.Dir}}", path)
	if err != nil {
		return module{}, err
	}
	version, dir, ok := strings.Cut(line, " ")
	if !ok || dir == "" {
		return module{}, fmt.Errorf("module %s: go list printed %q", path, line)
	}
	return module{path, version, dir}, nil
}

// download returns the directory of a module, which need not be in a build list.
func (e *Env) download(ctx context.Context, path, version string) (string, error) {
	out, err := e.goOutput(ctx, filepath.Join(e.Root, "server"), "mod", "download", "-json", path+"@"+version)
	if err != nil {
		return "", err
	}
	var source module
	err = json.Unmarshal([]byte(out), &source)
	return source.Dir, err
}

// killGrace is the time that a process has to end after SIGTERM or an interrupt; a test binary
// stops its etcd meanwhile.
const killGrace = 10 * time.Second

// runGroup runs cmd in a process group of its own and waits until its output ends. When ctx is
// cancelled the whole group is interrupted, and killed after killGrace; when cmd has ended, its
// remaining children are killed too.
func runGroup(ctx context.Context, cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.WaitDelay = killGrace
	if err := cmd.Start(); err != nil {
		return err
	}
	group := -cmd.Process.Pid
	stop := context.AfterFunc(ctx, func() {
		syscall.Kill(group, syscall.SIGTERM)
		time.AfterFunc(killGrace, func() { syscall.Kill(group, syscall.SIGKILL) })
	})
	err := cmd.Wait()
	stop()
	if killErr := syscall.Kill(group, syscall.SIGKILL); killErr != nil && !errors.Is(killErr, syscall.ESRCH) {
		return errors.Join(err, fmt.Errorf("kill processes left by %s: %w", cmd.Path, killErr))
	}
	return errors.Join(err, ctx.Err())
}
