// Command strata is a Kubernetes control plane whose reads are served from memory.
package main

import (
	_ "go.etcd.io/etcd/server/v3/embed"
	_ "k8s.io/kubectl/pkg/cmd"
	_ "k8s.io/kubernetes/cmd/kube-apiserver/app"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager/app"

	_ "github.com/stratakube/strata/kube/kubestorage"
)

func main() {}
