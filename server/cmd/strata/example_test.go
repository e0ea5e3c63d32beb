package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/pki"
)

// Strata runs in place of kube-apiserver, on the same etcd and with the same flags.
func Example_apiserver() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	// with an etcd, certificates and a free port, but without an API server
	node := newControlPlaneNode(ctx)
	defer node.close()

	// Only the command is new. It was kube-apiserver, with these flags.
	client := node.run(ctx, "strata", "apiserver",
		"--etcd-servers="+node.etcd.Endpoint(),
		"--bind-address=127.0.0.1",
		"--secure-port="+strconv.Itoa(node.port.Number()),
		"--tls-cert-file="+node.files.Serving,
		"--tls-private-key-file="+node.files.Serving,
		"--client-ca-file="+node.files.CA,
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file="+node.files.ServiceAccountKey,
		"--service-account-signing-key-file="+node.files.ServiceAccountKey,
		"--service-cluster-ip-range=10.96.0.0/12",
		"--authorization-mode=Node,RBAC",
	)

	// Clients need no change.
	namespaces := client.CoreV1().Namespaces()
	_, err := namespaces.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "example"}}, metav1.CreateOptions{})
	must(err)
	namespace, err := namespaces.Get(ctx, "example", metav1.GetOptions{})
	must(err)
	fmt.Println("namespace", namespace.Name, namespace.Status.Phase)

	// These metrics exist with --engine=strata only, which is the default: the data of etcd is in
	// memory, and reads are answered there.
	metrics, err := client.RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
	must(err)
	fmt.Println("strata_mirror_ready is 1:", regexp.MustCompile(`(?m)^strata_mirror_ready\{.*\} 1$`).Match(metrics))
	fmt.Println("GET answered by Strata:", regexp.MustCompile(`(?m)^strata_readpath_requests_total\{verb="get"\} [1-9]`).Match(metrics))

	// On SIGTERM the server ends like kube-apiserver: requests and watches complete, the exit code
	// is 0.
	must(node.server.Stop(syscall.SIGTERM, 90*time.Second))
	fmt.Println("exit error:", node.server.ExitError())
	// Output:
	// namespace example Active
	// strata_mirror_ready is 1: true
	// GET answered by Strata: true
	// exit error: <nil>
}

// controlPlaneNode is a host of a control plane.
type controlPlaneNode struct {
	dir    string
	etcd   *embedetcd.Server
	files  *pki.Files
	port   *loopback.Port
	server *process.Child // started by run
}

func newControlPlaneNode(ctx context.Context) *controlPlaneNode {
	dir, err := os.MkdirTemp("", "strata-example-")
	must(err)
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: filepath.Join(dir, "etcd"), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true})
	must(err)
	files, err := pki.Ensure(filepath.Join(dir, "pki"), []string{"127.0.0.1"}, time.Now())
	must(err)
	port, err := loopback.Reserve()
	must(err)
	return &controlPlaneNode{dir: dir, etcd: etcd, files: files, port: port}
}

// run starts a process and returns an administrator's client when the API server is ready. The test
// binary takes the place of the strata binary (TestMain).
func (n *controlPlaneNode) run(ctx context.Context, command string, args ...string) *kubernetes.Clientset {
	var err error
	n.server, err = process.Start(process.Spec{
		Name: command, Path: os.Args[0], Args: args, Env: append(os.Environ(), runEnv+"="+runMain),
		Log: filepath.Join(n.dir, "server.log"),
	})
	must(err)
	client, err := kubernetes.NewForConfig(&rest.Config{
		Host:            "https://" + n.port.Address(),
		TLSClientConfig: rest.TLSClientConfig{CAFile: n.files.CA, CertFile: n.files.Admin, KeyFile: n.files.Admin},
	})
	must(err)
	must(n.server.Await(ctx, 50*time.Millisecond, func(ctx context.Context) error {
		return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	}))
	return client
}

func (n *controlPlaneNode) close() {
	if n.server != nil {
		n.server.Kill()
	}
	_ = n.port.Release()
	n.etcd.Close()
	_ = os.RemoveAll(n.dir)
}

// must ends the example; the deferred calls stop its processes.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
