// Command apiserver is an API server of one resource, the pods of the group
// example.apiserver.k8s.io from the tests of k8s.io/apiserver, on Strata's engine. It differs in
// one statement from any other server that is built on k8s.io/apiserver: the call of
// readpath.Attach in newServer, beside the close of the engine that it returns.
//
//	apiserver --etcd-servers=http://127.0.0.1:2379 --secure-port=8443
//	curl -k https://127.0.0.1:8443/apis/example.apiserver.k8s.io/v1/pods
//
// With --kubeconfig it is an aggregated API server: it delegates authentication and authorization
// to the API server of that kubeconfig, for which an APIService forwards requests. Without it,
// every request is allowed. It listens on loopback only.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"

	utilerrors "k8s.io/apimachinery/pkg/util/errors"
)

func main() {
	etcd := flag.String("etcd-servers", "http://127.0.0.1:2379", "comma-separated etcd endpoints")
	port := flag.Int("secure-port", 8443, "port on 127.0.0.1 to serve HTTPS on")
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig of the API server that authenticates and authorizes requests; without it, all are allowed")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := listenAndRun(ctx, strings.Split(*etcd, ","), *port, *kubeconfig); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func listenAndRun(ctx context.Context, etcd []string, port int, kubeconfig string) error {
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	return run(ctx, etcd, listener, kubeconfig)
}

// run serves until ctx is cancelled. It closes the listener.
func run(ctx context.Context, etcd []string, listener net.Listener, kubeconfig string) error {
	server, err := newServer(etcd, listener, kubeconfig)
	if err != nil {
		return utilerrors.NewAggregate([]error{err, listener.Close()})
	}
	defer server.engine.Close() // after the storages, which the server destroys
	return server.PrepareRun().RunWithContext(ctx)
}
