package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	genericoptions "k8s.io/apiserver/pkg/server/options"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

const overridesFlag = "etcd-servers-overrides"

// overridesUsage replaces upstream's help text, whose flag does not reach custom resources,
// definitions and APIServices.
const overridesUsage = "Per-resource etcd servers overrides, comma separated. The format of an override is group/resource#servers, where servers are URLs, " +
	"semicolon separated, and the resource may be * for all of its group. It applies to any resource, also to custom ones. " +
	`e.g. "/events#http://etcd4:2379,coordination.k8s.io/leases#http://etcd5:2379;http://etcd6:2379"`

// overrides are the etcds of resources that are not in the etcd of --etcd-servers. The zero value
// has none.
type overrides struct {
	clusters []overrideCluster // in the order of the flag
}

// overrideCluster is an etcd with the resources that overrides name. In a resource, the name may be
// serverstorage.AllResources.
type overrideCluster struct {
	servers   []string
	resources []schema.GroupResource
	// separate is false for the etcd of --etcd-servers itself, which an override may name too.
	separate bool
}

// parseOverrides returns the overrides of etcd. Errors name the malformed or contradictory
// override.
func parseOverrides(etcd *genericoptions.EtcdOptions) (o overrides, err error) {
	for _, override := range etcd.EtcdServersOverrides {
		parsed, err := genericoptions.ParseEtcdServersOverrides([]string{override})
		if err != nil || parsed[0].GroupResource.Resource == "" {
			return o, fmt.Errorf("--%s: %q is not group/resource#servers, such as coordination.k8s.io/leases#http://etcd5:2379;http://etcd6:2379 (the group of core resources is empty: /events#...)",
				overridesFlag, override)
		}
		for _, server := range parsed[0].Servers {
			if err := checkServer(server); err != nil {
				return o, fmt.Errorf("--%s: %q: %w", overridesFlag, override, err)
			}
		}
		if err := o.add(canonical(parsed[0].GroupResource), parsed[0].Servers, etcd.StorageConfig.Transport.ServerList); err != nil {
			return o, err
		}
	}
	return o, nil
}

// checkServer returns an error if server is not the URL of an etcd.
func checkServer(server string) error {
	u, err := url.Parse(server)
	switch {
	case err != nil:
	case (u.Scheme == "http" || u.Scheme == "https") && u.Host != "":
		return nil
	case (u.Scheme == "unix" || u.Scheme == "unixs") && u.Host+u.Path != "":
		return nil
	}
	return fmt.Errorf("%q is not the URL of an etcd (http or https with host and port, or unix with a path)", server)
}

func (o *overrides) add(resource schema.GroupResource, servers, fallback []string) error {
	for i := range o.clusters {
		if c := &o.clusters[i]; slices.Contains(c.resources, resource) {
			if sameServers(c.servers, servers) {
				return nil
			}
			return fmt.Errorf("--%s: %s is in two etcds, %s and %s; name one", overridesFlag, resource, strings.Join(c.servers, ";"), strings.Join(servers, ";"))
		}
	}
	for i := range o.clusters {
		if c := &o.clusters[i]; sameServers(c.servers, servers) {
			c.resources = append(c.resources, resource)
			return nil
		}
	}
	c := overrideCluster{servers: servers, resources: []schema.GroupResource{resource}, separate: !sameServers(servers, fallback)}
	if !c.separate {
		c.servers = fallback // with the same order, it is the same cluster of the engine
	}
	o.clusters = append(o.clusters, c)
	return nil
}

// sameServers reports whether two lists have the same servers in any order.
func sameServers(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(slices.Compact(a), slices.Compact(b))
}

// canonical returns one name for the two names of events.
func canonical(resource schema.GroupResource) schema.GroupResource {
	if slices.Contains(eventResources, resource) {
		return eventResources[0]
	}
	return resource
}

// servers returns the etcd of a resource, nil for that of --etcd-servers. An override of the
// resource precedes one of its group.
func (o overrides) servers(resource schema.GroupResource) []string {
	resource = canonical(resource)
	for _, name := range []schema.GroupResource{resource, {Group: resource.Group, Resource: serverstorage.AllResources}} {
		for _, c := range o.clusters {
			if slices.Contains(c.resources, name) {
				return c.servers
			}
		}
	}
	return nil
}

// getter returns inner with the overrides for all resources. Upstream applies them to built-in
// resources of kube-apiserver only.
func (o overrides) getter(inner generic.RESTOptionsGetter) generic.RESTOptionsGetter {
	if len(o.clusters) == 0 {
		return inner
	}
	return overriddenGetter{inner, o}
}

type overriddenGetter struct {
	inner     generic.RESTOptionsGetter
	overrides overrides
}

func (g overriddenGetter) GetRESTOptions(resource schema.GroupResource, example runtime.Object) (generic.RESTOptions, error) {
	opts, err := g.inner.GetRESTOptions(resource, example)
	if err != nil {
		return opts, err
	}
	if servers := g.overrides.servers(resource); servers != nil {
		config := *opts.StorageConfig
		config.Transport.ServerList = servers
		opts.StorageConfig = &config
	}
	return opts, nil
}

// neededAtStart are resources whose etcd has to answer when a server starts, because upstream opens
// storages for them that do not wait: the allocators of service addresses and node ports, and the
// addresses of API servers.
var neededAtStart = []schema.GroupResource{{Resource: "services"}, {Resource: "apiServerIPInfo"}, {Resource: serverstorage.AllResources}}

// deferrable reports whether a server starts without the cluster.
func (c overrideCluster) deferrable() bool {
	return c.separate && !slices.ContainsFunc(c.resources, func(r schema.GroupResource) bool { return slices.Contains(neededAtStart, r) })
}

// deferrable reports whether a server starts without the etcd of t.
func (o overrides) deferrable(t storagebackend.TransportConfig) bool {
	return slices.ContainsFunc(o.clusters, func(c overrideCluster) bool { return c.deferrable() && slices.Equal(c.servers, t.ServerList) })
}

// String returns the resources and endpoints, such as
// "events,leases.coordination.k8s.io@127.0.0.1:2379".
func (c overrideCluster) String() string {
	const most = 5 // resources in the name of a check
	var names, hosts []string
	for _, r := range c.resources {
		names = append(names, r.String())
	}
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d-more", len(names)-most))
	}
	for _, server := range c.servers {
		host := server
		if u, err := url.Parse(server); err == nil {
			host = u.Host + u.Path
		}
		hosts = append(hosts, strings.ReplaceAll(strings.Trim(host, "/"), "/", "_"))
	}
	return strings.Join(names, ",") + "@" + strings.Join(hosts, ",")
}

// warnUnserved logs the overrides that name a resource that the server behind loopback does not
// serve.
func (o overrides) warnUnserved(ctx context.Context, loopback *rest.Config) {
	if len(o.clusters) == 0 {
		return
	}
	client, err := discovery.NewDiscoveryClientForConfig(loopback)
	if err != nil {
		klog.ErrorS(err, "Cannot check the resources of the flag", "flag", overridesFlag)
		return
	}
	_, lists, err := client.ServerGroupsAndResourcesWithContext(ctx)
	if ctx.Err() != nil {
		return
	}
	served := map[schema.GroupResource]bool{}
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			continue
		}
		for _, r := range list.APIResources {
			served[schema.GroupResource{Group: gv.Group, Resource: r.Name}] = true
			served[schema.GroupResource{Group: gv.Group, Resource: serverstorage.AllResources}] = true
		}
	}
	for _, c := range o.clusters {
		for _, r := range c.resources {
			if !served[r] && r != neededAtStart[1] {
				klog.InfoS("Warning: an override of etcd names a resource that no API serves; check the name, unless its definition will be created later",
					"flag", overridesFlag, "resource", r.String(), "servers", c.servers, "err", err)
			}
		}
	}
}

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
