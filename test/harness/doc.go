// Package harness runs the strata command for black-box tests: a control plane (`strata up`), an
// API server on an etcd of the test's own (`strata apiserver`, `strata etcd`), and clients for
// them.
//
// Every process is a child of the test (package internal/process), listens on loopback on a port
// picked at start, logs to a file whose end is shown on a failure of a test that used it, and is
// stopped by its own process id. No part of a server runs inside the test.
//
// Every API server of the engine strata compares its cache with etcd every few seconds, panics at a
// difference (KUBE_WATCHCACHE_CONSISTENCY_CHECKER), and is checked for differences at the end; see
// Unchecked.
//
// Environment variables:
//
//	STRATA_TEST_ENGINE    strata (default) or upstream: the --engine of servers whose test does not choose one
//	STRATA_BINARY         a built command to use; by default it is built from this module
//	STRATA_TEST_OLD_ETCD  an etcd 3.4 below 3.4.31, with unreliable progress notifications (default /usr/bin/etcd)
//	STRATA_TEST_PREVIOUS  the strata command of an earlier release, which runs beside the other servers of the chaos test
//	STRATA_TEST_LONG      1: the long forms of tests, where a package has some
//	STRATA_TEST_REQUIRE   third-party programs without which tests fail instead of being skipped (internal/test/testrequire)
//	STRATA_TEST_FSYNC     1: etcds sync their writes to the disk
package harness
