package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/cert"
	"k8s.io/kubernetes/test/images/agnhost/crd-conversion-webhook/converter"
	admission "k8s.io/kubernetes/test/images/agnhost/webhook"
)

const (
	nodeName = "conformance"

	// resync is the interval after which the node retries failed actions.
	resync = 2 * time.Second
)

// node replaces a node with a kubelet and the network to its pods. It is Ready, and of all pods it
// runs only those of upstream's webhooks (the subcommands crd-conversion-webhook and webhook of the
// image agnhost): their handlers, which upstream's tests have as packages, are served by this
// process. Other pods stay Pending. The API server reaches pods through a proxy, as in clusters
// without a route to their nodes.
type node struct {
	client kubernetes.Interface
	proxy  *http.Server
	log    *log.Logger

	mu struct {
		sync.Mutex
		pods map[types.UID]*webhook
		byIP map[string]*webhook
		made int
	}
}

// webhook is a pod that runs.
type webhook struct {
	podIP   string // by which the proxy knows it
	address string // where it listens
	server  *http.Server
}

// newNode returns a node that serves its proxy on a unix socket at path. Later errors are logged to
// out.
func newNode(path string, out io.Writer) (*node, error) {
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	n := &node{log: log.New(out, "", log.LstdFlags|log.Lmicroseconds)}
	n.mu.pods, n.mu.byIP = map[types.UID]*webhook{}, map[string]*webhook{}
	n.proxy = &http.Server{Handler: http.HandlerFunc(n.connect), ErrorLog: n.log}
	go func() {
		if err := n.proxy.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Print("proxy: ", err)
		}
	}()
	return n, nil
}

// egress writes the API server's configuration for the proxy at socket.
func egress(path, socket string) error {
	return os.WriteFile(path, fmt.Appendf(nil, `apiVersion: apiserver.k8s.io/v1beta1
kind: EgressSelectorConfiguration
egressSelections:
- name: cluster
  connection:
    proxyProtocol: HTTPConnect
    transport:
      uds:
        udsName: %q
`, socket), 0o600)
}

// connect answers CONNECT to the address of a pod.
func (n *node) connect(w http.ResponseWriter, r *http.Request) {
	host, _, err := net.SplitHostPort(r.Host)
	n.mu.Lock()
	pod := n.mu.byIP[host]
	n.mu.Unlock()
	if r.Method != http.MethodConnect || err != nil || pod == nil {
		http.Error(w, "there is no pod at "+r.Host, http.StatusBadGateway)
		return
	}
	to, err := net.Dial("tcp", pod.address)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer to.Close()
	from, buffered, err := w.(http.Hijacker).Hijack()
	if err != nil {
		n.log.Print("proxy: ", err)
		return
	}
	defer from.Close()
	if _, err := io.WriteString(from, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	go func() {
		defer from.Close() // ends the copy below
		_, _ = io.Copy(from, to)
	}()
	_, _ = io.Copy(to, buffered)
}

// run registers the node and runs pods until ctx is cancelled. It returns when the node is
// registered; wait returns when its goroutines have ended.
func (n *node) run(ctx context.Context, client kubernetes.Interface) (wait func(), err error) {
	n.client = client
	if err := n.register(ctx); err != nil {
		return nil, fmt.Errorf("create a node: %w", err)
	}
	factory := informers.NewSharedInformerFactory(client, resync)
	handle := func(obj any) {
		if pod, ok := obj.(*corev1.Pod); ok {
			if err := n.sync(ctx, pod); err != nil && ctx.Err() == nil {
				n.log.Printf("pod %s/%s: %v", pod.Namespace, pod.Name, err)
			}
		}
	}
	if _, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    handle,
		UpdateFunc: func(_, obj any) { handle(obj) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			if pod, ok := obj.(*corev1.Pod); ok {
				n.end(pod.UID)
			}
		},
	}); err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	return factory.Shutdown, nil
}

// close stops all servers of the node.
func (n *node) close() {
	_ = n.proxy.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, pod := range n.mu.pods {
		_ = pod.server.Close()
	}
}

// register creates the node's object. Admission gives each new node a taint that a kubelet's first
// report would remove.
func (n *node) register(ctx context.Context) error {
	now := metav1.Now()
	capacity := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse("8"),
		corev1.ResourceMemory: resource.MustParse("16Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
	object, err := n.client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName, corev1.LabelOSStable: "linux"}},
		Status: corev1.NodeStatus{
			Capacity:    capacity,
			Allocatable: capacity,
			Addresses:   []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "127.0.0.1"}},
			Conditions: []corev1.NodeCondition{{
				Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "NoKubelet", LastHeartbeatTime: now, LastTransitionTime: now,
			}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	object.Spec.Taints = nil
	_, err = n.client.CoreV1().Nodes().Update(ctx, object, metav1.UpdateOptions{})
	return err
}

// sync does the next step that a pod needs, if any; its change of the pod triggers the next call.
func (n *node) sync(ctx context.Context, pod *corev1.Pod) error {
	pods := n.client.CoreV1().Pods(pod.Namespace)
	ours := pod.Spec.NodeName == nodeName
	switch {
	case handler(pod) == nil, pod.Spec.NodeName != "" && !ours:
		return nil
	case pod.DeletionTimestamp != nil:
		n.end(pod.UID)
		now := int64(0) // a kubelet sets it when the containers have ended
		err := pods.Delete(ctx, pod.Name, metav1.DeleteOptions{GracePeriodSeconds: &now, Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			err = nil // it is gone
		}
		return err
	case !ours:
		return pods.Bind(ctx, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace, UID: pod.UID},
			Target:     corev1.ObjectReference{Kind: "Node", Name: nodeName},
		}, metav1.CreateOptions{})
	case pod.Status.Phase == corev1.PodRunning:
		return nil
	}
	podIP, err := n.start(ctx, pod)
	if err != nil {
		return err
	}
	status, err := json.Marshal(map[string]any{"status": running(pod, podIP)})
	if err != nil {
		return err
	}
	_, err = pods.Patch(ctx, pod.Name, types.MergePatchType, status, metav1.PatchOptions{}, "status")
	return err
}

// handler returns a function that returns the handler of a pod of upstream's webhooks, nil for any
// other pod.
func handler(pod *corev1.Pod) func() (http.Handler, error) {
	containers := pod.Spec.Containers
	if len(containers) != 1 || len(containers[0].Args) == 0 {
		return nil
	}
	return map[string]func() (http.Handler, error){
		"crd-conversion-webhook": conversionHandler,
		"webhook":                admissionHandler,
	}[containers[0].Args[0]]
}

func conversionHandler() (http.Handler, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("/crdconvert", converter.ServeExampleConvert)
	return mux, nil
}

// admissionHandler returns the default handler of this process, after agnhost's command has added
// its handlers: they are not exported. The command then tries to listen and panics, because it is
// given a port that does not exist.
var admissionHandler = sync.OnceValues(func() (http.Handler, error) {
	dir, err := os.MkdirTemp("", "strata-conformance-webhook-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	certificate, key, err := cert.GenerateSelfSignedCertKey("localhost", nil, nil)
	if err != nil {
		return nil, err
	}
	flags := map[string]string{"port": "-1", "tls-cert-file": filepath.Join(dir, "tls.crt"), "tls-private-key-file": filepath.Join(dir, "tls.key")}
	for name, value := range flags {
		if err := admission.CmdWebhook.Flags().Set(name, value); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(os.WriteFile(flags["tls-cert-file"], certificate, 0o600), os.WriteFile(flags["tls-private-key-file"], key, 0o600)); err != nil {
		return nil, err
	}
	var panicked any
	func() {
		defer func() { panicked = recover() }()
		admission.CmdWebhook.Run(admission.CmdWebhook, nil)
	}()
	if err, ok := panicked.(*net.OpError); !ok {
		return nil, fmt.Errorf("agnhost's webhook ended with %v, not with a port that it cannot use", panicked)
	} else if err.Op != "listen" {
		return nil, err
	}
	return http.DefaultServeMux, nil
})

// start serves the webhook of a pod, unless that runs already, and returns the pod's address.
func (n *node) start(ctx context.Context, pod *corev1.Pod) (podIP string, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if running := n.mu.pods[pod.UID]; running != nil {
		return running.podIP, nil
	}
	serve, err := handler(pod)()
	if err != nil {
		return "", err
	}
	certificate, err := n.certificate(ctx, pod)
	if err != nil {
		return "", err
	}
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12})
	if err != nil {
		return "", err
	}
	n.mu.made++
	started := &webhook{
		// a range for documentation; loopback is refused
		podIP:   fmt.Sprintf("192.0.2.%d", n.mu.made),
		address: l.Addr().String(),
		server:  &http.Server{Handler: serve, ErrorLog: n.log},
	}
	go func() {
		if err := started.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			n.log.Print("webhook: ", err)
		}
	}()
	n.mu.pods[pod.UID], n.mu.byIP[started.podIP] = started, started
	n.log.Printf("pod %s/%s serves at %s, which is %s", pod.Namespace, pod.Name, started.podIP, started.address)
	return started.podIP, nil
}

// certificate returns the one in the secret that the pod mounts.
func (n *node) certificate(ctx context.Context, pod *corev1.Pod) (tls.Certificate, error) {
	for _, volume := range pod.Spec.Volumes {
		if volume.Secret == nil {
			continue
		}
		secret, err := n.client.CoreV1().Secrets(pod.Namespace).Get(ctx, volume.Secret.SecretName, metav1.GetOptions{})
		if err != nil {
			return tls.Certificate{}, err
		}
		return tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	}
	return tls.Certificate{}, errors.New("it mounts no secret with a certificate")
}

// end stops the server of a pod.
func (n *node) end(uid types.UID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if pod := n.mu.pods[uid]; pod != nil {
		_ = pod.server.Close()
		delete(n.mu.pods, uid)
		delete(n.mu.byIP, pod.podIP)
	}
}

// running is the status of a pod whose containers are ready.
func running(pod *corev1.Pod, podIP string) corev1.PodStatus {
	now := metav1.Now()
	status := corev1.PodStatus{
		Phase:     corev1.PodRunning,
		PodIP:     podIP,
		PodIPs:    []corev1.PodIP{{IP: podIP}},
		StartTime: &now,
	}
	for _, condition := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Ready: true, Started: new(true),
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		})
	}
	return status
}
