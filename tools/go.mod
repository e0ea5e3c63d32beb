// Module tools pins the programs that `make lint` and `make vulncheck` run. It is in no workspace and
// is imported by nobody, so that the linters' dependencies stay out of the modules
// that users import. Run one with `go tool <name>` from this directory.
module github.com/stratakube/strata/tools

go 1.26.0

tool (
	golang.org/x/exp/cmd/apidiff
	golang.org/x/vuln/cmd/govulncheck
	honnef.co/go/tools/cmd/staticcheck
	sigs.k8s.io/controller-runtime/tools/setup-envtest
)

require (
	github.com/CycloneDX/cyclonedx-go v0.12.0
	github.com/creack/pty v1.1.24
	github.com/kisielk/errcheck v1.30.0
	github.com/nishanths/exhaustive v0.15.0
	github.com/securego/gosec/v2 v2.29.0
	golang.org/x/tools v0.51.0
	mvdan.cc/unparam v0.0.0-20260823230713-2fa3d841b0c8
)

require (
	github.com/BurntSushi/toml v1.6.0 // indirect
	github.com/ccojocar/zxcvbn-go v1.0.4 // indirect
	github.com/go-logr/logr v1.4.4 // indirect
	github.com/go-logr/zapr v1.3.0 // indirect
	github.com/spf13/afero v1.12.0 // indirect
	github.com/spf13/pflag v1.0.10 // indirect
	go.uber.org/multierr v1.10.0 // indirect
	go.uber.org/zap v1.27.0 // indirect
	go.yaml.in/yaml/v2 v2.4.4 // indirect
	golang.org/x/exp v0.0.0-20260410095643-746e56fc9e2f // indirect
	golang.org/x/exp/typeparams v0.0.0-20231108232855-2478ac86f678 // indirect
	golang.org/x/mod v0.41.0 // indirect
	golang.org/x/sync v0.23.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/telemetry v0.0.0-20260924152758-ed294f943157 // indirect
	golang.org/x/text v0.41.0 // indirect
	golang.org/x/vuln v1.8.0 // indirect
	honnef.co/go/tools v0.8.2 // indirect
	sigs.k8s.io/controller-runtime/tools/setup-envtest v0.25.1 // indirect
	sigs.k8s.io/yaml v1.6.0 // indirect
)
