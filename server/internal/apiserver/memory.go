package apiserver

import (
	"math"
	"os"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/prometheus/procfs"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/klog/v2"
)

const (
	// listShare is the part of the memory that lists under way may take, and, at most, that representations may, unless flags
	// say otherwise. With the objects themselves, and garbage, a server of 300,000 objects of 1 KB then stays below 1.5 GiB.
	listShare = 8
	// runtimeShare in tenths is the part of a control group's memory that the Go runtime is told to stay below: the rest is for what it
	// does not count, the pages of the executable above all.
	runtimeShare = 9
)

// cgroupFiles hold the limit of the control group that the process is in, as a container sees its own.
var cgroupFiles = []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}

// followMemoryLimit makes the collector work harder as the process comes near the limit of its control group (see
// debug.SetMemoryLimit), unless GOMEMLIMIT says something else. It returns how many bytes the process may hold: that
// limit, or GOMEMLIMIT if it is lower, or what the machine has.
func followMemoryLimit() int64 {
	group := cgroupLimit(cgroupFiles)
	if group < math.MaxInt64 && os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(group / 10 * runtimeShare)
		klog.InfoS("The Go runtime stays below the memory limit of the control group", "limit", group)
	}
	return memoryLimit()
}

// memoryLimit returns how many bytes the process may hold.
func memoryLimit() int64 {
	return min(cgroupLimit(cgroupFiles), debug.SetMemoryLimit(-1), machineMemory())
}

// cgroupLimit returns the first limit that one of the files holds; math.MaxInt64 for none.
func cgroupLimit(files []string) int64 {
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil && limit < math.MaxInt64&^0xfffff {
			return limit // version 1 says "none" with the highest number of pages
		}
	}
	return math.MaxInt64
}

// machineMemory returns math.MaxInt64 where there is no /proc.
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

// fit sets the bounds that follow from how many bytes the process may hold, but for those that flags have set.
func (l *engineLimits) fit(flags *pflag.FlagSet, memory int64) {
	share := memory / listShare
	if l.listBytes.Value() == 0 {
		l.listBytes.Quantity = *resource.NewQuantity(share, resource.BinarySI)
	}
	if !flags.Changed("strata-representation-bytes") && share < l.keptBytes.Value() {
		l.keptBytes.Quantity = *resource.NewQuantity(share, resource.BinarySI)
	}
}
