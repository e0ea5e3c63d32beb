package apiserver

import (
	"context"
	"maps"
	"regexp"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/wait"
)

// some stands for a number that depends on the number of resources.
const some = -1

// TestIdleServer_OffFeatures_HaveNoGoroutine checks the rule of docs/architecture.md that a feature
// costs no goroutine and no watch of etcd while it is off. A package without a row has no
// goroutine.
func TestIdleServer_OffFeatures_HaveNoGoroutine(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		flags   []string
		want    map[string]int // goroutines by package
		watches int            // of etcd: the feed and the key of compaction
	}{
		{name: "defaults", watches: 2, want: map[string]int{
			"etcdsource": 5, "kube/consistency": 1, "kube/informer": some, "kube/internal/index": 2, "kube/internal/slowclient": 1,
			"kube/kubestorage": 1, "kube/readpath": some, "mirror": 6, "server/internal/apiserver": 2, "server/internal/gcpolicy": 1,
		}},
		{name: "gates off", flags: []string{"--strata-feature-gates=" + strings.Join([]string{
			"ByteReadPath=false", "ConsistentListFromCache=false", "ConsistentGetFromCache=false", "DetectCacheInconsistency=false",
			"EfficientWatchResumption=false", "ListFromCacheSnapshot=false", "WatchBookmark=false", "WatchHistoryRestore=false",
		}, ",")}, watches: 2, want: map[string]int{
			"etcdsource": 5, "kube/informer": some, "kube/internal/index": 2, "kube/internal/slowclient": 1,
			"kube/internal/watch": some, "kube/kubestorage": 1, "kube/readpath": some, "mirror": 4, "server/internal/apiserver": 2, "server/internal/gcpolicy": 1,
		}},
		// Upstream's cacher has a watch for each resource, so that the count of watches can fail.
		{name: "upstream's engine", flags: []string{"--engine=upstream"}, watches: some, want: map[string]int{"server/internal/apiserver": 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := startServer(t, startEtcd(t), c.flags...)
			var got map[string]int
			var watches int
			// The load of memory and the restore of its history have goroutines until they end.
			err := wait.PollUntilContextTimeout(t.Context(), pollInterval, testTimeout, true, func(context.Context) (bool, error) {
				got, watches = s.idle(t)
				return maps.Equal(got, c.want) && watches == c.watches, nil
			})
			if err != nil {
				t.Errorf("goroutines by package %v, %d watches of etcd; want %v, %d", got, watches, c.want, c.watches)
			}
		})
	}
}

// ownFrame matches a function of Strata in a stack, and its package.
var ownFrame = regexp.MustCompile(`(?m)^github\.com/stratakube/strata/([\w/]+)\.\S+\(`)

// idle returns the number of goroutines by the package of Strata that started them, and the number
// of watches of etcd.
func (s *server) idle(t *testing.T) (byPackage map[string]int, watches int) {
	t.Helper()
	byPackage = map[string]int{}
	for stack := range strings.SplitSeq(s.get(t, "/debug/pprof/goroutine?debug=2"), "\n\n") {
		if strings.Contains(stack, "(*watchGRPCStream).serveSubstream(") {
			watches++
		}
		own := ownFrame.FindAllStringSubmatch(stack, -1)
		if len(own) == 0 || strings.HasPrefix(strings.TrimSpace(stack), "goroutine 1 ") {
			continue
		}
		switch started := own[len(own)-1][1]; started {
		case "kube/informer", "kube/internal/watch", "kube/readpath":
			byPackage[started] = some
		default:
			byPackage[started]++
		}
	}
	if watches > 20 {
		watches = some
	}
	return byPackage, watches
}
