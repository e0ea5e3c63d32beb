// Package datadir manages the data directory of `strata up`: the data of etcd, certificates and
// keys, the kubeconfig, the log.
package datadir

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"
)

const (
	// EnvVar is the environment variable with the data directory of `strata up` and `strata
	// kubectl`, used when no flag sets it.
	EnvVar = "STRATA_DATA"

	defaultPath = "strata-data"

	// lockName is the file that marks a directory as a data directory. The process that uses the
	// directory holds a lock on the file and writes its process id to it.
	lockName = "strata.lock"

	// shardsName is the file with the number of etcds.
	shardsName = "etcd-shards"
)

// Default returns the data directory that is used when no flag sets it.
func Default(getenv func(string) string) string {
	if path := getenv(EnvVar); path != "" {
		return path
	}
	return defaultPath
}

// Kubeconfig returns the path of the administrator's kubeconfig in a data directory.
func Kubeconfig(path string) string { return filepath.Join(path, "kubeconfig") }

// Dir is a data directory locked by this process.
type Dir struct {
	// Path is absolute.
	Path string
	// New reports whether Open created the directory, or found it empty.
	New bool
	// Closed are the files and directories whose permissions for other users Open has removed,
	// sorted, relative to Path.
	Closed []string

	lock *fileutil.LockedFile
}

// Open locks the directory at path, creating it with mode 0700 if it does not exist, and removes
// the permissions of other users for all its content. A directory that is not empty and has no lock
// file is rejected, so that a mistyped path causes no damage. So is a directory of another owner,
// or one with a file of another owner: that user could replace keys. The directories above it are
// not checked: a user who may rename entries of one (CheckParent) can replace the whole directory,
// also later, because etcd and others open their files by path. Errors name the path and are
// complete sentences for the user.
func Open(path string) (*Dir, error) {
	user := os.Geteuid()
	return open(path, func(info fs.FileInfo) error { return CheckOwner(info, user) })
}

// open is Open with the check of owners.
func open(path string, checkOwner func(fs.FileInfo) error) (*Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("data directory %s: %w", path, err)
	}
	d := &Dir{Path: abs}
	entries, err := os.ReadDir(abs)
	switch {
	case errors.Is(err, os.ErrNotExist):
		d.New = true
		if err := os.MkdirAll(abs, 0o700); err != nil {
			return nil, unusable(err)
		}
	case err != nil:
		return nil, unusable(err)
	case len(entries) == 0:
		d.New = true
	default:
		if _, err := os.Stat(d.join(lockName)); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("data directory %s contains other files and was not created by strata up; choose a new or empty directory with --data-dir", abs)
		} else if err != nil {
			return nil, unusable(err)
		}
	}
	info, err := os.Stat(abs)
	if err != nil {
		return nil, unusable(err)
	}
	if err := checkOwner(info); err != nil {
		return nil, foreign(abs, err)
	}
	if d.lock, err = d.tryLock(os.O_RDWR | os.O_CREATE); err != nil {
		return nil, err
	}
	if err := d.prepare(checkOwner); err != nil {
		_ = d.Close()
		return nil, err
	}
	return d, nil
}

// CheckFree returns an error if another process has locked the directory at path. It makes no
// changes.
func CheckFree(path string) error {
	abs, err := filepath.Abs(path)
	if err != nil {
		return fmt.Errorf("data directory %s: %w", path, err)
	}
	d := &Dir{Path: abs}
	lock, err := d.tryLock(os.O_RDWR)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return lock.Close()
}

// foreign describes a file or directory of another owner, with the next step.
func foreign(path string, err error) error {
	return fmt.Errorf("data directory: %s: %w; choose another directory with --data-dir, or change the owner with chown -R", path, err)
}

// unusable describes an error of a file or directory, which the error names, with the next step.
func unusable(err error) error {
	next := "choose another directory with --data-dir"
	switch {
	case errors.Is(err, os.ErrPermission):
		next += ", or make it accessible to this user"
	case errors.Is(err, syscall.ENOSPC):
		next += ", or free space on its file system"
	}
	return fmt.Errorf("data directory: %w; %s", err, next)
}

func (d *Dir) tryLock(openFlags int) (*fileutil.LockedFile, error) {
	lock, err := fileutil.TryLockFile(d.join(lockName), openFlags, 0o600)
	switch {
	case errors.Is(err, fileutil.ErrLocked):
		return nil, fmt.Errorf("data directory %s is in use by another strata up%s; stop it, or choose another directory with --data-dir", d.Path, d.holder())
	case err != nil:
		if cause := errors.Unwrap(err); cause != nil { // without the name of a function of fileutil
			err = cause
		}
		return nil, unusable(err)
	}
	return lock, nil
}

// prepare removes other users' permissions on the directory and writes the process id into the lock
// file, for information.
func (d *Dir) prepare(checkOwner func(fs.FileInfo) error) error {
	if err := os.Chmod(d.Path, 0o700); err != nil { //nolint:gosec // a directory
		return unusable(err)
	}
	if err := d.close(checkOwner); err != nil {
		return err
	}
	if err := d.lock.Truncate(0); err != nil {
		return unusable(err)
	}
	if _, err := d.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return unusable(err)
	}
	return nil
}

// close removes other users' permissions on the content of the directory: keys may have been copied
// here with any mode. A file of another owner is an error. Links are not followed.
func (d *Dir) close(checkOwner func(fs.FileInfo) error) error {
	return filepath.WalkDir(d.Path, func(path string, entry os.DirEntry, err error) error {
		if err != nil {
			return unusable(err)
		}
		info, err := entry.Info()
		if err != nil {
			return unusable(err)
		}
		if err := checkOwner(info); err != nil && path != d.Path { // Path may be a link
			return foreign(path, err)
		}
		const others = 0o077
		if !entry.IsDir() && !entry.Type().IsRegular() || info.Mode().Perm()&others == 0 {
			return nil
		}
		rel, err := filepath.Rel(d.Path, path)
		if err != nil {
			return err
		}
		d.Closed = append(d.Closed, rel)
		if err := os.Chmod(path, info.Mode().Perm()&^others); err != nil { //nolint:gosec // the directory has been closed to other users
			return unusable(err)
		}
		return nil
	})
}

// holder returns " (process 123)" if the lock file contains a process id.
func (d *Dir) holder() string {
	data, err := os.ReadFile(d.join(lockName))
	if err != nil {
		return ""
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

// Close unlocks the directory. The lock file remains, to mark the directory as a data directory.
func (d *Dir) Close() error { return d.lock.Close() }

// Etcd returns the directory of the embedded etcd.
func (d *Dir) Etcd() string { return d.join("etcd") }

// HA returns the directory of the processes of `strata up --ha`: data of etcd, logs and process
// ids.
func (d *Dir) HA() string { return d.join("ha") }

// HAMember returns the directory of a member of etcd of `strata up --ha`.
func (d *Dir) HAMember(name string) string { return filepath.Join(d.HA(), name) }

// HALayout returns the path of the file with the addresses of the members of etcd of `strata up
// --ha`.
func (d *Dir) HALayout() string { return filepath.Join(d.HA(), "layout.json") }

// CheckKind returns an error, with the next step, unless the directory has no data yet, or data of
// the same kind: an etcd of several members (ha) or of one.
func (d *Dir) CheckKind(ha bool) error {
	other, text := d.HALayout(), "of strata up --ha: add --ha"
	if ha {
		other, text = d.Etcd(), "of strata up without --ha: omit --ha"
	}
	if _, err := os.Stat(other); err == nil {
		return fmt.Errorf("data directory %s has the data %s, or choose another directory with --data-dir", d.Path, text)
	} else if !errors.Is(err, os.ErrNotExist) {
		return unusable(err)
	}
	return nil
}

// EtcdShard returns the directory of a further embedded etcd.
func (d *Dir) EtcdShard(name string) string { return d.join("etcd-" + name) }

// Shards returns the number of etcds with which the directory was created, 0 if it has none yet.
// Directories from before shards have one.
func (d *Dir) Shards() (int, error) {
	data, err := os.ReadFile(d.join(shardsName))
	switch {
	case err == nil:
		n, err := strconv.Atoi(strings.TrimSpace(string(data)))
		if err != nil {
			return 0, fmt.Errorf("data directory: %s: %w; restore it from a backup", d.join(shardsName), err)
		}
		return n, nil
	case !errors.Is(err, os.ErrNotExist):
		return 0, unusable(err)
	}
	if _, err := os.Stat(d.Etcd()); errors.Is(err, os.ErrNotExist) {
		return 0, nil
	} else if err != nil {
		return 0, unusable(err)
	}
	return 1, nil
}

// SetShards records the number of etcds, before the first one is started.
func (d *Dir) SetShards(n int) error {
	if err := os.WriteFile(d.join(shardsName), []byte(strconv.Itoa(n)+"\n"), 0o600); err != nil {
		return unusable(err)
	}
	return nil
}

// PKI returns the directory of keys and certificates.
func (d *Dir) PKI() string { return d.join("pki") }

// Kubeconfig returns the path of the administrator's kubeconfig.
func (d *Dir) Kubeconfig() string { return Kubeconfig(d.Path) }

// ControllersKubeconfig returns the path of the kubeconfig of the controllers.
func (d *Dir) ControllersKubeconfig() string { return d.join("controllers.kubeconfig") }

// Log returns the path of the log.
func (d *Dir) Log() string { return d.join("strata.log") }

func (d *Dir) join(name string) string { return filepath.Join(d.Path, name) }
