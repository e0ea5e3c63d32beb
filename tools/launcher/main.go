//go:build unix

// Command launcher is the file etcd and the file kubectl of the archive for setup-envtest. It
// replaces itself by the program kube-apiserver beside it, the strata command, under its own name:
// strata answers to the names etcd and kubectl. So the archive has the command, of 200 MB, once:
// links are not possible, because setup-envtest unpacks regular files only.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

func main() {
	if err := launch(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v; unpack all files of the archive into one directory\n", filepath.Base(os.Args[0]), err)
		os.Exit(1)
	}
}

// launch returns only with an error.
func launch() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if self, err = filepath.EvalSymlinks(self); err != nil {
		return err
	}
	strata := filepath.Join(filepath.Dir(self), "kube-apiserver")
	if err := syscall.Exec(strata, os.Args, os.Environ()); err != nil {
		return fmt.Errorf("start %s: %w", strata, err)
	}
	return nil
}
