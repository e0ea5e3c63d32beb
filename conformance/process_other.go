//go:build !linux

package main

import "os/exec"

// detach does nothing: Ctrl-C reaches the children at the same time as this process.
func detach(*exec.Cmd) {}
