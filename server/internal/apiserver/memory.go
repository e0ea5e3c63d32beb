package apiserver

import (
	"math"
	"os"
	"runtime/debug"

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
