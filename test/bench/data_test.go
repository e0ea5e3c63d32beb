package main

import (
	"errors"
	"os"
	"testing"

	"go.etcd.io/etcd/client/pkg/v3/fileutil"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestNewRunDir_OneRunAtATime_RemovesFinishedRuns(t *testing.T) {
	parent := t.TempDir()
	first, release, err := newRunDir(parent)
	testcheck.NoError(t, err)
	if _, _, err := newRunDir(parent); !errors.Is(err, fileutil.ErrLocked) {
		t.Errorf("beside another run: %v", err)
	}
	if _, err := os.Stat(first); err != nil {
		t.Errorf("the directory of an active run was removed: %v", err)
	}
	release()
	_, release, err = newRunDir(parent)
	testcheck.NoError(t, err)
	release()
	if _, err := os.Stat(first); !os.IsNotExist(err) {
		t.Errorf("the directory of a run that is over is still there: %v", err)
	}
}
