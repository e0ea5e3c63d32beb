//go:build unix

package datadir

import (
	"io/fs"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// directory is a directory with an owner, a group and a mode.
type directory struct {
	uid, gid int
	mode     fs.FileMode
}

func (d directory) Name() string       { return "dir" }
func (d directory) Size() int64        { return 0 }
func (d directory) Mode() fs.FileMode  { return d.mode | fs.ModeDir }
func (d directory) ModTime() time.Time { return time.Time{} }
func (d directory) IsDir() bool        { return true }
func (d directory) Sys() any {
	return &syscall.Stat_t{Uid: uint32(d.uid), Gid: uint32(d.gid)}
}

func TestCheckParent_DirectoryWhoseEntriesOthersCanReplace_IsRefused(t *testing.T) {
	const user, stranger = 1000, 1001
	own := os.Getegid()
	for name, test := range map[string]struct {
		dir  directory
		want string // none: it is accepted
	}{
		"the user's":             {directory{user, own, 0o755}, ""},
		"root's":                 {directory{0, own + 1, 0o755}, ""},
		"/tmp":                   {directory{0, own + 1, 0o777 | fs.ModeSticky}, ""},
		"a stranger's":           {directory{stranger, own, 0o755}, "its owner is user 1001, not user 1000"},
		"a stranger's, sticky":   {directory{stranger, own, 0o777 | fs.ModeSticky}, "its owner is user 1001"},
		"writable by all":        {directory{user, own, 0o777}, "other users can replace its files"},
		"of the user's group":    {directory{user, own, 0o775}, ""},
		"of another group":       {directory{user, own + 1, 0o775}, "other users can replace its files"},
		"root's, of a group":     {directory{0, own + 1, 0o775}, "other users can replace its files"},
		"root's, others' writes": {directory{0, own, 0o757}, "other users can replace its files"},
	} {
		err := CheckParent(test.dir, user)
		if test.want == "" && err != nil || test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}
