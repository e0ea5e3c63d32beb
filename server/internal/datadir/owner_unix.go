//go:build unix

package datadir

import (
	"fmt"
	"io/fs"
	"os"
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

// CheckParent returns an error if another user than root may replace entries of a directory: its
// owner, or those who may write to it, unless it has the sticky bit, as /tmp. The group of this
// process is that of the user.
func CheckParent(info fs.FileInfo, user int) error {
	if err := CheckOwner(info, user); err != nil && CheckOwner(info, 0) != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	mode, others := info.Mode(), fs.FileMode(0o022)
	if ok && int64(stat.Gid) == int64(os.Getegid()) {
		others = 0o002
	}
	if mode&others != 0 && mode&fs.ModeSticky == 0 {
		return fmt.Errorf("it has the mode %04o, so that other users can replace its files", mode.Perm())
	}
	return nil
}
