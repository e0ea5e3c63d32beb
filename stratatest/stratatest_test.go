package stratatest

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

func clientOf(t *testing.T, cfg *rest.Config) *kubernetes.Clientset {
	t.Helper()
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func TestStart_ParallelPlanes_AreIsolated(t *testing.T) {
	const n = 4
	var configs [n]*rest.Config
	t.Run("controlPlanes", func(group *testing.T) {
		for i := range n {
			group.Run(fmt.Sprint(i), func(group *testing.T) {
				group.Parallel()
				configs[i] = Start(t, WithCRDs("testdata/crds")) // all run until the last check
				maps := clientOf(group, configs[i]).CoreV1().ConfigMaps(metav1.NamespaceDefault)
				object := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "same"}, Data: map[string]string{"controlPlane": fmt.Sprint(i)}}
				if _, err := maps.Create(group.Context(), object, metav1.CreateOptions{}); err != nil {
					group.Fatal(err)
				}
			})
		}
	})
	for i, cfg := range configs {
		list, err := clientOf(t, cfg).CoreV1().ConfigMaps(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
		if err != nil || len(list.Items) != 1 || list.Items[0].Data["controlPlane"] != fmt.Sprint(i) {
			t.Errorf("config maps are %v (error %v), want one of plane %d", list, err, i)
		}
		// The certificates of one control plane are not valid for another.
		foreign := rest.CopyConfig(cfg)
		foreign.CertData, foreign.KeyData = configs[(i+1)%n].CertData, configs[(i+1)%n].KeyData
		if _, err := clientOf(t, foreign).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); !apierrors.IsUnauthorized(err) {
			t.Errorf("request with the certificate of another control plane: %v, want 401", err)
		}
	}
}

func TestStart_FurtherPlane_HasObjectsOfNewCluster(t *testing.T) {
	first, second := clientOf(t, Start(t)), clientOf(t, Start(t))
	for _, client := range []*kubernetes.Clientset{first, second} {
		namespaces, err := client.CoreV1().Namespaces().List(t.Context(), metav1.ListOptions{})
		if err != nil || len(namespaces.Items) != 4 {
			t.Errorf("namespaces are %v (error %v), want the 4 of a new cluster", namespaces, err)
		}
		service, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(t.Context(), "kubernetes", metav1.GetOptions{})
		if err != nil || service.Spec.ClusterIP != "10.0.0.1" {
			t.Errorf("service kubernetes: %v, error %v", service, err)
		}
		role, err := client.RbacV1().ClusterRoles().Get(t.Context(), "cluster-admin", metav1.GetOptions{})
		if err != nil || len(role.Rules) == 0 {
			t.Errorf("cluster role cluster-admin has rules %v, error %v", role.Rules, err)
		}
		document, err := client.RESTClient().Get().AbsPath("/openapi/v3/apis/apps/v1").DoRaw(t.Context())
		if err != nil || !bytes.Contains(document, []byte("io.k8s.api.apps.v1.Deployment")) {
			t.Errorf("the OpenAPI document of apps/v1 has %d bytes, no Deployment, error %v", len(document), err)
		}
		document, err = client.RESTClient().Get().AbsPath("/openapi/v2").DoRaw(t.Context())
		if err != nil || !bytes.Contains(document, []byte("io.k8s.api.apps.v1.Deployment")) {
			t.Errorf("the OpenAPI document has %d bytes, no Deployment, error %v", len(document), err)
		}
	}
}

func TestWithCRDs_ObjectsCanBeCreatedAtOnce(t *testing.T) {
	client, err := dynamic.NewForConfig(Start(t, WithCRDs("testdata/crds")))
	if err != nil {
		t.Fatal(err)
	}
	widgets := client.Resource(schema.GroupVersionResource{Group: "test.strata", Version: "v1", Resource: "widgets"}).Namespace(metav1.NamespaceDefault)
	widget := func(size int64) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "test.strata/v1", "kind": "Widget", "metadata": map[string]any{"name": "w"}, "spec": map[string]any{"size": size},
		}}
	}
	if _, err := widgets.Create(t.Context(), widget(0), metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("creation of a widget that the schema forbids: %v, want Invalid", err)
	}
	if _, err := widgets.Create(t.Context(), widget(1), metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	gears := client.Resource(schema.GroupVersionResource{Group: "test.strata", Version: "v1alpha1", Resource: "gears"})
	if _, err := gears.List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("list of the second definition of the file: %v", err)
	}
}

func TestUser_HasNameGroupsAndTheirRightsOnly(t *testing.T) {
	cfg := Start(t)
	jane := clientOf(t, User(t, cfg, "jane", "testers"))
	review, err := jane.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if user := review.Status.UserInfo; user.Username != "jane" || strings.Join(user.Groups, " ") != "testers system:authenticated" {
		t.Errorf("user is %v, want jane of testers", user)
	}
	if _, err := jane.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("list of secrets by a user without rights: %v, want Forbidden", err)
	}
	if _, err := clientOf(t, User(t, cfg, "root", "system:masters")).CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("list of secrets by a member of system:masters: %v", err)
	}
}

func TestKubeconfig_IsReadByClients(t *testing.T) {
	cfg, err := clientcmd.BuildConfigFromFlags("", Kubeconfig(t, Start(t)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := clientOf(t, cfg).CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Error(err)
	}
}

func TestWithFlags_FeatureGate_UsesProcessOfItsOwn(t *testing.T) {
	gated, err := New(t.Context(), WithFlags("--feature-gates=AllAlpha=false", "--service-cluster-ip-range=10.1.0.0/24"))
	if err != nil {
		t.Fatal(err)
	}
	defer gated.Stop()
	plain, err := New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Stop()
	if gated.server == plain.server {
		t.Error("control planes with different feature gates run in one process")
	}
	service, err := clientOf(t, gated.Config()).CoreV1().Services(metav1.NamespaceDefault).Get(t.Context(), "kubernetes", metav1.GetOptions{})
	if err != nil || service.Spec.ClusterIP != "10.1.0.1" {
		t.Errorf("service kubernetes: %v, error %v; want an address of the range", service, err)
	}
}

func TestStop_ClosesConnectionsAndLeavesNoGoroutines(t *testing.T) {
	first, err := New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Stop()
	before := runtime.NumGoroutine()
	p, err := New(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cfg := p.Config()
	watch, err := clientOf(t, cfg).CoreV1().Pods("").Watch(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(p.Stop(), p.Stop()); err != nil {
		t.Fatal(err)
	}
	for range watch.ResultChan() { // ends with the connection
	}
	address, err := url.Parse(cfg.Host)
	if err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", address.Host); err == nil {
		conn.Close()
		t.Errorf("%s accepts connections after Stop", address.Host)
	}
	if _, err := p.User("jane"); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Errorf("User after Stop: %v, want an error", err)
	}
	if _, err := controlPlaneOf(cfg); err == nil {
		t.Error("the control plane is known after Stop")
	}
	await(t, "the goroutines to end", func() bool { return runtime.NumGoroutine() <= before })
}

func TestProcess_TestIsKilled_GuestEndsAndRemovesItsDirectory(t *testing.T) {
	test := exec.Command(os.Args[0])
	test.Env = append(os.Environ(), startEnv+"=1")
	out, err := test.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := test.Start(); err != nil {
		t.Fatal(err)
	}
	defer test.Wait()
	defer test.Process.Kill()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	var dir string
	if _, err := fmt.Sscan(line, &pid, &dir); err != nil {
		t.Fatalf("the process printed %q", line)
	}
	if err := syscall.Kill(pid, 0); err != nil {
		t.Fatalf("process %d of the test server: %v", pid, err)
	}
	if err := test.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	await(t, "the test server to remove "+dir, func() bool {
		_, err := os.Stat(dir)
		return errors.Is(err, os.ErrNotExist)
	})
	await(t, "the test server to end", func() bool {
		// a zombie where no process reaps orphans
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return syscall.Kill(pid, 0) != nil || err == nil && strings.Contains(string(stat), ") Z ")
	})
}

// await fails the test if the condition does not hold within a minute.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("gave up waiting for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
