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

// memoryGroup is a control group with a memory limit, in bytes. used is its working set as kubelet
// counts it: the page cache of files that were not read recently is not part of it.
type memoryGroup struct{ limit, used int64 }

var warnOfGroups sync.Once

// memoryGroups returns the groups with a limit among the process's own and its ancestors, as far as
// the process sees them: in a container, its own at least; in a unit of systemd, that of the unit
// and of each slice. nil without control groups. Cost is some reads of /proc and /sys.
func memoryGroups() []memoryGroup {
	groups, err := memoryGroupsOf(procfs.DefaultMountPoint)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		warnOfGroups.Do(func() {
			klog.ErrorS(err, "Cannot read the control groups of the process, ignoring their memory limits")
		})
	}
	return groups
}

// memoryGroupsOf returns memoryGroups of the process of a directory like /proc. With version 1 only
// the hierarchy of the memory controller counts.
func memoryGroupsOf(proc string) (limited []memoryGroup, _ error) {
	procFS, err := procfs.NewFS(proc)
	if err != nil {
		return nil, err
	}
	self, err := procFS.Self()
	if err != nil {
		return nil, err
	}
	groups, err := self.Cgroups()
	if err != nil {
		return nil, err
	}
	mounts, err := self.MountInfo()
	if err != nil {
		return nil, err
	}
	for _, group := range groups {
		if filepath.Clean(group.Path) != group.Path {
			continue // outside of the namespace of the mounts
		}
		kind, limitFile, usedFile, cold := "cgroup2", "memory.max", "memory.current", "inactive_file"
		if group.HierarchyID != 0 {
			if !slices.Contains(group.Controllers, "memory") {
				continue
			}
			kind, limitFile, usedFile, cold = "cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
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
					used -= readStat(filepath.Join(dir, "memory.stat"), cold)
					limited = append(limited, memoryGroup{limit, max(used, 0)})
				}
				if below == "." {
					break
				}
				below = filepath.Dir(below)
			}
		}
	}
	return limited, nil
}

// readStat returns a number of a file with lines of a name and a number, 0 if it has none.
func readStat(file, name string) int64 {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if number, found := strings.CutPrefix(line, name+" "); found {
			n, _ := strconv.ParseInt(strings.TrimSpace(number), 10, 64)
			return n
		}
	}
	return 0
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

// groupLimit returns the lowest limit, math.MaxInt64 if there is none.
func groupLimit(groups []memoryGroup) int64 {
	limit := int64(math.MaxInt64)
	for _, g := range groups {
		limit = min(limit, g.limit)
	}
	return limit
}

// groupFree returns the least rest of a limit, math.MaxInt64 if there is none. It is negative above
// a limit.
func groupFree(groups []memoryGroup) int64 {
	free := int64(math.MaxInt64)
	for _, g := range groups {
		free = min(free, g.limit-g.used)
	}
	return free
}
