//go:build unix

package up

import "syscall"

// closeFilesToOthers sees to it that no file that this process makes from now on can be reached by other users: etcd, the log and what
// flags of the API server name make files with modes of their own, less what the umask takes from them.
func closeFilesToOthers() { syscall.Umask(0o077) }
