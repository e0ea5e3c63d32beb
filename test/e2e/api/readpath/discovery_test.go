package readpath

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// listable returns the paths of a group version's listable resources.
func listable(t *testing.T, r *harness.Response, base string) (paths []string) {
	t.Helper()
	if r.Code != http.StatusOK {
		t.Fatalf("%s: %v", base, r.Err())
	}
	var list metav1.APIResourceList
	harness.Check(t, json.Unmarshal(r.Body, &list))
	for _, resource := range list.APIResources {
		if slices.Contains(resource.Verbs, "list") {
			paths = append(paths, base+"/"+resource.Name)
		}
	}
	return paths
}

// groupVersions returns all versions of all groups.
func groupVersions(t *testing.T, r *harness.Response) (versions []string) {
	t.Helper()
	var list metav1.APIGroupList
	harness.Check(t, json.Unmarshal(r.Body, &list))
	for _, g := range list.Groups {
		for _, v := range g.Versions {
			versions = append(versions, v.GroupVersion)
		}
	}
	return versions
}
