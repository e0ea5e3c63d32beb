package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
)

const (
	stepTimeout = time.Minute

	// endMark is printed by the shell after each command: ASCII's record separator.
	endMark = "\x1e"
)

// command is a recorded step. Times count from the beginning.
type command struct {
	text         string
	shown, typed time.Duration // the prompt appears; the command is complete
	output       []line
}

// line is a line of output, with its escape sequences.
type line struct {
	at   time.Duration // of its first byte
	text string
}

// terminal collects the output of a shell.
type terminal struct {
	start time.Time

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each output
	raw     strings.Builder
	lines   []line // of the current command; the last one is not complete
	ended   bool   // the shell printed endMark
}

// record runs the steps in a new directory, and returns them with the time of the last output.
func record(binary string, steps []step) (commands []command, end time.Duration, err error) {
	dir, err := os.MkdirTemp("", "tour-")
	if err != nil {
		return nil, 0, err
	}
	defer os.RemoveAll(dir)
	work := filepath.Join(dir, "tour")
	if err := os.Mkdir(work, 0o755); err != nil {
		return nil, 0, err
	}
	t := &terminal{changed: make(chan struct{})}
	stdin, stop, err := t.open(dir, work, binary)
	if err != nil {
		return nil, 0, err
	}
	defer stop()

	t.start = time.Now()
	for _, s := range steps {
		c := command{text: s.line, shown: t.now()}
		time.Sleep(time.Duration(len(s.line)) * keyPress)
		c.typed = t.now()
		if c.output, err = t.run(stdin, s); err != nil {
			return nil, 0, err
		}
		for i := range c.output {
			c.output[i].text = strings.ReplaceAll(c.output[i].text, work, home)
			end = c.output[i].at
		}
		commands = append(commands, c)
		time.Sleep(s.pause)
	}
	return commands, end, nil
}

func (t *terminal) now() time.Duration { return time.Since(t.start) }

// open starts a shell that writes to a terminal and reads commands from stdin. stop ends it and the
// server that it has started.
func (t *terminal) open(dir, work, binary string) (stdin io.WriteCloser, stop func(), err error) {
	screen, tty, err := pty.Open()
	if err != nil {
		return nil, nil, err
	}
	defer tty.Close()
	if err := pty.Setsize(tty, &pty.Winsize{Cols: columns, Rows: rows}); err != nil {
		return nil, nil, err
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		return nil, nil, err
	}
	if err := os.Symlink(binary, filepath.Join(bin, "strata")); err != nil {
		return nil, nil, err
	}
	shell := exec.Command("bash", "--noprofile", "--norc")
	shell.Dir, shell.Stdout, shell.Stderr = work, tty, tty
	shell.Env = []string{"HOME=" + dir, "PATH=" + bin + ":" + os.Getenv("PATH"), "TERM=xterm-256color", "LANG=C.UTF-8"}
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if stdin, err = shell.StdinPipe(); err != nil {
		return nil, nil, err
	}
	if err := shell.Start(); err != nil {
		return nil, nil, err
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		_, _ = io.Copy(t, screen) // until no process has the terminal open
	}()
	return stdin, func() {
		// the shell, which ignores it, and the server
		_ = syscall.Kill(-shell.Process.Pid, syscall.SIGTERM)
		stdin.Close()
		_ = shell.Wait()
		<-read
		screen.Close()
	}, nil
}

// run runs a step and returns its output.
func (t *terminal) run(stdin io.Writer, s step) ([]line, error) {
	t.mu.Lock()
	t.raw.Reset()
	t.lines, t.ended = []line{{}}, false
	t.mu.Unlock()
	if _, err := fmt.Fprintf(stdin, "{ %s\n} </dev/null; printf '\\036'\n", s.line); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), stepTimeout)
	defer cancel()
	for {
		t.mu.Lock()
		raw, lines, ended, changed := t.raw.String(), slices.Clone(t.lines), t.ended, t.changed
		t.mu.Unlock()
		for _, text := range s.until {
			ended = ended && strings.Contains(raw, text)
		}
		if ended {
			for i := range lines {
				lines[i].text = strings.TrimRight(lines[i].text, "\r")
			}
			if n := len(lines); lines[n-1].text == "" {
				lines = lines[:n-1]
			}
			return lines, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("%s has not ended after %s; its output:\n%s", s.line, stepTimeout, raw)
		}
	}
}

// redrawn returns a line without the text that a bare carriage return has moved the cursor back
// over. Such lines show progress, and begin each drawing by erasing the line. A carriage return at
// the end may be a part of a line break.
func redrawn(text string) string {
	end := len(strings.TrimRight(text, "\r"))
	return text[strings.LastIndex(text[:end], "\r")+1:]
}

// Write adds output of the terminal.
func (t *terminal) Write(data []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := string(data)
	if strings.Contains(text, endMark) {
		text, t.ended = strings.ReplaceAll(text, endMark, ""), true
	}
	t.raw.WriteString(text)
	for i, part := range strings.Split(text, "\n") {
		if len(t.lines) == 0 { // output before the first command: none
			break
		}
		if i > 0 {
			t.lines = append(t.lines, line{})
		}
		last := &t.lines[len(t.lines)-1]
		if last.text == "" {
			last.at = t.now()
		}
		last.text += part
		if text := redrawn(last.text); text != last.text { // the line is shown as it is drawn last
			last.at, last.text = t.now(), text
		}
	}
	close(t.changed)
	t.changed = make(chan struct{})
	return len(data), nil
}
