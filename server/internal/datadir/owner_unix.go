//go:build unix

package datadir

import (
	"fmt"
	"io/fs"
	"syscall"
)

// CheckOwner returns an error that names the owner of a file, unless it is the user.
func CheckOwner(info fs.FileInfo, user int) error {
	if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int64(stat.Uid) != int64(user) {
		owner := "unknown"
		if ok {
			owner = fmt.Sprint(stat.Uid)
		}
		return fmt.Errorf("its owner is user %s, not user %d", owner, user)
	}
	return nil
}
