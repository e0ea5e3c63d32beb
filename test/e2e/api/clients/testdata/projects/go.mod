// Module projects pins the releases whose custom resource definitions the tests install. Nothing is compiled: the tests
// download the modules with this go.sum and read the manifests in them. It is in no workspace, so that what those projects
// depend on stays out of ours.
module github.com/stratakube/strata/test/e2e/api/clients/testdata/projects

go 1.26.0

require (
	github.com/cert-manager/cert-manager v1.21.2
	sigs.k8s.io/gateway-api v0.6.0
)
