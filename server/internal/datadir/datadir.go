// Package datadir is the directory in which `strata up` keeps everything: the data of etcd, certificates and keys, the kubeconfig, the log.
package datadir

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"
)

const (
	// EnvVar names the data directory for `strata up` and `strata kubectl` when no flag does.
	EnvVar = "STRATA_DATA"

	defaultPath = "strata-data"

	// lockName is the file that marks a directory as ours and that the process which uses it holds locked. It holds that process's id.
	lockName = "strata.lock"
)

// Default returns the data directory that is used when no flag says otherwise.
func Default(getenv func(string) string) string {
	if path := getenv(EnvVar); path != "" {
		return path
	}
	return defaultPath
}

// Kubeconfig returns the path of the administrator's kubeconfig in a data directory.
func Kubeconfig(path string) string { return filepath.Join(path, "kubeconfig") }

// Dir is a data directory that this process has locked.
type Dir struct {
	// Path is absolute.
	Path string
	// New says that Open made the directory, or found it empty.
	New bool
	// Closed are the files and directories in it that other users might have been able to reach, sorted, relative to Path;
	// they cannot any more.
	Closed []string

	lock *fileutil.LockedFile
}

// Open locks the directory at path, which it makes with mode 0700 if there is none, and takes from other users what they may do with
// anything in it. A directory that holds other things than ours is refused, so that a mistyped path damages nothing. Errors name the path
// and are complete sentences for a person.
func Open(path string) (*Dir, error) {
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
			return nil, fmt.Errorf("data directory: %w", err)
		}
	case err != nil:
		return nil, fmt.Errorf("data directory: %w", err)
	case len(entries) == 0:
		d.New = true
	default:
		if _, err := os.Stat(d.join(lockName)); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("data directory %s holds other files and was not made by strata up; choose a new or an empty one with --data-dir", abs)
		} else if err != nil {
			return nil, fmt.Errorf("data directory: %w", err)
		}
	}
	if d.lock, err = d.tryLock(os.O_RDWR | os.O_CREATE); err != nil {
		return nil, err
	}
	if err := d.prepare(); err != nil {
		d.Close()
		return nil, fmt.Errorf("data directory: %w", err)
	}
	return d, nil
}

// CheckFree returns an error if another process has locked the directory at path. It changes nothing.
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

func (d *Dir) tryLock(openFlags int) (*fileutil.LockedFile, error) {
	lock, err := fileutil.TryLockFile(d.join(lockName), openFlags, 0o600)
	switch {
	case errors.Is(err, fileutil.ErrLocked):
		return nil, fmt.Errorf("data directory %s is in use by another strata up%s", d.Path, d.holder())
	case err != nil:
		if cause := errors.Unwrap(err); cause != nil { // without the name of a function of fileutil
			err = cause
		}
		return nil, fmt.Errorf("data directory: %w", err)
	}
	return lock, nil
}

// prepare closes the directory to other users and writes our process id into the lock file, for a person to read.
func (d *Dir) prepare() error {
	if err := os.Chmod(d.Path, 0o700); err != nil {
		return err
	}
	if err := d.close(); err != nil {
		return err
	}
	if err := d.lock.Truncate(0); err != nil {
		return err
	}
	_, err := d.lock.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return err
}

// close closes what is in the directory to other users: keys may have been copied here with whatever mode. What belongs to somebody else
// is an error, unless we may change it. Links are not followed.
func (d *Dir) close() error {
	return filepath.WalkDir(d.Path, func(path string, entry os.DirEntry, err error) error {
		if err != nil || !entry.IsDir() && !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		const others = 0o077
		if info.Mode().Perm()&others == 0 {
			return nil
		}
		rel, err := filepath.Rel(d.Path, path)
		if err != nil {
			return err
		}
		d.Closed = append(d.Closed, rel)
		return os.Chmod(path, info.Mode().Perm()&^others)
	})
}

// holder returns " (process 123)" if the lock file says who holds it.
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

// Close unlocks the directory. The lock file stays, as the mark that the directory is ours.
func (d *Dir) Close() error { return d.lock.Close() }

// Etcd returns the directory of the embedded etcd.
func (d *Dir) Etcd() string { return d.join("etcd") }

// PKI returns the directory of keys and certificates.
func (d *Dir) PKI() string { return d.join("pki") }

// Kubeconfig returns the path of the administrator's kubeconfig.
func (d *Dir) Kubeconfig() string { return Kubeconfig(d.Path) }

// ControllersKubeconfig returns the path of the kubeconfig of the controllers.
func (d *Dir) ControllersKubeconfig() string { return d.join("controllers.kubeconfig") }

// Log returns the path of the log.
func (d *Dir) Log() string { return d.join("strata.log") }

func (d *Dir) join(name string) string { return filepath.Join(d.Path, name) }
