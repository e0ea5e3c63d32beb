//go:build apiserver_v0_38

package readpath

func selectableFields() bool { return true }
