package etcdcluster

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// delaySyncs makes this process wait before each fsync and fdatasync, for the duration that the
// file has at the time, as long as a slow disk would take. The kernel reports the calls (seccomp
// user notification) to a goroutine, which lets them continue. A sync of the write-ahead log has a
// mark while it waits; see Member.Syncing.
func delaySyncs(file string) error {
	killed, _ := filepath.Glob(syncMark(file, "*", "*")) // earlier processes; the pattern is valid
	for _, mark := range killed {
		_ = os.Remove(mark)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("delay syncs: %w", err)
	}
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS}, // the number of the call
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FDATASYNC, Jt: 1},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_FSYNC, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_USER_NOTIF},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	fd, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER,
		unix.SECCOMP_FILTER_FLAG_NEW_LISTENER|unix.SECCOMP_FILTER_FLAG_TSYNC|unix.SECCOMP_FILTER_FLAG_TSYNC_ESRCH, uintptr(unsafe.Pointer(&program)))
	if errno != 0 {
		return fmt.Errorf("delay syncs: %w", errno)
	}
	go func() {
		for {
			var call [10]uint64 // struct seccomp_notif: the id first, and from 4 on the arguments
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&call))); errno != 0 {
				continue // interrupted, or the call has ended
			}
			go func() {
				text, _ := os.ReadFile(file) // none: no delay
				delay, _ := time.ParseDuration(strings.TrimSpace(string(text)))
				path, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", call[4]))
				mark := syncMark(file, delay, call[0])
				if filepath.Ext(path) == ".wal" && delay > 0 {
					_ = os.WriteFile(mark, nil, 0o600) // a test that waits for it fails
				}
				time.Sleep(delay)
				_ = os.Remove(mark)  // other files have none
				const goOn = 1 << 32 // the flag SECCOMP_USER_NOTIF_FLAG_CONTINUE, behind the error
				response := [3]uint64{call[0], 0, goOn}
				_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&response)))
			}()
		}
	}()
	return nil
}
