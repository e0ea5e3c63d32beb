package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/keyutil"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
)

// controllers are the enabled controllers of kube-controller-manager: all except controllers that
// evict pods from a node without heartbeats, such as ours.
var controllers = []string{
	"*",
	"-node-lifecycle-controller",
	"-taint-eviction-controller",
}

// cluster is an etcd, an API server, controllers and a node, with their data in a directory.
type cluster struct {
	options options
	dir     string // data, gone with the cluster; the files below are in it

	client     kubernetes.Interface // of a user in system:masters
	kubeconfig string               // of the same
	kubectl    string               // path of a program
	ca         string               // file with the CA of the API server's certificate
	saKey      string               // file with the signing key of service accounts' tokens

	port      *loopback.Port // of the API server
	node      *node
	nodeLog   *os.File
	stopNode  func()
	processes []*process.Child
}

// startCluster starts a cluster. Its data are in dir, its logs in o.reports. The returned cluster
// has all started processes, also with an error.
func startCluster(ctx context.Context, o options, dir string) (*cluster, error) {
	c := &cluster{
		options:    o,
		dir:        dir,
		kubeconfig: filepath.Join(dir, "kubeconfig"),
		kubectl:    filepath.Join(dir, "kubectl"),
		ca:         filepath.Join(dir, "certs", "apiserver.crt"),
		saKey:      filepath.Join(dir, "service-accounts.key"),
	}
	keyPEM, err := keyutil.MakeEllipticPrivateKeyPEM()
	if err != nil {
		return c, err
	}
	if err := os.WriteFile(c.saKey, keyPEM, 0o600); err != nil {
		return c, err
	}
	if err := os.WriteFile(c.kubectl, fmt.Appendf(nil, "#!/bin/sh\nexec %q kubectl \"$@\"\n", o.strata), 0o755); err != nil {
		return c, err
	}
	etcd, err := c.startEtcd(ctx)
	if err != nil {
		return c, err
	}
	client, err := c.startServer(ctx, etcd)
	if err != nil {
		return c, err
	}
	c.client = client
	nodeCtx, cancel := context.WithCancel(context.Background()) // it serves until the servers stop
	wait, err := c.node.run(nodeCtx, client)
	c.stopNode = func() {
		cancel()
		if wait != nil {
			wait()
		}
	}
	if err != nil {
		return c, err
	}
	return c, c.startControllers(ctx, client)
}

// start starts a process of the cluster. Its log is the file NAME.log in the directory of reports.
func (c *cluster) start(name, path string, args ...string) (*process.Child, error) {
	p, err := process.Start(process.Spec{Name: name, Path: path, Args: args, Log: c.options.log(name), Lines: true})
	if err == nil {
		c.processes = append(c.processes, p)
	}
	return p, err
}

// startEtcd starts an etcd and returns its URL when it serves.
func (c *cluster) startEtcd(ctx context.Context) (url string, err error) {
	etcd, err := c.start("etcd", c.options.strata,
		"etcd", "--data-dir="+filepath.Join(c.dir, "etcd"), "--listen-client-url=http://127.0.0.1:0", "--unsafe-no-fsync")
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	line, _, err := etcd.WaitLine(ctx, 0, "ready ")
	return strings.TrimPrefix(line, "ready "), err
}

// await calls ready until it returns nil, for at most startTimeout.
func await(ctx context.Context, p *process.Child, ready func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return p.Await(ctx, 100*time.Millisecond, ready)
}

// startServer starts the API server and the proxy to the node's pods, writes the kubeconfig, and
// returns when the server is ready.
func (c *cluster) startServer(ctx context.Context, etcd string) (*kubernetes.Clientset, error) {
	socket, egressConfig, tokens := filepath.Join(c.dir, "node.sock"), filepath.Join(c.dir, "egress.yaml"), filepath.Join(c.dir, "tokens.csv")
	var err error
	if c.nodeLog, err = os.Create(filepath.Join(c.options.reports, "node.log")); err != nil {
		return nil, err
	}
	if c.node, err = newNode(socket, c.nodeLog); err != nil {
		return nil, err
	}
	if err := egress(egressConfig, socket); err != nil {
		return nil, err
	}
	token := rand.Text()
	if err := os.WriteFile(tokens, []byte(token+",admin,admin,system:masters\n"), 0o600); err != nil {
		return nil, err
	}
	port, err := loopback.Reserve()
	if err != nil {
		return nil, err
	}
	c.port = port
	config := &rest.Config{
		Host:            "https://" + port.Address(),
		BearerToken:     token,
		TLSClientConfig: rest.TLSClientConfig{CAFile: c.ca},
	}
	if err := writeKubeconfig(c.kubeconfig, config); err != nil {
		return nil, err
	}
	checks, err := c.options.checks()
	if err != nil {
		return nil, err
	}
	server, err := c.start("apiserver", c.options.strata, append([]string{
		"apiserver",
		"--engine=" + c.options.engine,
		"--etcd-servers=" + etcd,
		"--etcd-compaction-interval=" + c.options.compaction.String(),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		"--endpoint-reconciler-type=none", // which refuses a loopback address
		fmt.Sprintf("--secure-port=%d", port.Number()),
		// where it writes a certificate, with the authority that signed it
		"--cert-dir=" + filepath.Dir(c.ca),
		"--token-auth-file=" + tokens,
		"--authorization-mode=RBAC",
		"--egress-selector-config-file=" + egressConfig,
		// webhooks are called at their pod's address: there is no kube-proxy
		"--enable-aggregator-routing=true",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + c.saKey,
		"--service-account-signing-key-file=" + c.saKey,
		"--service-cluster-ip-range=10.0.0.0/24",
		// without these two a stop waits a minute for watching clients
		"--shutdown-send-retry-after=true",
		"--shutdown-watch-termination-grace-period=1s",
	}, append(checks, c.options.serverArgs...)...)...)
	if err != nil {
		return nil, err
	}
	var client *kubernetes.Clientset
	err = await(ctx, server, func(ctx context.Context) (err error) {
		if client == nil {
			if client, err = kubernetes.NewForConfig(config); err != nil {
				// the certificate is not written yet
				return err
			}
		}
		return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	return client, err
}

// startControllers starts kube-controller-manager and returns when the objects exist that the
// tests' framework reads before it waits for any.
func (c *cluster) startControllers(ctx context.Context, client kubernetes.Interface) error {
	manager, err := c.start("controller-manager", c.options.controllerManager,
		"--kubeconfig="+c.kubeconfig,
		"--controllers="+strings.Join(controllers, ","),
		"--root-ca-file="+c.ca,
		"--leader-elect=false",
		"--use-service-account-credentials=true",
		"--resource-quota-sync-period=10s", // a spec waits for it: 5 minutes by default
		"--service-account-private-key-file="+c.saKey,
		"--secure-port=0") // its metrics are not read
	if err != nil {
		return err
	}
	return await(ctx, manager, func(ctx context.Context) error {
		_, err := client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
		for _, namespace := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem} {
			if err == nil {
				_, err = client.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
			}
			if err == nil {
				_, err = client.CoreV1().ConfigMaps(namespace).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
			}
		}
		return err
	})
}

// stop stops the started processes, last started first.
func (c *cluster) stop() error {
	if c.stopNode != nil {
		c.stopNode()
	}
	var errs []error
	for _, p := range slices.Backward(c.processes) {
		errs = append(errs, p.Stop(syscall.SIGTERM, stopTimeout))
	}
	if c.node != nil {
		c.node.close()
	}
	if c.nodeLog != nil {
		errs = append(errs, c.nodeLog.Close())
	}
	if c.port != nil {
		errs = append(errs, c.port.Release())
	}
	return errors.Join(errs...)
}

func writeKubeconfig(path string, config *rest.Config) error {
	const name = "conformance"
	out := clientcmdapi.NewConfig()
	out.Clusters[name] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthority: config.CAFile}
	out.AuthInfos[name] = &clientcmdapi.AuthInfo{Token: config.BearerToken}
	out.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	out.CurrentContext = name
	return clientcmd.WriteToFile(*out, path)
}

// firstEnd returns a channel that gets the error of the first process of the cluster to end.
func (c *cluster) firstEnd() <-chan error {
	ends := make(chan error, len(c.processes))
	for _, p := range c.processes {
		go func() { <-p.Done(); ends <- p.Ended() }()
	}
	return ends
}

// startTimeout bounds the start of one process; the API server needs about 5 s on two cores.
const startTimeout = 2 * time.Minute

// stopTimeout bounds a stop that has failed: upstream gives requests in flight 60 s.
const stopTimeout = 90 * time.Second

// interruptTimeout is the time that a run of tests has to clean up after an interrupt.
const interruptTimeout = 30 * time.Second
