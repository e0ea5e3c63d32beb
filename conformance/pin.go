//go:build pin

package main

// What `make conformance` builds out of the module cache. These imports, which nothing compiles, make `go mod tidy` keep what the two need.
import (
	_ "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	_ "k8s.io/kubernetes/test/e2e"
)
