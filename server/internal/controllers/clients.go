package controllers

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"time"

	"golang.org/x/net/http2"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/controller-manager/pkg/clientbuilder"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/server/internal/component"
)

// program is the name of the program in the user agents of its controllers, and thereby their field
// manager.
const program = "kube-controller-manager"

// discoveryQPS and discoveryBurst are upstream's limits for discovery by a controller: many
// requests, infrequently.
const (
	discoveryQPS   = 20
	discoveryBurst = 200
)

// A server that ends breaks the requests for a controller's service account. They are repeated
// after configPause, until the controllers are stopped, and for configPatience at most: longer than
// a balancer needs to find another server, or a server to restart.
const (
	configPause    = 100 * time.Millisecond
	configPatience = 15 * time.Second
)

// clients makes the clients of controllers as upstream's builders do, with the user agent of
// upstream's program: they have that of the process.
type clients struct {
	running context.Context // of the controllers; clientbuilder.ControllerClientBuilder passes none
	builder interface {
		Config(name string) (*rest.Config, error)
	}
}

// newClients returns the builder of the program's own clients, and that of controllers, each of
// which has its service account. ctx is that of the controllers.
func newClients(ctx context.Context, config *rest.Config) (root, each clientbuilder.ControllerClientBuilder, err error) {
	root = clients{ctx, clientbuilder.SimpleControllerClientBuilder{ClientConfig: config}}
	core, err := root.Client(program)
	if err != nil {
		return nil, nil, err
	}
	each = clients{ctx, clientbuilder.NewDynamicClientBuilder(rest.AnonymousClientConfig(config), core.CoreV1(), metav1.NamespaceSystem)}
	return root, each, nil
}

// Config implements clientbuilder.ControllerClientBuilder. It repeats requests that a server has
// not answered: an error would end all controllers. A request in progress when the controllers are
// stopped is the last one.
func (c clients) Config(name string) (config *rest.Config, err error) {
	ctx, cancel := context.WithTimeout(c.running, configPatience)
	defer cancel()
	_ = wait.PollUntilContextCancel(ctx, configPause, true, func(context.Context) (bool, error) {
		// err has the last error
		config, err = c.builder.Config(name)
		return !unanswered(err), nil
	})
	if err != nil {
		return nil, err
	}
	config.UserAgent = component.UserAgent(program, config.UserAgent)
	return config, nil
}

// unanswered reports whether err is that of a connection or a response that broke off, or of a
// server that cannot answer now. client-go returns an error in the body of a response without a
// *url.Error.
func unanswered(err error) bool {
	if err == nil {
		return false
	}
	_, connection := errors.AsType[*url.Error](err)
	_, stream := errors.AsType[http2.StreamError](err)
	return connection || stream || errors.Is(err, io.ErrUnexpectedEOF) || utilnet.IsProbableEOF(err) || utilnet.IsConnectionReset(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err)
}

// Client implements clientbuilder.ControllerClientBuilder.
func (c clients) Client(name string) (kubernetes.Interface, error) {
	config, err := c.Config(name)
	if err != nil {
		return nil, err
	}
	return kubernetes.NewForConfig(config)
}

// DiscoveryClient implements clientbuilder.ControllerClientBuilder.
func (c clients) DiscoveryClient(name string) (discovery.DiscoveryInterface, error) {
	config, err := c.Config(name)
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = discoveryQPS, discoveryBurst
	return kubernetes.NewForConfig(config)
}

// ConfigOrDie implements clientbuilder.ControllerClientBuilder. As upstream's builders do, it ends
// the process after an error, unless the controllers are being stopped: then requests with the
// configuration return the error.
func (c clients) ConfigOrDie(name string) *rest.Config {
	config, err := c.Config(name)
	switch {
	case err == nil:
		return config
	case c.running.Err() != nil:
		return &rest.Config{Transport: refusing{err}}
	}
	klog.Fatal(err)
	return nil
}

// ClientOrDie implements clientbuilder.ControllerClientBuilder, as ConfigOrDie does.
func (c clients) ClientOrDie(name string) kubernetes.Interface {
	return kubernetes.NewForConfigOrDie(c.ConfigOrDie(name))
}

// DiscoveryClientOrDie implements clientbuilder.ControllerClientBuilder, as ConfigOrDie does.
func (c clients) DiscoveryClientOrDie(name string) discovery.DiscoveryInterface {
	config := c.ConfigOrDie(name)
	config.QPS, config.Burst = discoveryQPS, discoveryBurst
	return kubernetes.NewForConfigOrDie(config)
}

// refusing is an http.RoundTripper whose requests fail.
type refusing struct{ err error }

// RoundTrip implements http.RoundTripper.
func (r refusing) RoundTrip(*http.Request) (*http.Response, error) { return nil, r.err }
