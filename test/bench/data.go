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
// is filled at the first request, and kept in Config.DataDir for later ones.
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
	err = dataset.Fill(ctx, etcd.Client, spec)
	etcd.Stop()
	if err != nil {
		return err
	}
	if err := os.Rename(unfinished, filled); err != nil {
		return err
	}
	r.steps.done("done")
	return nil
}

// newRunDir makes a directory for the files of one run. It locks parent until release is called:
// benchmarks at the same time would measure each other. It removes the directories of earlier runs:
// the logs of a run that failed last until the next run, and a run that was killed leaves a copy of
// etcd's data.
func newRunDir(parent string) (dir string, release func(), err error) {
	lock, err := fileutil.TryLockFile(filepath.Join(parent, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", nil, fmt.Errorf("another benchmark uses %s: %w", parent, err)
	}
	earlier, err := filepath.Glob(filepath.Join(parent, "run-*"))
	for _, run := range earlier {
		err = errors.Join(err, os.RemoveAll(run))
	}
	if err == nil {
		dir, err = os.MkdirTemp(parent, "run-")
	}
	if err != nil {
		lock.Close()
		return "", nil, err
	}
	return dir, func() { lock.Close() }, nil
}
