package embedetcd

import (
	"fmt"
	"os"
	"path/filepath"
)

// newBytes is the space that an etcd with a new directory needs: it allocates 64 MiB for its first
// log, and fails, in part with a panic on a goroutine of its own, if it cannot. existingBytes is
// that of one whose log exists; a guess.
const (
	newBytes      = 80 << 20
	existingBytes = 1 << 20
)

// checkSpace returns an error if the file system of dir, which exists, has not the space that etcd
// needs to start.
func checkSpace(dir string, free func(string) (int64, error)) error {
	needed := int64(newBytes)
	if _, err := os.Stat(filepath.Join(dir, "member", "wal")); err == nil {
		needed = existingBytes
	}
	bytes, err := free(dir)
	if err != nil || bytes >= needed { // without a number, etcd reports a lack of space
		return nil
	}
	return fmt.Errorf("etcd data directory %s: %d MiB are free on its file system, and etcd needs %d MiB to start; free space, or choose another directory", dir, bytes>>20, needed>>20)
}
