package apiserver

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/kubestorage"
)

// A load that takes long is logged with its resource and numbers, then the restore, and nothing
// after both.
func TestLogLoad_LongLoad_IsLoggedUntilItsEnd(t *testing.T) {
	var mu sync.Mutex
	var lines []string
	klog.SetLogger(funcr.New(func(_, args string) {
		mu.Lock()
		defer mu.Unlock()
		if strings.Contains(args, "from etcd") {
			lines = append(lines, args)
		}
	}, funcr.Options{}))
	defer klog.ClearLogger()
	synctest.Test(t, func(t *testing.T) {
		states := []kubestorage.LoadState{
			{Loading: true, Resource: "pods", Objects: 100},
			{Loading: true, Resource: "secrets", Objects: 200, Total: 300},
			{Restoring: true, Objects: 300, Total: 300, Changes: 50},
			{Objects: 300, Total: 300, Changes: 70},
		}
		calls := 0
		stop := logLoad(t.Context(), func(context.Context) kubestorage.LoadState {
			calls++
			return states[min(calls, len(states))-1]
		})
		time.Sleep(statusline.After + 10*statusline.Interval)
		stop()
		if calls != len(states) {
			t.Errorf("%d reads of the state, want %d", calls, len(states))
		}
	})
	want := []string{
		`"msg"="Loading memory from etcd" "resource"="pods" "objects"=100 "took"="2s"`,
		`"msg"="Loading memory from etcd" "resource"="secrets" "objects"=200 "took"="7s" "of"=300`,
		`"msg"="Restoring history from etcd; objects are served" "events"=50 "took"="12s"`,
	}
	mu.Lock()
	defer mu.Unlock()
	if len(lines) != len(want) {
		t.Fatalf("%d lines, want %d:\n%s", len(lines), len(want), strings.Join(lines, "\n"))
	}
	for i := range want {
		if !strings.Contains(lines[i], want[i]) {
			t.Errorf("line %q, want %q", lines[i], want[i])
		}
	}
}
