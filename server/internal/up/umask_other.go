//go:build !unix

package up

// closeFilesToOthers does nothing: there is no umask.
func closeFilesToOthers() {}
