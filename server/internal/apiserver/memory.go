package apiserver

import (
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/procfs"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
)

const (
	// listShare is the divisor of the memory limit that yields the default bound of in-flight
	// lists, and the maximum of the default bounds of representations and of history. Including the
	// objects themselves and garbage, a server with 300,000 objects of 1 KB then stays below a
	// memory limit of 1.5 GiB.
	listShare = 8
	// runtimeShare is the share, in tenths, of a control group's memory limit that is set as the Go
	// runtime's memory limit. The rest is for memory that the runtime does not count, mainly the
	// pages of the executable.
	runtimeShare = 9
)

// followMemoryLimit sets the Go runtime's memory limit from the limit of the control groups, so
// that the collector runs more often near that limit (see debug.SetMemoryLimit), unless GOMEMLIMIT
// is set. It returns the memory available to the process in bytes: the lowest of that limit,
// GOMEMLIMIT, and the machine's memory.
func followMemoryLimit() int64 {
	group := groupLimit()
	if group < math.MaxInt64 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(group / 10 * runtimeShare)
		klog.InfoS("Set the memory limit of the Go runtime from the control group", "limit", group)
	}
	return memoryLimit()
}

// memoryLimit returns the memory available to the process in bytes.
func memoryLimit() int64 {
	return min(groupLimit(), debug.SetMemoryLimit(-1), machineMemory())
}

// machineMemory returns the total memory of the machine, or math.MaxInt64 without /proc.
func machineMemory() int64 {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return math.MaxInt64
	}
	info, err := proc.Meminfo()
	if err != nil || info.MemTotalBytes == nil {
		return math.MaxInt64
	}
	return int64(*info.MemTotalBytes)
}

// fit sets the bounds that depend on the available memory or on another bound, except for those set
// by flags.
func (l *engineLimits) fit(flags *pflag.FlagSet, memory int64) {
	share := memory / listShare
	if l.listBytes.Value() == 0 {
		l.listBytes.Quantity = *resource.NewQuantity(share, resource.BinarySI)
	}
	if !flags.Changed(flagHistoryBytes) && share < l.historyBytes.Value() {
		l.historyBytes.Quantity = *resource.NewQuantity(share, resource.BinarySI)
	}
	if !flags.Changed(flagRepresentationBytes) && memory < math.MaxInt64 {
		// otherwise the memory is unknown
		l.keptBytes.Quantity = *resource.NewQuantity(share, resource.BinarySI)
	}
	if !flags.Changed(flagReplayBytes) {
		// history that was restored beyond the bound would be dropped at once
		l.replayBytes = l.historyBytes
	}
}

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
