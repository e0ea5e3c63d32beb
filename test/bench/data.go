package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// provideData puts a copy of an etcd directory with the objects of spec into dataDir. The original
// is filled at the first request, and kept in Config.DataDir for later ones. Several benchmarks may
// do this at once.
func (r *runner) provideData(ctx context.Context, spec dataset.Spec, dataDir string) error {
	filled := filepath.Join(r.config.DataDir, "filled", spec.ID())
	if _, err := os.Stat(filled); os.IsNotExist(err) {
		if err := r.fill(ctx, spec, filled); err != nil {
			return fmt.Errorf("fill etcd: %w", err)
		}
	}
	r.steps.step("copy the filled etcd")
	if err := errors.Join(os.CopyFS(dataDir, os.DirFS(filled)), os.Chmod(dataDir, 0o700)); err != nil {
		return fmt.Errorf("copy the filled etcd: %w", err)
	}
	r.steps.done("%s", filled)
	return nil
}

// fill makes the original: under another name until it is complete, so that an interrupted fill is
// never taken for one.
func (r *runner) fill(ctx context.Context, spec dataset.Spec, filled string) error {
	if err := os.MkdirAll(filepath.Dir(filled), 0o755); err != nil {
		return err
	}
	unfinished, err := os.MkdirTemp(filepath.Dir(filled), "unfinished-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(unfinished)

	r.steps.step("fill etcd with %s objects", grouped(spec.Len()))
	etcd, err := target.StartEtcd(ctx, r.config.Binary, unfinished, r.runDir)
	if err != nil {
		return err
	}
	err = dataset.Fill(ctx, etcd.Client, spec, func(done, total int) { r.steps.update("%3d %%", 100*done/total) })
	etcd.Stop()
	if err != nil {
		return err
	}
	if err := os.Rename(unfinished, filled); err != nil {
		if _, statErr := os.Stat(filled); statErr != nil {
			return err
		} // otherwise another benchmark was faster, with the same content
	}
	r.steps.done("done")
	return nil
}

// newRunDir makes a directory for the files of one run, and locks it until release is called. It
// removes those of earlier runs that are over: the logs of a run that failed last until the next
// run, and a run that was killed leaves a copy of etcd's data.
func newRunDir(parent string) (dir string, release func(), err error) {
	// Without this lock a directory that was just made, and is not locked yet, would look like one
	// that is over.
	all, err := fileutil.LockFile(filepath.Join(parent, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", nil, err
	}
	defer all.Close()
	lock := func(dir string) (*fileutil.LockedFile, error) {
		return fileutil.TryLockFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	}
	earlier, err := filepath.Glob(filepath.Join(parent, "run-*"))
	if err != nil {
		return "", nil, err
	}
	for _, run := range earlier {
		held, err := lock(run)
		if errors.Is(err, fileutil.ErrLocked) {
			continue
		}
		if err == nil {
			err = errors.Join(os.RemoveAll(run), held.Close())
		}
		if err != nil {
			return "", nil, err
		}
	}
	if dir, err = os.MkdirTemp(parent, "run-"); err != nil {
		return "", nil, err
	}
	held, err := lock(dir)
	return dir, func() { held.Close() }, err
}
