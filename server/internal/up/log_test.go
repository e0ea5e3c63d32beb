package up

import (
	"bytes"
	"errors"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/grpclog"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestOpenLog_CapturesEveryLogger(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	before := os.Stderr
	l, err := openLog(path)
	testcheck.NoError(t, err)
	klog.Error("from klog")
	log.Print("from package log")
	grpclog.Error("from gRPC")
	fmt.Fprintln(os.Stderr, "from stderr")
	l.etcdLogger().Error("from etcd")
	klog.Flush()
	l.Close()
	if os.Stderr != before {
		t.Error("os.Stderr has not been given back")
	}
	data, err := os.ReadFile(path)
	testcheck.NoError(t, err)
	for _, want := range []string{"from klog", "from package log", "from gRPC", "from stderr", "from etcd"} {
		if !strings.Contains(string(data), want) {
			t.Errorf("%q is not in the log:\n%s", want, data)
		}
	}
}

// fatalLogVar makes TestOpenLog_FatalMessage_NamesLogFile run as the process that logs a fatal
// message, to the file named by the variable.
const fatalLogVar = "STRATA_TEST_FATAL_LOG"

func TestOpenLog_FatalMessage_NamesLogFile(t *testing.T) {
	if path := os.Getenv(fatalLogVar); path != "" {
		if _, err := openLog(path); err != nil {
			t.Fatal(err)
		}
		klog.Fatal("the reason")
	}
	path := filepath.Join(t.TempDir(), "log")
	cmd := exec.Command(os.Args[0], "-test.run=^TestOpenLog_FatalMessage_NamesLogFile$")
	cmd.Env = append(os.Environ(), fatalLogVar+"="+path)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("the process ended with %v, want code 1", err)
	}
	if got := stderr.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, path) {
		t.Errorf("standard error is %q, want one line with %s", got, path)
	}
	if data, err := os.ReadFile(path); err != nil || !strings.Contains(string(data), "the reason") {
		t.Errorf("the log is %q, %v", data, err)
	}
}

func TestOpenLog_UnwritablePath_ReturnsError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	testcheck.NoError(t, os.WriteFile(file, nil, 0o600))
	if _, err := openLog(filepath.Join(file, "log")); err == nil {
		t.Error("opened a log below a file")
	}
}

// TestLossyWriter_FileFull_ReportsOnceAndContinues: a log whose disk was full for a while goes on.
func TestLossyWriter_FileFull_ReportsOnceAndContinues(t *testing.T) {
	var file, stderr bytes.Buffer
	var full error
	w := &lossyWriter{stderr: &stderr, to: writerFunc(func(p []byte) (int, error) {
		if full != nil {
			return 0, full
		}
		return file.Write(p)
	})}
	for _, line := range []string{"first", "lost", "lost too", "last"} {
		full = nil
		if strings.HasPrefix(line, "lost") {
			full = syscall.ENOSPC
		}
		if n, err := w.Write([]byte(line)); n != len(line) || err != nil {
			t.Errorf("%s: %d bytes, %v", line, n, err)
		}
	}
	if file.String() != "firstlast" || strings.Count(stderr.String(), "no space left on device") != 1 {
		t.Errorf("the file has %q, standard error %q", file.String(), stderr.String())
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
