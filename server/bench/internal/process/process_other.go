//go:build !linux

package process

import "os/exec"

// ownGroupAndDieWithParent does nothing: the benchmark refuses to run where there is no /proc, this file only lets it compile.
func ownGroupAndDieWithParent(*exec.Cmd) {}
