// Package version describes the version of this program, and sets the same version in the
// Kubernetes packages that it contains.
//
// Kubernetes' packages keep their version in unexported variables that its build scripts set with
// linker flags. A plain `go build` or `go run` leaves a placeholder there (v0.0.0-master), which
// /version, kubectl, user agents, metrics and the emulated version would then report. Importing
// this package sets them, independent of the build command; see stamp.go.
package version

import (
	"fmt"
	"runtime"
	"runtime/debug"

	etcdversion "go.etcd.io/etcd/api/v3/version"
)

// strata is Strata's own version without the leading v. It is a semantic version, so that it is
// valid as build metadata of Kubernetes' version. A release sets it with -ldflags "-X
// github.com/stratakube/strata/server/internal/version.strata=1.2.3".
var strata = "0.1.0-dev"

// kubernetes is the version of k8s.io/kubernetes in go.mod; a test compares the two.
const kubernetes = "1.37.2"

// oldestMinor and newestMinor are the minor versions of k8s.io/apiserver, v0.x, that the module
// kube supports: those of kube/go.mod and of this program. A test compares them with the two
// go.mod.
const oldestMinor, newestMinor = "v0.36", "v0.37"

// Info describes the program. All versions carry the leading v, except Go's, which has its own form
// (go1.26.0).
type Info struct {
	Strata     string
	Kubernetes string // the release whose API is served, for example v1.37.2
	Libraries  string // the minor versions of k8s.io/apiserver that the module kube supports
	Etcd       string // client and embedded server
	Go         string
	Platform   string // operating system and architecture, for example linux/amd64

	// Commit, CommitTime (RFC 3339) and Modified describe the source tree; the first two are empty
	// when the program was not built inside one (go install of a module, go test).
	Commit     string
	CommitTime string
	Modified   bool // the tree had uncommitted changes
}

// Get returns the description of this program.
func Get() Info {
	info := Info{
		Strata:     "v" + strata,
		Kubernetes: "v" + kubernetes,
		Libraries:  oldestMinor + " and " + newestMinor,
		Etcd:       "v" + etcdversion.Version,
		Go:         runtime.Version(),
		Platform:   runtime.GOOS + "/" + runtime.GOARCH,
	}
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return info
	}
	for _, s := range build.Settings {
		switch s.Key {
		case "vcs.revision":
			info.Commit = s.Value
		case "vcs.time":
			info.CommitTime = s.Value
		case "vcs.modified":
			info.Modified = s.Value == "true"
		}
	}
	return info
}

// String returns one aligned line per component, without a final newline.
func (i Info) String() string {
	own := i.Strata
	if i.Commit != "" {
		state := ""
		if i.Modified {
			state = ", modified"
		}
		own = fmt.Sprintf("%s (commit %.12s of %s%s)", own, i.Commit, i.CommitTime, state)
	}
	return fmt.Sprintf("strata      %s\nkubernetes  %s\napiserver   %s (k8s.io/apiserver, supported by the module kube)\netcd        %s\ngo          %s %s",
		own, i.Kubernetes, i.Libraries, i.Etcd, i.Go, i.Platform)
}

// GitVersion returns the version that /version and kubectl report: Kubernetes' version with
// Strata's as build metadata, for example v1.37.2+strata.0.1.0. Build metadata does not take part
// in comparisons, so clients see the release whose API is served.
func GitVersion() string { return "v" + kubernetes + "+strata." + strata }
