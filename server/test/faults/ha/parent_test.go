package ha

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/stratakube/strata/server/test/internal/harness"
)

const processCount = 3 + 3 + 2 // members of etcd, API servers, replicas

// TestUpHA_Processes_EndWithTheirParent kills `strata up --ha`, starts it again on the data of members that were killed, and stops it.
func TestUpHA_Processes_EndWithTheirParent(t *testing.T) {
	s := startScene(t)
	ctx := harness.Context(t, 3*time.Minute)
	pids := s.pids(t)
	if len(pids) != processCount {
		t.Fatalf("processes are %v", pids)
	}
	written, err := s.up.API().Create(ctx, "/api/v1/namespaces/"+namespace+"/configmaps", object{"metadata": object{"name": "acknowledged"}})
	harness.Check(t, err)
	s.requireAcknowledged(t, ctx, "strata-replicas", written)
	s.requireRefused(t, ctx, "is in use by another strata up")

	s.up.Kill()
	for name, pid := range pids {
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) { return ended(pid), fmt.Errorf("%s has not ended", name) }))
	}
	s.requireRefused(t, ctx, "has the data of strata up --ha: add --ha, or choose another directory with --data-dir")
	s.start()
	s.requireAcknowledged(t, ctx, "strata", written)
	harness.Check(t, s.up.RequireConsistent())
	harness.Check(t, s.up.Stop())
	if left := s.pids(t); len(left) > 0 {
		t.Errorf("files of processes remain after a stop: %v", left)
	}
}

// requireAcknowledged reads an object in a context of the kubeconfig, whose ports are those of the last start.
func (s *scene) requireAcknowledged(t *testing.T, ctx context.Context, name string, written harness.Object) {
	t.Helper()
	client, err := kubernetes.NewForConfig(s.context(t, name))
	harness.Check(t, err)
	got, err := client.CoreV1().ConfigMaps(namespace).Get(ctx, written.Metadata.Name, metav1.GetOptions{})
	if err != nil || got.ResourceVersion != written.Metadata.ResourceVersion {
		t.Errorf("the acknowledged object is %+v, %v", got, err)
	}
}

// requireRefused starts `strata up` without --ha in the data directory.
func (s *scene) requireRefused(t *testing.T, ctx context.Context, want string) {
	t.Helper()
	r, err := env.Run(ctx, "", "up", "--secure-port=0", "--data-dir="+s.dir)
	harness.Check(t, err)
	if r.Code == 0 || strings.Count(r.Stderr, "\n") != 1 || !strings.Contains(r.Stderr, want) {
		t.Errorf("code %d, standard error %q, want one line with %q", r.Code, r.Stderr, want)
	}
}

// ended reports whether there is no process, or one that only waits for its parent. The kernel kills a process with its parent.
func ended(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}
