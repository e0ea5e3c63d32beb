// Command conformance runs Kubernetes' own end-to-end tests of an API server: all specs of
// Kubernetes' conformance that upstream passes without containers and without a scheduler, and
// those of streamed lists and tables. `make conformance` builds its programs and runs it.
//
// The tests are those of k8s.io/kubernetes/test/e2e, built from the same release as the server,
// without changes. They run against three processes on loopback: an etcd, `strata apiserver` on it,
// and upstream's kube-controller-manager. There is no kubelet: a Node object with a Ready condition
// replaces it, because the framework refuses to start without a node, and the only pods that run
// are those of upstream's webhooks, in this process.
//
// specs.txt and excluded.txt are a catalogue of all candidates; see specs.go and discover.go.
//
// The processes end with this one, and their data with them. Their logs and the reports stay in a
// directory.
package main
