package apiserver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/spf13/pflag"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	encryptionconfigcontroller "k8s.io/apiserver/pkg/server/options/encryptionconfig/controller"
	"k8s.io/client-go/rest"
	cliflag "k8s.io/component-base/cli/flag"
	basecompatibility "k8s.io/component-base/compatibility"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	componentversion "k8s.io/component-base/version"
	"k8s.io/klog/v2"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/gcpolicy"
)

// run prepares, starts and serves until ctx is cancelled, and stops. When it returns, the port is
// free and the engine closed.
func (s *settings) run(ctx context.Context, flags *pflag.FlagSet, o Options) error {
	defer logs.FlushLogs()
	completed, err := s.prepare(ctx, flags, o.Colocated)
	if err != nil {
		return err
	}
	if stopped, err := s.reachEtcd(ctx, completed); stopped || err != nil {
		return err
	}
	kube := &instance{hooks: s.hooks}
	defer kube.stop()
	if err := kube.start(ctx, s, completed, o.Colocated); err != nil {
		return err
	}
	if !o.Colocated.built(ctx) {
		return nil
	}
	return kube.serve(ctx, o)
}

// prepare validates and applies the settings. Those that are global are the first server's.
func (s *settings) prepare(ctx context.Context, flags *pflag.FlagSet, colocated *Colocated) (completed options.CompletedOptions, err error) {
	for _, err := range []error{s.limits.validate(), s.checks.validate(), s.tokens.validate(s.gates)} {
		if err != nil {
			return completed, cli.Misuse(err)
		}
	}
	first := colocated.first()
	if first {
		if err := s.applyToProcess(); err != nil {
			return completed, cli.Misuse(err)
		}
	}
	cliflag.PrintFlags(flags)

	if s.hooks.Options != nil {
		if err := s.hooks.Options(ctx, flags, s.kube); err != nil {
			return completed, err
		}
	}
	s.sizesOfEvents = namesEvents(s.kube.Etcd.WatchCacheSizes)
	if completed, err = s.kube.Complete(ctx); err != nil {
		return completed, err
	}
	if err := call(s.hooks.Completed, &completed); err != nil {
		return completed, err
	}
	if s.overrides, err = parseOverrides(completed.Etcd); err != nil {
		return completed, cli.Misuse(err)
	}
	if errs := completed.Validate(); len(errs) != 0 {
		return completed, cli.Misuse(utilerrors.NewAggregate(errs))
	}
	memory := memoryLimit
	if first {
		registry := s.kube.GenericServerRunOptions.ComponentGlobalsRegistry
		registry.FeatureGateFor(basecompatibility.DefaultKubeComponent).(featuregate.MutableFeatureGate).AddMetrics()
		registry.AddMetrics()
		memory = followMemoryLimit
	}
	if s.engine == engineStrata {
		s.limits.fit(flags, memory())
	}
	klog.InfoS("Starting", "version", componentversion.Get(), "engine", s.engine,
		"GOGC", os.Getenv("GOGC"), "GOMAXPROCS", os.Getenv("GOMAXPROCS"), "GOMEMLIMIT", os.Getenv("GOMEMLIMIT"))
	return completed, nil
}

// encryptionPollVariable is for tests only: it shortens the interval at which a server with
// --encryption-provider-config-automatic-reload reads the file. Upstream reads it once a minute,
// and exports the interval for tests.
const encryptionPollVariable = "STRATA_TEST_ENCRYPTION_POLL"

// applyToProcess applies the settings that are global: feature gates, logging, and an interval of
// tests.
func (s *settings) applyToProcess() error {
	if text := os.Getenv(encryptionPollVariable); text != "" {
		interval, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%s, a variable of tests: %w", encryptionPollVariable, err)
		}
		encryptionconfigcontroller.EncryptionConfigFileChangePollDuration = interval
	}
	registry := s.kube.GenericServerRunOptions.ComponentGlobalsRegistry
	if err := registry.Set(); err != nil {
		return err
	}
	// the server's own clients would log warnings sent by the server itself
	rest.SetDefaultWarningHandler(rest.NoWarnings{})

	logs.InitLogs()
	return logsapi.ValidateAndApply(s.kube.Logs, registry.FeatureGateFor(basecompatibility.DefaultKubeComponent))
}

// reachEtcd waits for etcd for at most etcdPatience, and reports whether ctx was cancelled
// meanwhile. The engine starts without the etcds of most overrides. It does not wait if there is an
// egress selector, because this process may then be unable to reach etcd directly.
func (s *settings) reachEtcd(ctx context.Context, completed options.CompletedOptions) (stopped bool, err error) {
	if completed.EgressSelector != nil && completed.EgressSelector.ConfigFile != "" {
		return false, nil
	}
	reaching, cancel := context.WithTimeout(ctx, etcdPatience)
	defer cancel()
	required := s.overrides
	if s.engine == engineStrata {
		required.clusters = slices.DeleteFunc(slices.Clone(required.clusters), overrideCluster.deferrable)
	}
	err = awaitEtcd(reaching, completed.Etcd.StorageConfig.Transport, required)
	if ctx.Err() != nil {
		return true, nil
	}
	return false, err
}

// instance is the server chain of kube-apiserver, with the engine attached.
type instance struct {
	listener   net.Listener // nil: none
	attachment *Attachment  // nil until config is set
	hooks      Hooks
	config     *app.Config
	prepared   interface{ Run(context.Context) error }
	hangs      bool // prepared runs on
}

// start builds the chain of servers. It does not listen yet.
func (v *instance) start(ctx context.Context, s *settings, completed options.CompletedOptions, c *Colocated) error {
	resources, err := v.configure(ctx, s, completed, c)
	if err != nil {
		return err
	}
	c.omitSchemas(v.config)
	chain, err := v.build(resources)
	if err != nil {
		return err
	}
	if err := c.installSchemas(chain); err != nil {
		return err
	}
	if v.prepared, err = chain.PrepareRun(); err != nil {
		return err
	}
	if err := v.attachment.serveDocuments(chain); err != nil {
		return err
	}
	return c.keepSchemas(chain)
}

// configure makes the configuration of the chain, and attaches the engine to it. The resources are
// nil without a hook for them.
func (v *instance) configure(ctx context.Context, s *settings, completed options.CompletedOptions, c *Colocated) (*Resources, error) {
	attachment := s.attachment()
	if err := attachment.Options(completed.Etcd); err != nil {
		return nil, err
	}
	if c != nil {
		completed.SecureServing.Listener = c.Listener
	}
	config, informers, err := s.config(completed)
	v.listener = completed.SecureServing.Listener
	if err != nil {
		return nil, listenFailure(err)
	}
	v.attachment, v.config = attachment, config
	if s.engine == engineStrata && c == nil {
		gcpolicy.Start(ctx)
	}
	if len(s.noHosts) > 0 {
		refuseConnections(config, s.noHosts)
	}
	if err := call(s.hooks.Config, config); err != nil {
		return nil, err
	}
	if err := attachment.Chain(config); err != nil {
		return nil, err
	}
	if informers != nil {
		informers.engine = attachment.engine
	}
	if s.hooks.Attached == nil {
		return nil, nil
	}
	resources := &Resources{follow: attachment.follow}
	return resources, s.hooks.Attached(config, attachment.engine, resources)
}

// build makes the servers of the chain, and mounts the read path in front of them.
func (v *instance) build(resources *Resources) (*aggregatorapiserver.APIAggregator, error) {
	complete, err := v.config.Complete()
	if err != nil {
		return nil, err
	}
	chain, err := app.CreateServerChain(complete)
	if err != nil {
		return nil, err
	}
	if resources != nil {
		if err := resources.fill(chain); err != nil {
			return nil, err
		}
	}
	v.attachment.Mount(chain)
	return chain, call(v.hooks.Chain, chain)
}

// upstreamListen matches upstream's error of a listener: the address and the cause.
var upstreamListen = regexp.MustCompile(`^failed to create listener: failed to listen on (\S+): listen \S+ \S+ (?:bind: )?(.*)$`)

// listenFailure returns err, or if a listener has failed, its address, the cause and the next step.
func listenFailure(err error) error {
	if m := upstreamListen.FindStringSubmatch(err.Error()); m != nil {
		return fmt.Errorf("cannot listen on %s: %s; choose another address with --bind-address and --secure-port", m[1], m[2])
	}
	return err
}

// serve loads the cache, then serves until ctx is cancelled. It calls the callbacks of o.
func (v *instance) serve(ctx context.Context, o Options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer cancel() // runs before the wait
	generic := v.config.KubeAPIs.ControlPlane.Generic
	loopback := generic.LoopbackClientConfig
	if serving := generic.SecureServing; serving != nil {
		waiting.Go(func() { logExpired(ctx, serving) })
	}
	if overrides := v.attachment.overrides; len(overrides.clusters) > 0 {
		waiting.Go(func() {
			if waitListening(ctx, loopback) == nil {
				overrides.warnUnserved(ctx, loopback)
			}
		})
	}
	if o.OnReady != nil {
		waiting.Go(func() {
			if waitReady(ctx, loopback) == nil {
				o.OnReady(Info{URL: loopback.Host, Console: v.attachment.engine != nil})
			}
		})
	}
	if engine := v.attachment.engine; engine != nil {
		if o.OnLoad != nil {
			o.OnLoad(engine.LoadState)
		}
		defer logLoad(ctx, engine.LoadState)()
	}
	if v.hooks.Start != nil {
		defer v.hooks.Start(ctx)()
	}
	v.attachment.AwaitMemory(ctx)
	limit := generic.ShutdownDelayDuration + generic.ShutdownWatchTerminationGracePeriod + generic.RequestTimeout + HooksTimeout
	var err error
	v.hangs, err = runBounded(ctx, v.prepared.Run, limit)
	return err
}

// HooksTimeout is the time that a stopping server has beyond that for its requests. Upstream waits
// so long for a reconciler that cannot reach etcd.
const HooksTimeout = 20 * time.Second

// runBounded calls run, and returns an error if run goes on for longer than limit after ctx is
// cancelled: upstream's hooks wait for leases, whose updates have no deadline, for as long as etcd
// does not answer.
func runBounded(ctx context.Context, run func(context.Context) error, limit time.Duration) (hangs bool, err error) {
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	select {
	case err := <-done:
		return false, err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return false, err
	case <-time.After(limit):
		return true, fmt.Errorf("the hooks of a stopping server have not ended within %v: does etcd answer?", limit)
	}
}

// stop closes the engine and the listener. It must be called after serve, which destroys the
// storages; serve closes the listener too. A server that hangs uses both until the process ends.
func (v *instance) stop() {
	if v.hangs {
		return
	}
	if v.attachment != nil {
		v.attachment.Close()
	}
	if v.listener != nil {
		v.listener.Close()
	}
}

// waitReady polls /readyz, as the server's own privileged client, until the response is 200 or ctx
// is cancelled.
func waitReady(ctx context.Context, loopback *rest.Config) error {
	return poll(ctx, loopback, "/readyz")
}

// waitListening is waitReady without the state of the etcds of overrides.
func waitListening(ctx context.Context, loopback *rest.Config) error {
	return poll(ctx, loopback, "/readyz?exclude="+overrideGroup)
}

// poll requests path until the response is 200 or ctx is cancelled.
func poll(ctx context.Context, loopback *rest.Config, path string) error {
	client, err := rest.HTTPClientFor(loopback)
	if err != nil {
		return fmt.Errorf("client for %s: %w", path, err)
	}
	defer utilnet.CloseIdleConnectionsFor(client.Transport)
	const interval = 10 * time.Millisecond // a guess: small compared to a startup
	return wait.PollUntilContextCancel(ctx, interval, true, func(ctx context.Context) (bool, error) {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, loopback.Host+path, nil)
		if err != nil {
			return false, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return false, nil // not listening yet
		}
		resp.Body.Close()
		return resp.StatusCode == http.StatusOK, nil
	})
}

// logLoad logs the progress of the load of memory while it takes long, and then that of the restore
// of history. stop ends it early.
func logLoad(ctx context.Context, state func(context.Context) kubestorage.LoadState) (stop func()) {
	return statusline.Every(func(elapsed time.Duration) bool {
		s := state(ctx)
		switch {
		case s.Loading:
			keysAndValues := []any{"resource", s.Resource, "objects", s.Objects, "took", elapsed.Round(time.Millisecond)}
			if s.Total > 0 {
				keysAndValues = append(keysAndValues, "of", s.Total)
			}
			klog.InfoS("Loading memory from etcd", keysAndValues...)
		case s.Restoring:
			klog.InfoS("Restoring history from etcd; objects are served", "events", s.Changes, "took", elapsed.Round(time.Millisecond))
		}
		return s.Loading || s.Restoring
	})
}
