package stratatest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// startEnv makes the test binary start a control plane, print the process id and the directory of
// the test server, and wait.
const startEnv = "STRATATEST_START"

func TestMain(m *testing.M) {
	if os.Getenv(startEnv) != "" {
		startAndWait()
	}
	if os.Getenv(binaryEnv) == "" {
		if err := buildBinary(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// buildBinary builds the strata program as the tests of the server do, and sets the variable that
// names it.
func buildBinary() error {
	path, err := filepath.Abs("../bin/test/strata")
	if err != nil {
		return err
	}
	build := exec.Command("go", "build", "-o", path, "./server/cmd/strata")
	build.Dir = ".."
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build strata: %w\n%s", err, out)
	}
	return os.Setenv(binaryEnv, path)
}

func startAndWait() {
	p, err := New(context.Background())
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(p.server.cmd.Process.Pid, p.server.dir)
	select {} // until it is killed
}
