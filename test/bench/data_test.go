package main

import (
	"os"
	"testing"
)

func TestNewRunDir_RemovesFinishedRunsOnly(t *testing.T) {
	parent := t.TempDir()
	first, releaseFirst, err := newRunDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	second, releaseSecond, err := newRunDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer releaseSecond()
	if _, err := os.Stat(first); err != nil {
		t.Errorf("the directory of an active run was removed: %v", err)
	}
	releaseFirst()
	_, releaseThird, err := newRunDir(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer releaseThird()
	if _, err := os.Stat(first); !os.IsNotExist(err) {
		t.Errorf("the directory of a run that is over is still there: %v", err)
	}
	if _, err := os.Stat(second); err != nil {
		t.Errorf("the directory of an active run was removed: %v", err)
	}
}
