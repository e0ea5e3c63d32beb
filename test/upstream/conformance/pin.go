//go:build pin

package main

// The programs that `make conformance` builds out of the module cache. These imports, which are
// never compiled, make `go mod tidy` keep the dependencies of the two.
import (
	_ "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	_ "k8s.io/kubernetes/test/e2e"
)
