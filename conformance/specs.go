package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// area is one container of specs, all of which are run: one that is new in a release and not named here is an error, until it is.
type area struct {
	name  string
	specs []string // without the name of the area and the space after it
}

// areas are what is run, with the texts of k8s.io/kubernetes/test/e2e/apimachinery.
var areas = []area{
	{"[sig-api-machinery] Servers with support for API chunking", []string{
		"should return chunks of results for list calls [Conformance]",
		"should support continue listing from the last key if the original version has been compacted away, though the list is inconsistent [Slow] [Conformance]",
	}},
	{"[sig-api-machinery] Watchers", []string{
		"should observe add, update, and delete watch notifications on configmaps [Conformance]",
		"should be able to start watching from a specific resource version [Conformance]",
		"should be able to restart watching from the last resource version observed by the previous watch [Conformance]",
		"should observe an object deletion if it stops meeting the requirements of the selector [Conformance]",
		"should receive events on concurrent watches in same order [Conformance]",
	}},
	{"[sig-api-machinery] API Streaming (aka. WatchList) [FeatureGate:WatchList] [Beta]", []string{
		"should be requested by informers when WatchListClient is enabled",
		"should be requested by metadatainformer when WatchListClient is enabled",
		"should NOT be requested by client-go's List method when WatchListClient is enabled",
		"should NOT be requested by dynamic client's List method when WatchListClient is enabled",
		"should NOT be requested by metadata client's List method when WatchListClient is enabled",
		"server supports sending resources in Table format",
		"reflector doesn't support receiving resources as Tables",
		"reflector using standard List doesn't support receiving resources as Tables",
	}},
	{"[sig-api-machinery] Servers with support for Table transformation", []string{
		"should return pod details",
		"should return chunks of table results for list calls",
		"should return generic metadata details across all namespaces for nodes",
		"should return a 406 for a backend which does not implement metadata [Conformance]",
	}},
	{"[sig-api-machinery] CustomResourceDefinition Watch [Privileged:ClusterAdmin] CustomResourceDefinition Watch", []string{
		"watch on custom resource definition objects [Conformance]",
	}},
	{"[sig-api-machinery] CustomResourceFieldSelectors [Privileged:ClusterAdmin] CustomResourceFieldSelectors", []string{
		"MUST list and watch custom resources matching the field selector [Conformance]",
	}},
	{"[sig-api-machinery] CustomResourceConversionWebhook [Privileged:ClusterAdmin]", []string{
		"should be able to convert from CR v1 to CR v2 [Conformance]",
		"should be able to convert a non homogeneous list of CRs [Conformance]",
	}},
	{"[sig-api-machinery] CustomResourceDefinition resources [Privileged:ClusterAdmin]", []string{
		"Simple CustomResourceDefinition creating/deleting custom resource definition objects works [Conformance]",
		"Simple CustomResourceDefinition listing custom resource definition objects works [Conformance]",
		"Simple CustomResourceDefinition getting/updating/patching custom resource definition status sub-resource works [Conformance]",
		"should include custom resource definition resources in discovery documents [Conformance]",
		"custom resource defaulting for requests and from storage works [Conformance]",
	}},
}

// listed returns the full text of each spec of areas.
func listed() []string {
	var specs []string
	for _, a := range areas {
		for _, s := range a.specs {
			specs = append(specs, a.name+" "+s)
		}
	}
	return specs
}

// areasFocus selects all specs of areas.
func areasFocus() *regexp.Regexp {
	names := make([]string, len(areas))
	for i, a := range areas {
		names[i] = regexp.QuoteMeta(a.name)
	}
	return regexp.MustCompile(`(^| )(` + strings.Join(names, "|") + `) `) // ginkgo puts the name of the suite before the text
}

// verdict is what became of the specs that focus selects, as a table to print and as problems. Without a problem all of them passed.
type verdict struct {
	lines    []string
	problems []string
	passed   int
}

// judge says whether a report shows that every spec that had to run did and passed. These are, in a plain run, the listed ones: one that
// is missing or skipped is a problem, and so is one in their areas that is not listed. With a focus of the user's own, it is what that
// selects; at least one spec has to.
func judge(report types.Report, focus *regexp.Regexp, ownFocus bool) verdict {
	var v verdict
	wanted := slices.DeleteFunc(listed(), func(spec string) bool { return !focus.MatchString(spec) })
	seen := map[string]bool{}
	for _, r := range report.SpecReports {
		text := r.FullText()
		if r.LeafNodeType != types.NodeTypeIt {
			if !r.State.Is(types.SpecStatePassed) {
				v.problems = append(v.problems, strings.TrimSpace(fmt.Sprintf("%s %s: %s", r.LeafNodeType, text, outcome(r))))
			}
			continue
		}
		if !focus.MatchString(text) {
			continue
		}
		seen[text] = true
		v.lines = append(v.lines, fmt.Sprintf("%-8s %7.1f s  %s", r.State, r.RunTime.Seconds(), text))
		if r.State.Is(types.SpecStatePassed) {
			v.passed++
		} else {
			v.problems = append(v.problems, text+": "+outcome(r))
		}
		if !ownFocus && !slices.Contains(wanted, text) {
			v.problems = append(v.problems, text+": is not listed in conformance/specs.go")
		}
	}
	for _, spec := range wanted {
		if !seen[spec] {
			v.problems = append(v.problems, spec+": there is no such spec")
		}
	}
	if len(seen) == 0 {
		v.problems = append(v.problems, fmt.Sprintf("no spec matches %s", focus))
	}
	slices.Sort(v.lines)
	return v
}

// outcome says in one line what became of a spec that did not pass.
func outcome(r types.SpecReport) string {
	if r.Failure.Message == "" {
		return r.State.String()
	}
	const maxBytes = 300
	message := strings.Join(strings.Fields(r.Failure.Message), " ")
	if len(message) > maxBytes {
		message = strings.ToValidUTF8(message[:maxBytes], "") + "..."
	}
	return r.State.String() + ": " + message
}
