//go:build !linux

package etcdcluster

import "errors"

func delaySyncs(string) error { return errors.New("syncs can be delayed on Linux only") }
