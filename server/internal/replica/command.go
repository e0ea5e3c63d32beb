// Package replica assembles `strata replica`: the engine and the read path of `strata apiserver`,
// in front of API servers that write.
//
// A replica is package apiserver with hooks: the same chain of servers, without admission,
// without OpenAPI documents, without hooks that write (hooks.go), and with an engine that only
// reads. In front of the chain, a dispatcher (dispatch.go) sends every request that memory does not
// answer to the primaries, with the user of the request (proxy.go, primary.go). Discovery, OpenAPI
// documents and the version are the primaries', cached (documents.go).
//
//	request ─▶ dispatcher ─┬▶ read of a stored resource ─▶ chain of kube-apiserver ─▶ memory
//	                       ├▶ discovery, OpenAPI, version ─▶ the same chain ─▶ documents ─▶ primary
//	                       └▶ everything else ─▶ authentication ─▶ primary
package replica

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	genericfeatures "k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/reconcilers"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	basecompatibility "k8s.io/component-base/compatibility"
	"k8s.io/component-base/featuregate"
	"k8s.io/klog/v2"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/cli"
)

// NewCommand returns `strata replica`. It serves until the context of the command is cancelled.
func NewCommand() *cobra.Command {
	s := &server{}
	cmd := apiserver.NewCommandWithHooks(s.hooks())
	describe(cmd)
	return cmd
}

// Flags of `strata replica` in addition to those of `strata apiserver`.
const (
	flagPrimary       = "primary"
	flagPrimaryCAFile = "primary-ca-file"
	flagDelegateAuth  = "delegate-auth"
	flagAlwaysAllow   = "insecure-always-allow"
	flagReadFrom      = "read-from"
	flagFeedAddress   = "feed-bind-address"
	flagFeedCAFile    = "feed-client-ca-file"
)

// server is the state of a replica, whose methods are its hooks.
type server struct {
	primaryURLs   []string
	primaryCAFile string
	delegateAuth  bool
	alwaysAllow   bool
	readFrom      string

	options   options.CompletedOptions
	identity  *identity
	roots     dynamiccertificates.CAContentProvider // nil: the system's
	primaries *pool
	reviews   *reviews // nil without --delegate-auth
	documents *documents
	engine    *kubestorage.Engine
	lagCheck  lagCheck
	feed      feedServer
}

func (s *server) hooks() apiserver.Hooks {
	return apiserver.Hooks{AddFlags: s.addFlags, Options: s.setOptions, Completed: s.completed, Engine: s.setEngine, Config: s.config,
		Attached: s.attached, Chain: s.chain, Start: s.start}
}

// describe sets the name and the texts of the command.
func describe(cmd *cobra.Command) {
	cmd.Use = "replica"
	cmd.Short = "Serve reads of a cluster from memory, and pass everything else to its API servers"
	cmd.Long = `Serve GET, LIST and WATCH of all resources from memory, fed by etcd, and pass every
other request to the API servers of --primary with the identity of its user.

A replica writes nothing to etcd. It takes the flags of strata apiserver and of
kube-apiserver, so that it authenticates and authorizes as the API servers do, and a
client certificate that the API servers accept from a front proxy
(--proxy-client-cert-file). Flags for writing, such as those of admission, have no
effect.`
	cmd.Example = `  {program} replica --etcd-servers=https://10.0.0.11:2379 --etcd-cafile=etcd-ca.crt \
    --etcd-certfile=etcd-client.crt --etcd-keyfile=etcd-client.key \
    --primary=https://10.0.0.11:6443,https://10.0.0.12:6443 --primary-ca-file=ca.crt \
    --proxy-client-cert-file=front-proxy-client.crt \
    --proxy-client-key-file=front-proxy-client.key \
    --client-ca-file=ca.crt --authorization-mode=Node,RBAC \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=sa.pub`
}

// addFlags adds the flags of a replica.
func (s *server) addFlags(own *pflag.FlagSet) {
	own.StringSliceVar(&s.primaryURLs, flagPrimary, nil, "Comma-separated URLs, https://host:port, of the API servers that answer all requests except reads. Required.")
	own.StringVar(&s.primaryCAFile, flagPrimaryCAFile, "", "File with the certificate authorities of --primary, by default the system's; reloaded within a minute.")
	own.BoolVar(&s.delegateAuth, flagDelegateAuth, false, "Let the API servers of --primary authenticate tokens and authorize reads (TokenReview, SubjectAccessReview); flags of authorization and of service accounts must not be set.")
	own.BoolVar(&s.alwaysAllow, flagAlwaysAllow, false, "Accept the authorizer AlwaysAllow, with which every authenticated user can read everything, Secrets included.")
	own.StringVar(&s.readFrom, flagReadFrom, "", "URL of the one member of etcd to read from, in place of --etcd-servers; it must vote.")
	own.StringVar(&s.feed.address, flagFeedAddress, "", "host:port at which other replicas can read in place of etcd. Requires --feed-client-ca-file.")
	own.StringVar(&s.feed.clientCAFile, flagFeedCAFile, "", "File with the certificate authorities of the clients of --feed-bind-address, which can read all stored values, Secrets included; reloaded within a minute.")
}

// setOptions validates the flags, and changes those of the server for one that writes nothing.
func (s *server) setOptions(ctx context.Context, flags *pflag.FlagSet, o *options.ServerRunOptions) error {
	if f := flags.Lookup("engine"); f != nil && f.Value.String() != "strata" {
		return cli.Misusef("--engine=%s: a replica serves from memory of the engine strata; leave the flag out", f.Value)
	}
	urls, err := s.parsePrimaries()
	if err != nil {
		return cli.Misuse(err)
	}
	if o.ProxyClientCertFile == "" || o.ProxyClientKeyFile == "" {
		return cli.Misusef("--proxy-client-cert-file and --proxy-client-key-file are required: with this certificate a replica tells the API servers of --primary the user of a request")
	}
	if s.identity, err = newIdentity(o.ProxyClientCertFile, o.ProxyClientKeyFile); err != nil {
		return err
	}
	var roots func() *x509.CertPool
	if s.primaryCAFile != "" {
		if s.roots, err = dynamiccertificates.NewDynamicCAContentFromFile("replica-primary-ca", s.primaryCAFile); err != nil {
			return fmt.Errorf("read the authorities of the primaries: %w; check --primary-ca-file", err)
		}
		roots = rootsOf(s.roots)
	}
	s.primaries = newPool(urls, roots, s.identity)
	if s.delegateAuth {
		for _, name := range []string{"authorization-mode", "authorization-config", "authentication-config", "token-auth-file", "service-account-key-file",
			"service-account-signing-key-file", "service-account-issuer", "oidc-issuer-url", "enable-bootstrap-token-auth"} {
			if flags.Changed(name) {
				return cli.Misusef("--%s and --delegate-auth exclude each other: with the latter the API servers of --primary decide", name)
			}
		}
		withoutKeys(o)
		if s.reviews, err = newReviews(s.primaries); err != nil {
			return err
		}
		s.reviews.anonymous = o.Authentication.Anonymous.Allow
	}
	if err := checkAuthorization(o.Authorization, s.alwaysAllow); err != nil {
		return err
	}
	if s.readFrom != "" {
		if u, err := url.Parse(s.readFrom); err != nil || u.Host == "" || strings.Contains(s.readFrom, ",") {
			return cli.Misusef("--read-from %q: must be the URL of one member of etcd, such as https://10.0.0.11:2379", s.readFrom)
		}
		o.Etcd.StorageConfig.Transport.ServerList = []string{s.readFrom}
	}
	if unset := unsetClaimFlags(o.Authentication.RequestHeader); len(unset) > 0 {
		klog.Warningf("Flags %s are not set, so that of the headers of clients only X-Remote-* are removed; set them as on the API servers of --primary, which trust those headers", strings.Join(unset, ", "))
	}
	if err := readOnlyOptions(o); err != nil {
		return err
	}
	return s.feed.options(o)
}

// readOnlyOptions turns off what servers that write do for a cluster.
func readOnlyOptions(o *options.ServerRunOptions) error {
	o.Etcd.StorageConfig.CompactionInterval = 0
	o.EndpointReconcilerType = "none"
	// A replica has primaries in place of peers. With the gate, upstream makes a client of etcd for
	// the leases of peers, and deletes the lease of this server when it stops.
	o.PeerCAFile, o.PeerAdvertiseAddress = "", reconcilers.PeerAdvertiseAddress{}
	gates := o.GenericServerRunOptions.ComponentGlobalsRegistry.FeatureGateFor(basecompatibility.DefaultKubeComponent).(featuregate.MutableFeatureGate)
	return gates.SetFromMap(map[string]bool{string(genericfeatures.UnknownVersionInteroperabilityProxy): false})
}

// parsePrimaries returns the URLs of --primary.
func (s *server) parsePrimaries() ([]*url.URL, error) {
	if len(s.primaryURLs) == 0 {
		return nil, errors.New("--primary is required: the URLs of the API servers that answer all requests except reads")
	}
	var urls []*url.URL
	for _, text := range s.primaryURLs {
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "https" || u.Hostname() == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.User != nil {
			return nil, fmt.Errorf("--primary %q: must be https://host:port", text)
		}
		urls = append(urls, u)
	}
	return urls, nil
}

// completed removes from the completed options what a replica does not need.
func (s *server) completed(o *options.CompletedOptions) error {
	o.Admission = nil // nothing is admitted here; saves its plugins and their informers
	if o.ServiceAccountIssuer == nil {
		o.ServiceAccountIssuer = noTokens{}
	}
	s.options = *o
	return nil
}

// setEngine makes the engine one that writes nothing and feeds other replicas.
func (s *server) setEngine(o *kubestorage.Options) { o.ReadOnly, o.FeedServer = true, s.feed.server }

// config disables what writes or needs admission.
func (s *server) config(config *app.Config) error {
	if err := checkMember(s.options.Etcd.StorageConfig.Transport); err != nil {
		return err
	}
	if serving := config.Aggregator.GenericConfig.SecureServing; serving != nil {
		if err := s.feed.listen(serving.Cert); err != nil {
			return err
		}
	}
	disableHooks(config)
	omitDocuments(config)
	if s.reviews != nil {
		return s.reviews.install(config, s.options)
	}
	return nil
}

// attached puts the dispatcher between local reads and requests to the primaries in front.
func (s *server) attached(config *app.Config, engine *kubestorage.Engine, resources *apiserver.Resources) error {
	s.engine = engine
	computed.engine.Store(engine)
	outermost := &config.Aggregator.GenericConfig.Config
	// this server answers preflight requests
	withoutOrigin := len(outermost.CorsAllowedOriginList) > 0
	claims := newClaims(s.options.Authentication.RequestHeader)
	s.documents = newDocuments(s.primaries, claims, outermost.Serializer, withoutOrigin)
	resources.OnDefinitions(s.documents.changed)
	build := outermost.BuildHandlerChainFunc
	outermost.BuildHandlerChainFunc = func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		d := &dispatcher{resolver: c.RequestInfoResolver, resources: resources, codecs: c.Serializer, local: build(s.documents.handler(apiHandler), c),
			proxied: proxyChain(newProxy(s.primaries, claims, c.Serializer, withoutOrigin), c)}
		if c.LoopbackClientConfig != nil {
			d.ownToken = c.LoopbackClientConfig.BearerToken
		}
		return d
	}
	return nil
}

// chain adds the checks of a replica to /readyz.
func (s *server) chain(chain *aggregatorapiserver.APIAggregator) error {
	if err := checkHooks(chain.GenericAPIServer); err != nil {
		return err
	}
	return chain.GenericAPIServer.AddReadyzChecks(
		healthz.NamedCheck("replica-lag", func(*http.Request) error { return s.lagCheck.report(tooFarBehind(s.engine.Lags())) }),
		healthz.NamedCheck("replica-identity", func(*http.Request) error { return s.primaries.refusal() }))
}

// maxLag is the time for which memory may be behind etcd before the replica is not ready. It
// exceeds the restart of a silent feed on another member (1.5 s), and a relist of a large cluster.
const maxLag = 5 * time.Second

// lagCheck logs changes of the result of a check, whose reason upstream's /readyz does not show.
type lagCheck struct{ failing atomic.Bool }

func (c *lagCheck) report(err error) error {
	switch failing := err != nil; {
	case failing == c.failing.Swap(failing):
	case failing:
		klog.InfoS("Memory is behind etcd; this replica is not ready", "err", err.Error())
	default:
		klog.InfoS("Memory is level with etcd again; this replica is ready")
	}
	return err
}

// tooFarBehind returns an error that names the etcd clusters behind which memory has been for
// longer than maxLag.
func tooFarBehind(lags []kubestorage.Lag) error {
	var all []error
	for _, lag := range lags {
		if lag.Behind > maxLag {
			all = append(all, fmt.Errorf("memory has been behind etcd at %s for %s (revision %d of %d, bound %s)", lag.Endpoints, lag.Behind.Round(time.Second),
				lag.Published, lag.Etcd, maxLag))
		}
	}
	return errors.Join(all...)
}

// start starts the connections to the primaries, and the feed of other replicas.
func (s *server) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	work.Go(func() { s.primaries.Run(ctx) })
	work.Go(func() { s.identity.Run(ctx, 1) })
	work.Go(func() { s.feed.run(ctx) })
	if runner, ok := s.roots.(dynamiccertificates.ControllerRunner); ok {
		work.Go(func() { runner.Run(ctx, 1) })
	}
	if s.reviews != nil {
		work.Go(func() { s.reviews.Run(ctx) })
	}
	klog.InfoS("Serving reads from memory; other requests go to the primaries", "primaries", s.primaryURLs, "delegateAuth", s.delegateAuth)
	return func() {
		cancel()
		work.Wait()
	}
}

// statusTimeout bounds the request for the status of a member; members answer within milliseconds.
const statusTimeout = 5 * time.Second

// checkMember returns an error if the only server of the list is a learner, which refuses watches
// and linearizable reads. With several servers etcd's client avoids learners, and nothing is
// checked. A member that does not tell its status is accepted, and so is one behind an egress
// selector.
func checkMember(t storagebackend.TransportConfig) error {
	if len(t.ServerList) != 1 || t.EgressLookup != nil {
		return nil
	}
	endpoint := t.ServerList[0]
	tlsConfig, err := apiserver.EtcdTLS(t)
	if err != nil {
		return err
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: t.ServerList, TLS: tlsConfig, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(context.Background(), statusTimeout)
	defer cancel()
	status, err := client.Status(ctx, endpoint)
	if err == nil && status.IsLearner || err != nil && strings.Contains(err.Error(), rpctypes.ErrorDesc(rpctypes.ErrGRPCNotSupportedForLearner)) {
		return fmt.Errorf("etcd at %s is a learner, which refuses watches and linearizable reads: promote it (etcdctl member promote ID), "+
			"or name a member that votes with --read-from or --etcd-servers", endpoint)
	}
	return nil
}
