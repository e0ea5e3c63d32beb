package etcdcluster

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// delaySyncs makes this process wait before each fsync and fdatasync, for the duration that the
// file has at the time, as long as a slow disk would take. The kernel reports the calls (seccomp
// user notification) to a goroutine, which lets them continue.
func delaySyncs(file string) error {
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
			var call [10]uint64 // struct seccomp_notif, with the id first
			if _, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_RECV, uintptr(unsafe.Pointer(&call))); errno != 0 {
				continue // interrupted, or the call has ended
			}
			go func() {
				text, _ := os.ReadFile(file) // none: no delay
				delay, _ := time.ParseDuration(strings.TrimSpace(string(text)))
				time.Sleep(delay)
				const goOn = 1 << 32 // the flag SECCOMP_USER_NOTIF_FLAG_CONTINUE, behind the error
				response := [3]uint64{call[0], 0, goOn}
				_, _, _ = unix.Syscall(unix.SYS_IOCTL, fd, unix.SECCOMP_IOCTL_NOTIF_SEND, uintptr(unsafe.Pointer(&response)))
			}()
		}
	}()
	return nil
}
