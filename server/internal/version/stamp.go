package version

import (
	"fmt"
	"strings"
	_ "unsafe" // for go:linkname

	_ "k8s.io/client-go/pkg/version"
	componentversion "k8s.io/component-base/version"
)

// The variables below belong to the named packages. They can otherwise be set only by linker flags,
// which not every build passes. The linker fails the build if a release renames one of them.
//
// The version is set before any other package reads it: a package is initialised as soon as its
// imports are, in the order of import paths, and github.com/... sorts before the readers in
// k8s.io/....

//go:linkname componentGitVersion k8s.io/component-base/version.gitVersion
var componentGitVersion string

//go:linkname componentGitMajor k8s.io/component-base/version.gitMajor
var componentGitMajor string

//go:linkname componentGitMinor k8s.io/component-base/version.gitMinor
var componentGitMinor string

//go:linkname componentGitCommit k8s.io/component-base/version.gitCommit
var componentGitCommit string

//go:linkname componentGitTreeState k8s.io/component-base/version.gitTreeState
var componentGitTreeState string

//go:linkname componentBuildDate k8s.io/component-base/version.buildDate
var componentBuildDate string

//go:linkname clientGitVersion k8s.io/client-go/pkg/version.gitVersion
var clientGitVersion string

//go:linkname clientGitMajor k8s.io/client-go/pkg/version.gitMajor
var clientGitMajor string

//go:linkname clientGitMinor k8s.io/client-go/pkg/version.gitMinor
var clientGitMinor string

//go:linkname clientGitCommit k8s.io/client-go/pkg/version.gitCommit
var clientGitCommit string

//go:linkname clientGitTreeState k8s.io/client-go/pkg/version.gitTreeState
var clientGitTreeState string

//go:linkname clientBuildDate k8s.io/client-go/pkg/version.buildDate
var clientBuildDate string

func init() {
	if !strings.HasPrefix(componentGitVersion, "v0.0.0-master") {
		return // the version was set with linker flags
	}
	info := Get()
	treeState := "clean"
	if info.Modified {
		treeState = "dirty"
	}
	if info.Commit == "" {
		treeState = ""
	}
	buildDate := componentBuildDate
	if info.CommitTime != "" {
		buildDate = info.CommitTime
	}
	major, rest, _ := strings.Cut(kubernetes, ".")
	minor, _, _ := strings.Cut(rest, ".")

	componentGitVersion, clientGitVersion = GitVersion(), GitVersion()
	componentGitMajor, clientGitMajor = major, major
	componentGitMinor, clientGitMinor = minor, minor
	componentGitCommit, clientGitCommit = info.Commit, info.Commit
	componentGitTreeState, clientGitTreeState = treeState, treeState
	componentBuildDate, clientBuildDate = buildDate, buildDate

	// component-base has copied the placeholder into the value that Get returns; this checks the
	// new value and replaces the copy.
	if err := componentversion.SetDynamicVersion(GitVersion()); err != nil {
		panic(fmt.Sprintf("version %q: %v", GitVersion(), err))
	}
}
