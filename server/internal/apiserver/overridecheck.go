package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"path"
	"regexp"
	"slices"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/storage/storagebackend"
)

// overrideGroup is the group of the checks of all overrides, for /readyz?exclude=.
const overrideGroup = "etcd-overrides"

// overrideCheck is the check of the etcd of an override in /readyz and /healthz. Its name has the
// resources and the endpoints. Upstream's checks of overrides have numbers, and block for 20 s at a
// time while an etcd is down that has never answered.
type overrideCheck struct {
	name    string
	key     string
	timeout time.Duration
	client  *clientv3.Client

	mu      sync.Mutex // held during a probe, so that concurrent requests share one
	checked time.Time
	err     error // of the last probe
}

// shareProbe is the age up to which the result of a probe answers further requests.
const shareProbe = time.Second

func (c *overrideCheck) Name() string      { return c.name }
func (c *overrideCheck) GroupName() string { return overrideGroup }

// Check reads a key from etcd, for at most the time of --etcd-healthcheck-timeout.
func (c *overrideCheck) Check(*http.Request) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.checked.IsZero() && time.Since(c.checked) < shareProbe {
		return c.err
	}
	ctx, cancel := context.WithTimeout(context.Background(), c.timeout)
	defer cancel()
	if _, c.err = c.client.Get(ctx, c.key); c.err != nil {
		c.err = fmt.Errorf("etcd does not answer: %w", c.err)
	}
	c.checked = time.Now()
	return c.err
}

// upstreamCheck matches the names of upstream's checks of overrides.
var upstreamCheck = regexp.MustCompile(`^etcd-override-(readiness-)?\d+$`)

// installChecks replaces upstream's checks of the etcds of overrides in the configurations of a
// chain. They are not in /livez: a restart of the server repairs none of its etcds, and interrupts
// the resources of the others. The checks end when stopped is closed.
func (o overrides) installChecks(etcd storagebackend.Config, stopped <-chan struct{}, configs ...*genericapiserver.Config) error {
	for _, config := range configs {
		for _, checks := range []*[]healthz.HealthChecker{&config.HealthzChecks, &config.ReadyzChecks, &config.LivezChecks} {
			*checks = slices.DeleteFunc(slices.Clone(*checks), func(c healthz.HealthChecker) bool { return upstreamCheck.MatchString(c.Name()) })
		}
	}
	for i, cluster := range o.clusters {
		t := etcd.Transport
		t.ServerList = cluster.servers
		client, err := lazyClient(t)
		if err != nil {
			return err
		}
		check := &overrideCheck{name: fmt.Sprintf("etcd-override-%d:%s", i, cluster), key: path.Join("/", etcd.Prefix, "health"), client: client,
			timeout: cmp.Or(etcd.HealthcheckTimeout, storagebackend.DefaultHealthcheckTimeout)}
		go func() { // as long as the server
			<-stopped
			_ = client.Close()
		}()
		for _, config := range configs {
			config.AddHealthzChecks(check)
			config.AddReadyzChecks(check)
		}
	}
	return nil
}

// lazyClient returns a client that connects when it is used.
func lazyClient(t storagebackend.TransportConfig) (*clientv3.Client, error) {
	tlsConfig, err := EtcdTLS(t)
	if err != nil {
		return nil, err
	}
	return clientv3.New(clientv3.Config{Endpoints: t.ServerList, TLS: tlsConfig, Logger: zap.NewNop(), DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 10 * time.Second})
}
