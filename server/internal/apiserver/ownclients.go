package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"

	"github.com/stratakube/strata/server/internal/inprocess"
)

// ownClientPatience bounds the wait for the handlers of the server's own requests after the server
// has stopped. They end with their context; the bound is for a handler that does not.
const ownClientPatience = 5 * time.Second

// ownClients sends the requests of the server's own clients to its handler.
type ownClients struct {
	transport *inprocess.Transport
	// connection configures clients that reach the server through its listener.
	connection *rest.Config
}

// newOwnClients makes the clients of config use the handler that serve is called with. Clients that
// admission plugins have got already, and those of the proxy to peers, continue to use connections.
func newOwnClients(config *app.Config) (*ownClients, error) {
	generic := config.KubeAPIs.ControlPlane.Generic
	own := &ownClients{connection: rest.CopyConfig(generic.LoopbackClientConfig)}
	var err error
	if own.transport, err = inprocess.New(own.connection); err != nil {
		return nil, err
	}
	// Upstream creates the client of the shared informers together with their configuration, before
	// wrappers such as that of tracing.
	informing := rest.CopyConfig(own.connection)
	informing.WrapTransport = nil
	informing.UserAgent = rest.DefaultKubernetesUserAgent()
	own.transport.Install(informing)
	client, err := rest.HTTPClientFor(informing)
	if err != nil {
		return nil, fmt.Errorf("client of the server's informers: %w", err)
	}
	if err := setTransport(config.KubeAPIs.ControlPlane.VersionedInformers, client.Transport); err != nil {
		return nil, err
	}
	installed := map[*rest.Config]bool{}
	for _, loopback := range []*rest.Config{generic.LoopbackClientConfig, config.Aggregator.GenericConfig.LoopbackClientConfig,
		config.ApiExtensions.GenericConfig.LoopbackClientConfig} {
		if loopback != nil && !installed[loopback] {
			own.transport.Install(loopback)
			installed[loopback] = true
		}
	}
	return own, nil
}

// setTransport replaces the transport of the client that a factory's informers use. The groups of a
// Clientset share one HTTP client. No informer may have been started.
func setTransport(factory informers.SharedInformerFactory, transport http.RoundTripper) error {
	set, ok := clientOf(factory).(*kubernetes.Clientset)
	if !ok {
		return fmt.Errorf("the shared informers have a client of type %T, want %T", clientOf(factory), set)
	}
	client, ok := set.CoreV1().RESTClient().(*rest.RESTClient)
	if !ok || client.Client == nil {
		return fmt.Errorf("the shared informers have a REST client of type %T, want %T", set.CoreV1().RESTClient(), client)
	}
	client.Client.Transport = transport
	return nil
}

// clientOf returns the client of a factory, which passes it to constructors of informers only. The
// panic keeps it from registering an informer.
func clientOf(factory informers.SharedInformerFactory) (client kubernetes.Interface) {
	type found struct{}
	defer func() {
		if p := recover(); p != nil && p != (found{}) {
			panic(p)
		}
	}()
	factory.InformerFor(&metav1.Status{}, func(c kubernetes.Interface, _ time.Duration) cache.SharedIndexInformer {
		client = c
		panic(found{})
	})
	return client
}

// serve begins to send requests to handler, the complete handler of the server. nil does nothing.
func (o *ownClients) serve(handler http.Handler) {
	if o != nil {
		o.transport.Serve(handler)
	}
}

// stop ends the requests of own clients, which have stopped with the server. nil does nothing.
func (o *ownClients) stop() {
	if o == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), ownClientPatience)
	defer cancel()
	if err := o.transport.Stop(ctx); err != nil {
		klog.ErrorS(err, "Stopped with running requests of the server's own clients")
	}
}
