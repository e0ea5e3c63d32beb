package ha

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/stratakube/strata/test/harness"
)

const processCount = 3 + 3 + 2 // members of etcd, API servers, replicas

// TestUpHA_Processes_EndWithTheirParent kills `strata up --ha`, starts it again on the data of
// members that were killed, and stops it.
func TestUpHA_Processes_EndWithTheirParent(t *testing.T) {
	s := startScene(t)
	ctx := harness.Context(t, 6*time.Minute)
	pids := s.pids(t)
	if len(pids) != processCount {
		t.Fatalf("processes are %v", pids)
	}
	api, path := s.up.API(), "/api/v1/namespaces/"+namespace+"/configmaps"
	harness.Check(t, api.Ensure(ctx, path, object{"metadata": object{"name": "acknowledged"}}))
	var written harness.Object
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		var err error
		written, err = api.Get(ctx, path+"/acknowledged", "")
		return err == nil, err
	}))
	s.requireAcknowledged(t, ctx, "strata-replicas", written)
	s.requireNoHosts(t, ctx)
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

// requireAcknowledged reads an object in a context of the kubeconfig, whose ports are those of the
// last start.
func (s *scene) requireAcknowledged(t *testing.T, ctx context.Context, name string, written harness.Object) {
	t.Helper()
	client, err := kubernetes.NewForConfig(s.context(t, name))
	harness.Check(t, err)
	var got *corev1.ConfigMap
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		got, err = client.CoreV1().ConfigMaps(namespace).Get(ctx, written.Metadata.Name, metav1.GetOptions{})
		// a server that started may still refuse requests
		return err == nil || apierrors.IsNotFound(err), err
	}))
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

// ended reports whether there is no process, or one that only waits for its parent. The kernel
// kills a process with its parent.
func ended(pid int) bool {
	if syscall.Kill(pid, 0) != nil {
		return true
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// requireNoHosts demands that the API servers connect to no address of a service.
func (s *scene) requireNoHosts(t *testing.T, ctx context.Context) {
	t.Helper()
	api, path := s.up.API(), "/api/v1/namespaces/"+namespace
	const webhooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
	harness.Check(t, api.Ensure(ctx, path+"/services", object{"metadata": object{"name": "s"},
		"spec": object{"ports": []any{object{"port": 443}}}}))
	harness.Check(t, api.Ensure(ctx, webhooks, object{"metadata": object{"name": "w"}, "webhooks": []any{object{
		"name": "w.example.test", "admissionReviewVersions": []string{"v1"}, "sideEffects": "None",
		"clientConfig":   object{"service": object{"namespace": namespace, "name": "s"}},
		"objectSelector": object{"matchLabels": object{"hook": "w"}},
		"rules": []any{object{"apiGroups": []string{""}, "apiVersions": []string{"v1"},
			"resources": []string{"configmaps"}, "operations": []string{"CREATE"}}}}}}))
	hooked := object{"metadata": object{"name": "hooked", "labels": object{"hook": "w"}}}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, "POST", path+"/configmaps", "dryRun=All", hooked)
		// the server reads the configuration with a watch
		if err != nil || r.Code == 201 || r.Code == 429 {
			return false, err
		}
		if !strings.Contains(string(r.Body), "no host has 10.0.0.") {
			t.Fatalf("the webhook: %d %s", r.Code, r.Body)
		}
		return true, nil
	}))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, "DELETE", webhooks+"/w", "", nil)
		if err != nil {
			return false, err
		}
		return r.Code == 200 || r.Code == 404, r.Err() // 404 after a request that failed
	}))
}
