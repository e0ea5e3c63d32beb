package apiserver

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestGroupLimit_AncestorsAndMounts_LowestCounts reads the control groups of a process from files
// like those of /proc and /sys. The mounts in mountinfo are below $T.
func TestGroupLimit_AncestorsAndMounts_LowestCounts(t *testing.T) {
	const (
		none      = math.MaxInt64
		v2        = "30 20 0:26 / $T/cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1        = "31 20 0:27 / $T/cpu rw - cgroup cgroup rw,cpu\n32 20 0:28 / $T/mem rw - cgroup cgroup rw,memory\n"
		unlimited = "9223372036854771712\n" // of version 1
	)
	for name, test := range map[string]struct {
		cgroup, mounts string
		files          map[string]string
		limit          int64
	}{
		"container, version 2": {"0::/\n", v2,
			map[string]string{"cg/memory.max": "1000\n"}, 1000},
		"unit with MemoryMax": {"0::/system.slice/strata.service\n", v2,
			map[string]string{"cg/system.slice/strata.service/memory.max": "2000\n",
				"cg/system.slice/memory.max": "max\n"}, 2000},
		"limit of a slice": {"0::/pods.slice/pod.slice/one.scope\n", v2,
			map[string]string{"cg/pods.slice/pod.slice/one.scope/memory.max": "max\n",
				"cg/pods.slice/pod.slice/memory.max": "3000\n",
				"cg/pods.slice/memory.max":           "5000\n"}, 3000},
		"no limit": {"0::/a\n", v2,
			map[string]string{"cg/a/memory.max": "max\n"}, none},
		"version 1, of the parent": {"5:cpu:/\n4:memory:/parent/child\n0::/\n", v1 + v2,
			map[string]string{"mem/memory.limit_in_bytes": unlimited, "mem/parent/memory.limit_in_bytes": "7000\n",
				"mem/parent/child/memory.limit_in_bytes": unlimited, "cpu/parent/memory.limit_in_bytes": "1\n"}, 7000},
		"the mount shows the container's group only": {"0::/docker/abc\n", strings.Replace(v2, " / ", " /docker/abc ", 1),
			map[string]string{"cg/memory.max": "800\n", "cg/docker/abc/memory.max": "1\n"}, 800},
		"the mount shows other groups": {"0::/docker/abc\n", strings.Replace(v2, " / ", " /docker/xyz ", 1),
			map[string]string{"cg/memory.max": "800\n"}, none},
		"outside of the namespace": {"0::/../other\n", v2, map[string]string{"cg/other/memory.max": "800\n"}, none},
		"no control groups":        {"", v2, nil, none},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(file, text string) {
				path := filepath.Join(dir, file)
				testcheck.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
				testcheck.NoError(t, os.WriteFile(path, []byte(strings.ReplaceAll(text, "$T", dir)), 0o644))
			}
			write("proc/7/cgroup", test.cgroup)
			write("proc/7/mountinfo", test.mounts)
			for file, text := range test.files {
				write(file, text)
			}
			testcheck.NoError(t, os.Symlink("7", filepath.Join(dir, "proc/self")))
			limit, err := groupLimitOf(filepath.Join(dir, "proc"))
			testcheck.NoError(t, err)
			if limit != test.limit {
				t.Errorf("limit %d, want %d", limit, test.limit)
			}
			write("proc/7/mountinfo", "30 20 0:26 /\n")
			if _, err := groupLimitOf(filepath.Join(dir, "proc")); err == nil || errors.Is(err, fs.ErrNotExist) {
				t.Errorf("mounts that cannot be parsed: %v", err)
			}
		})
	}
}
