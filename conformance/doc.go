// Command conformance runs Kubernetes' own end-to-end tests of what Strata answers itself: chunks, watches, streamed lists, tables, and
// the lists and watches of custom resources. `make conformance` builds what it needs and runs it.
//
// The tests are those of k8s.io/kubernetes/test/e2e, built from the same release as the server and changed in nothing. They run against
// three processes on loopback: an etcd, `strata apiserver` on it, and upstream's kube-controller-manager with the controllers that the
// tests and their framework wait for. There is no kubelet: a Node object with a Ready condition stands for one, because the framework
// refuses to start without a node, and the only pods that run are those of upstream's conversion webhook, in this process.
//
// The processes end with this one, and their data with them. What they logged and the reports stay in a directory.
package main
