package apiserver

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/procfs"
	"k8s.io/klog/v2"
)

var warnOfGroups sync.Once

// groupLimit returns the lowest memory limit, in bytes, of the process's control group and its
// ancestors, as far as the process sees them: in a container, its own at least; in a unit of
// systemd, that of the unit and of each slice. math.MaxInt64: there is none. Cost is some reads of
// /proc and /sys.
func groupLimit() int64 {
	limit, err := groupLimitOf(procfs.DefaultMountPoint)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		warnOfGroups.Do(func() {
			klog.ErrorS(err, "Cannot read the control groups of the process, ignoring their memory limits")
		})
	}
	return limit
}

// groupLimitOf is groupLimit of the process of a directory like /proc. With version 1 only the
// hierarchy of the memory controller counts.
func groupLimitOf(proc string) (limit int64, _ error) {
	limit = math.MaxInt64
	procFS, err := procfs.NewFS(proc)
	if err != nil {
		return limit, err
	}
	self, err := procFS.Self()
	if err != nil {
		return limit, err
	}
	groups, err := self.Cgroups()
	if err != nil {
		return limit, err
	}
	mounts, err := self.MountInfo()
	if err != nil {
		return limit, err
	}
	for _, group := range groups {
		if filepath.Clean(group.Path) != group.Path {
			continue // outside of the namespace of the mounts
		}
		kind, limitFile := "cgroup2", "memory.max"
		if group.HierarchyID != 0 {
			if !slices.Contains(group.Controllers, "memory") {
				continue
			}
			kind, limitFile = "cgroup", "memory.limit_in_bytes"
		}
		for _, mount := range mounts {
			if _, isMemory := mount.SuperOptions["memory"]; mount.FSType != kind || kind == "cgroup" && !isMemory {
				continue
			}
			below, err := filepath.Rel(mount.Root, group.Path)
			if err != nil || !filepath.IsLocal(below) {
				continue // the mount does not show this group
			}
			for {
				if n, ok := readBytes(filepath.Join(mount.MountPoint, below, limitFile)); ok {
					limit = min(limit, n)
				}
				if below == "." {
					break
				}
				below = filepath.Dir(below)
			}
		}
	}
	return limit, nil
}

// readBytes returns the number in a file; not the "max" of version 2, nor the highest number of
// pages, with which version 1 encodes "none".
func readBytes(file string) (n int64, ok bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil && n < math.MaxInt64&^0xfffff
}
