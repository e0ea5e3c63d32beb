package simulation

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	podfast "sigs.k8s.io/kwok/kustomize/stage/pod/fast"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestNewNode_Addresses_AreDistinctAndOutsideOfServices(t *testing.T) {
	services := netip.MustParsePrefix("10.0.0.0/24")
	unnamed := netip.MustParsePrefix(defaultPodCIDR)
	seen := map[string]bool{}
	for i := 1; i <= MaxNodes; i++ {
		node := newNode(i)
		pods := netip.MustParsePrefix(node.Spec.PodCIDR)
		if pods.Overlaps(services) || pods.Overlaps(unnamed) || pods.Masked() != pods {
			t.Errorf("node %d has pods in %s", i, pods)
		}
		address := netip.MustParseAddr(node.Status.Addresses[0].Address)
		reserved := netip.MustParsePrefix("198.18.0.0/15") // RFC 2544
		if !reserved.Contains(address) || unnamed.Contains(address) || !reserved.Overlaps(pods) || pods.Bits() < reserved.Bits() || pods.Contains(address) {
			t.Errorf("node %d has address %s, its pods have %s", i, address, pods)
		}
		if pods.Bits() > 25 {
			t.Errorf("node %d has no addresses for %d pods: %s", i, podsPerNode, pods)
		}
		if port := node.Status.DaemonEndpoints.KubeletEndpoint.Port; port != 1 {
			t.Errorf("the kubelet of node %d has port %d", i, port)
		}
		for _, value := range []string{node.Name, pods.String(), address.String()} {
			if seen[value] {
				t.Errorf("%s is used twice", value)
			}
			seen[value] = true
		}
	}
}

func TestAdjustNodes_CreatesMissingAndDeletesSurplus(t *testing.T) {
	theirs := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "theirs", Annotations: map[string]string{kwokAnnotation: kwokFake}}}
	client := fake.NewClientset(theirs)
	nodes := client.CoreV1().Nodes()
	labelled := map[string]bool{}
	for _, n := range []int{3, 3, 5, 2, 0} {
		testcheck.NoError(t, adjustNodes(t.Context(), nodes, n))
		list, err := nodes.List(t.Context(), metav1.ListOptions{})
		testcheck.NoError(t, err)
		got := map[string]bool{}
		for i := range list.Items {
			node := &list.Items[i]
			got[node.Name] = true
			if !labelled[node.Name] {
				if node.Name == theirs.Name {
					continue
				}
				node.Labels["kept"] = "true"
				if _, err := nodes.Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				labelled[node.Name] = true
			} else if node.Labels["kept"] != "true" {
				t.Errorf("node %s was replaced", node.Name)
			}
		}
		if len(got) != n+1 || !got[theirs.Name] {
			t.Errorf("with %d nodes: %v", n, got)
		}
		for i := 1; i <= n; i++ {
			if !got[nodeName(i)] {
				t.Errorf("with %d nodes: no %s", n, nodeName(i))
			}
		}
		for name := range labelled {
			if !got[name] {
				delete(labelled, name)
			}
		}
	}
}

func TestAdjustNodes_NodeWithOtherAddresses_IsCreatedAgain(t *testing.T) {
	earlier := newNode(1)
	earlier.Spec.PodCIDR, earlier.Spec.PodCIDRs = "10.128.1.0/24", []string{"10.128.1.0/24"}
	earlier.Status.Addresses[0].Address = "172.16.0.1"
	earlier.Status.DaemonEndpoints = corev1.NodeDaemonEndpoints{}
	nodes := fake.NewClientset(earlier, newNode(2)).CoreV1().Nodes()
	testcheck.NoError(t, adjustNodes(t.Context(), nodes, 2))
	for i := 1; i <= 2; i++ {
		node, err := nodes.Get(t.Context(), nodeName(i), metav1.GetOptions{})
		testcheck.NoError(t, err)
		want := newNode(i)
		if node.Spec.PodCIDR != want.Spec.PodCIDR || node.Status.Addresses[0] != want.Status.Addresses[0] || node.Status.DaemonEndpoints.KubeletEndpoint.Port != 1 {
			t.Errorf("node %d: %s, %v, %v", i, node.Spec.PodCIDR, node.Status.Addresses, node.Status.DaemonEndpoints)
		}
	}
}

func TestAdjustNodes_NodeOfUserWithSameName_IsError(t *testing.T) {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(2)}})
	if err := adjustNodes(t.Context(), client.CoreV1().Nodes(), 2); !errors.Is(err, errForeignNode) {
		t.Errorf("error %v, want %v", err, errForeignNode)
	}
}

func TestParseStages_UnknownField_IsError(t *testing.T) {
	if _, err := parseStages(podfast.DefaultPodReady, keepAddress); err != nil {
		t.Error(err)
	}
	if _, err := parseStages(podfast.DefaultPodReady + "\nunknown: true\n"); err == nil {
		t.Error("no error")
	}
}

// After stop, a watch that was open has ended, a request that was in flight has returned, and a new
// one fails.
func TestRequests_Stop_EndsAllRequests(t *testing.T) {
	arrived := make(chan string)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/watch" {
			w.WriteHeader(http.StatusOK)
			w.(http.Flusher).Flush()
		}
		arrived <- r.URL.Path
		<-r.Context().Done()
	}))
	defer server.Close()
	gate := newRequests(t.Context())
	client, err := rest.HTTPClientFor(gate.through(&rest.Config{Host: server.URL}))
	testcheck.NoError(t, err)
	get := func(path string) (*http.Response, error) {
		request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, server.URL+path, nil)
		testcheck.NoError(t, err)
		return client.Do(request)
	}
	watch := make(chan error, 1)
	go func() {
		response, err := get("/watch")
		if err == nil {
			_, err = io.ReadAll(response.Body)
			response.Body.Close()
		}
		watch <- err
	}()
	<-arrived
	write := make(chan error, 1)
	go func() {
		response, err := get("/write")
		if err == nil {
			response.Body.Close()
		}
		write <- err
	}()
	<-arrived

	gate.stop()
	if err := <-write; err == nil {
		t.Error("the request in flight succeeded")
	}
	if err := <-watch; err == nil {
		t.Error("the watch ended without an error")
	}
	if response, err := get("/late"); !errors.Is(err, errStopped) {
		if err == nil {
			response.Body.Close()
		}
		t.Errorf("a request after the stop: %v, want %v", err, errStopped)
	}
	gate.stop()
}
