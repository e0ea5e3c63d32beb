package overload

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

// newMemoryGroup returns a new control group without a limit, in a new one with a limit in bytes.
// It skips the test where control groups cannot be made. Both are removed at the end of the test,
// after the processes of environments that are made later.
func newMemoryGroup(t *testing.T, limit int64) (dir string) {
	t.Helper()
	root, version2 := "/sys/fs/cgroup/memory", memoryGroups2()
	if version2 {
		root = "/sys/fs/cgroup"
	}
	parent, err := os.MkdirTemp(root, "strata-test-")
	if err != nil {
		testrequire.Missing(t, "cgroups", fmt.Sprintf("control groups are not writable: %v", err))
	}
	t.Cleanup(func() { harness.Check(t, os.Remove(parent)) })
	err = limitMemory(parent, limit)
	if err == nil && version2 {
		err = os.WriteFile(filepath.Join(parent, "cgroup.subtree_control"), []byte("+memory"), 0o644)
	}
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		testrequire.Missing(t, "cgroups", fmt.Sprintf("control groups here have no limits of memory: %v", err))
	}
	harness.Check(t, err)
	dir = filepath.Join(parent, "unit")
	harness.Check(t, os.Mkdir(dir, 0o755))
	t.Cleanup(func() { harness.Check(t, os.Remove(dir)) })
	return dir
}

// memoryGroups2 reports whether control groups have version 2, otherwise 1.
func memoryGroups2() bool {
	_, err := os.Stat("/sys/fs/cgroup/cgroup.controllers")
	return err == nil
}

// limitMemory limits the memory of a control group. Version 1 returns an error if it cannot free
// the excess; version 2 ends a process then.
func limitMemory(group string, limit int64) error {
	file := "memory.limit_in_bytes"
	if memoryGroups2() {
		file = "memory.max"
	}
	return os.WriteFile(filepath.Join(group, file), []byte(strconv.FormatInt(limit, 10)), 0o644)
}

// TestMemoryLimit_OfParentGroup_BoundsServer starts a server in a control group without a limit,
// whose parent has one, as systemd does for a unit in a slice with MemoryMax. The bound of lists in
// flight is an eighth of nine tenths of that limit.
func TestMemoryLimit_OfParentGroup_BoundsServer(t *testing.T) {
	harness.OnlyStrata(t) // upstream has no such bounds
	const limit = 3 << 30
	group := newMemoryGroup(t, limit)
	ctx := harness.Context(t, 3*time.Minute)
	env := harness.New(t).DefaultGC()
	server := env.StartAPIServerPrepared(func(pid int) error {
		return os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644)
	}, env.Etcd())
	harness.Check(t, server.Await(ctx, "/readyz"))
	got, err := server.API().Metric(ctx, "strata_lists_in_flight_limit_bytes")
	harness.Check(t, err)
	if want := limit / 10 * 9 / 8; int64(got) != int64(want) {
		t.Errorf("the bound of lists in flight is %.0f bytes, want %d", got, want)
	}
}
