// Package stratatest starts Kubernetes control planes for tests: an API server with an etcd,
// without kubelets and controllers, as envtest does.
//
//	func TestReconciler(t *testing.T) {
//		cfg := stratatest.Start(t, stratatest.WithCRDs("../config/crd/bases"))
//		mgr, err := ctrl.NewManager(cfg, ctrl.Options{})
//		...
//	}
//
// Every call of Start starts a control plane of its own, with empty data, and the end of the test
// stops it. Tests may run in parallel. The first start in a process takes about a second, each
// further one a fraction of that.
//
// # The strata program
//
// All control planes of a test process run in one process of the strata program, which has to be
// installed: the environment variable STRATA_BINARY has its path, or it is in $PATH. It ends with
// the test process, also if that is killed. This module has no dependency on the server: it
// requires client-go only.
//
// docs/testing.md describes the installation, and the archive for setup-envtest, with which tests
// that use envtest need no change.
package stratatest
