//go:build unix

package up

import "syscall"

// closeFilesToOthers sets the umask so that other users cannot access files that this process
// creates from now on. etcd, the log and files named by flags of the API server are created with
// other modes, which the umask restricts.
func closeFilesToOthers() { syscall.Umask(0o077) }
