package apiserver

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// Strata runs in place of kube-apiserver, on the same etcd and with the same flags: in a manifest of a control plane only
// the command changes, from kube-apiserver to `strata apiserver`. Its own flags are optional. Here the command runs in the
// process of the example, on an etcd of its own.
func ExampleRun() {
	dir, err := os.MkdirTemp("", "strata-example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ctx, stop := context.WithTimeout(context.Background(), readyTimeout)
	defer stop()
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: filepath.Join(dir, "etcd"), ClientURL: "http://127.0.0.1:0"})
	if err != nil {
		log.Fatal(err)
	}
	defer etcd.Close()
	port, err := loopback.Reserve()
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = port.Release() }()

	// --etcd-servers, --service-account-key-file, --authorization-mode and so on, as kube-apiserver has them.
	flags, err := kubeAPIServerFlags(dir, etcd.Endpoint())
	if err != nil {
		log.Fatal(err)
	}
	ready, stopped := make(chan Info, 1), make(chan error, 1)
	go func() {
		stopped <- Run(ctx, Options{
			Args:    append(flags, fmt.Sprintf("--secure-port=%d", port.Number())),
			OnReady: func(info Info) { ready <- info },
		})
	}()
	select {
	case err := <-stopped:
		log.Fatal(err)
	case info := <-ready:
		client := kubernetes.NewForConfigOrDie(&rest.Config{
			Host: info.URL, BearerToken: adminToken,
			TLSClientConfig: rest.TLSClientConfig{CAFile: filepath.Join(dir, "apiserver.crt")},
		})
		namespace, err := client.CoreV1().Namespaces().Get(ctx, "kube-system", metav1.GetOptions{})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("namespace", namespace.Name)
	}
	stop()
	if err := <-stopped; err != nil {
		log.Fatal(err)
	}
	fmt.Println("stopped")
	// Output:
	// namespace kube-system
	// stopped
}
