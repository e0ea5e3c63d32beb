package apiserver

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
)

// memoryGroup is a control group with a memory limit, in bytes.
type memoryGroup struct{ limit, used int64 }

// memoryGroups returns the groups with a limit among the process's own and its ancestors, as far as the process sees them: in
// a container, its own at least; in a unit of systemd, that of the unit and of each slice. nil without control groups. Cost is
// some reads of /proc and /sys.
func memoryGroups() []memoryGroup {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return nil
	}
	return memoryGroupsOf(proc)
}

// memoryGroupsOf returns memoryGroups of the process of a file system like /proc. With version 1 only the hierarchy of the memory
// controller counts.
func memoryGroupsOf(fs procfs.FS) (limited []memoryGroup) {
	self, err := fs.Self()
	if err != nil {
		return nil
	}
	groups, err := self.Cgroups()
	if err != nil {
		return nil
	}
	mounts, err := self.MountInfo()
	if err != nil {
		return nil
	}
	for _, group := range groups {
		if filepath.Clean(group.Path) != group.Path {
			continue // outside of the namespace of the mounts
		}
		kind, limitFile, usedFile := "cgroup2", "memory.max", "memory.current"
		if group.HierarchyID != 0 {
			if !slices.Contains(group.Controllers, "memory") {
				continue
			}
			kind, limitFile, usedFile = "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes"
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
				dir := filepath.Join(mount.MountPoint, below)
				if limit, ok := readBytes(filepath.Join(dir, limitFile)); ok {
					used, _ := readBytes(filepath.Join(dir, usedFile))
					limited = append(limited, memoryGroup{limit, used})
				}
				if below == "." {
					break
				}
				below = filepath.Dir(below)
			}
		}
	}
	return limited
}

// readBytes returns the number in a file; not the "max" of version 2, nor the highest number of pages, with which version 1
// encodes "none".
func readBytes(file string) (n int64, ok bool) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err = strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil && n < math.MaxInt64&^0xfffff
}

// groupLimit returns the lowest limit, math.MaxInt64 if there is none.
func groupLimit(groups []memoryGroup) int64 {
	limit := int64(math.MaxInt64)
	for _, g := range groups {
		limit = min(limit, g.limit)
	}
	return limit
}

// groupFree returns the least rest of a limit, math.MaxInt64 if there is none. It is negative above a limit.
func groupFree(groups []memoryGroup) int64 {
	free := int64(math.MaxInt64)
	for _, g := range groups {
		free = min(free, g.limit-g.used)
	}
	return free
}
