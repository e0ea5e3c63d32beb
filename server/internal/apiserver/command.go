// Package apiserver assembles kube-apiserver with the engine as its storage.
//
// The server is upstream's: options, admission, authentication, the chain of aggregator, kube and
// extension servers. Only the storage of reads differs. Before the configuration is completed,
// every generic.RESTOptionsGetter in it is wrapped (attach.go), so that each built-in or custom
// resource gets a storage.Interface of the engine. The byte read path is installed in front of the
// aggregator's handlers (readpath.go), and is configured with the kinds and informers of upstream's
// servers.
//
//	flags ─▶ options ─▶ Complete, Validate ─▶ app.NewConfig ─▶ engine wraps the getters ─▶ read path ─▶ Complete
//	      ─▶ app.CreateServerChain ─▶ PrepareRun ─▶ Run ─▶ (shut down: watches drain) ─▶ engine closes
package apiserver

import (
	"context"
	"io"
	"maps"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/server/flagz"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/cli/globalflag"
	"k8s.io/component-base/logs"
	"k8s.io/component-base/version/verflag"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/console"

	// sets the version in Kubernetes' packages
	_ "github.com/stratakube/strata/server/internal/version"
	// --logging-format=json, as in kube-apiserver's main package
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics rest_client_*, as there
	// metric kubernetes_build_info, as there
	_ "k8s.io/component-base/metrics/prometheus/version"
	// time zones of CronJobs where the image has no zone files, as there
	_ "time/tzdata"
)

// Options configures Run.
type Options struct {
	// Args are the flags of kube-apiserver and of this package, as on the command line of `strata
	// apiserver`.
	Args []string
	// Out receives the output of --help and --version; nil discards it. Logs are configured by the
	// logging flags.
	Out io.Writer
	// OnReady is called once, on a separate goroutine, when /readyz succeeds for the first time. It
	// may be nil. Run returns only after OnReady has returned.
	OnReady func(Info)
	// OnLoad is called once, when memory begins to be loaded from etcd, with a function that
	// returns the state and may be called until Run returns. It may be nil, and is not called with
	// upstream's engine.
	OnLoad func(state func(context.Context) kubestorage.LoadState)
	// Colocated is set for one of several servers of this process, and nil for the only one.
	Colocated *Colocated
	// Sessions, if not nil, open the console to browsers on this machine. They have no effect with
	// --engine=upstream.
	Sessions *console.Sessions
}

// Info describes a ready server.
type Info struct {
	// URL has the scheme, an address that is reachable from this host, and the bound port:
	// https://127.0.0.1:6443.
	URL string
	// Console reports whether the server has the console.
	Console bool
}

// Run serves until ctx is cancelled, then shuts down in upstream's order (drain, stop, release the
// storage) and returns nil. An error means that the server failed to start, or stopped before ctx
// was cancelled.
//
// Feature gates, logging and metrics of k8s.io packages are global: call Run at most once per
// process, or with Colocated.
func Run(ctx context.Context, o Options) error {
	defer o.Colocated.begin()()
	cmd := newCommand(o)
	cmd.SetArgs(append([]string{}, o.Args...)) // never nil: cobra would read os.Args
	out := o.Out
	if out == nil {
		out = io.Discard
	}
	cmd.SetOut(out)
	cmd.SetErr(out)
	return cmd.ExecuteContext(ctx)
}

// NewCommand returns `strata apiserver`. It serves until the context of the command is cancelled.
func NewCommand() *cobra.Command { return newCommand(Options{}) }

// settings are the values of the flags of one command.
type settings struct {
	kube   *options.ServerRunOptions
	engine engineKind
	gates  gateSet
	limits engineLimits
	checks checkSettings
	tokens tokenSettings

	hooks Hooks

	overrides     overrides // set by prepare
	sizesOfEvents bool      // --watch-cache-sizes contains events

	// noHosts are addresses of simulated nodes and pods, and of services without a proxy. The
	// server makes no connection to one of them, as kubelet, pod, webhook or aggregated API: the
	// request fails at once.
	noHosts []netip.Prefix

	sessions *console.Sessions // of the console; nil if there are none
}

// newSettings returns the defaults.
func newSettings() *settings {
	return &settings{kube: options.NewServerRunOptions(), engine: engineStrata, gates: newGates(),
		limits: defaultEngineLimits(), checks: defaultCheckSettings(), tokens: defaultTokenSettings()}
}

// newCommand returns the command with the callbacks of o.
func newCommand(o Options) *cobra.Command {
	s := newSettings()
	s.sessions = o.Sessions
	return s.command(o)
}

// command returns the command with the callbacks of o.
func (s *settings) command(o Options) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "apiserver",
		Short: "Serve the Kubernetes API from an existing etcd",
		Long: `Serve the Kubernetes API from an existing etcd: a drop-in for kube-apiserver.

All flags of kube-apiserver work and mean the same; the data in etcd is the same, so
that either server can take over from the other. Reads and watches are answered from
memory by Strata's engine. --engine=upstream runs this program with the cache that
Kubernetes ships: to compare the two, and as the way back.

Strata's own flags are optional and come first below. The available memory, which
some of their defaults follow, is GOMEMLIMIT, the limit of the control group, or the
memory of the machine, whichever is least. kube-apiserver's flags are after them.`,
		Example: `  {program} apiserver --etcd-servers=http://127.0.0.1:2379 \
    --service-account-issuer=https://kubernetes.default.svc \
    --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key \
    --authorization-mode=RBAC --client-ca-file=ca.crt`,
		SilenceUsage:  true, // also without main, in strata up
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.Misusef("%s takes flags only, got %q", cmd.CommandPath(), args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			verflag.PrintAndExitIfRequested()
			return s.run(cmd.Context(), cmd.Flags(), o)
		},
	}
	cmd.SetGlobalNormalizationFunc(cliflag.WordSepNormalizeFunc)

	sets := s.kube.Flags()
	verflag.AddFlags(sets.FlagSet("global"))
	globalflag.AddGlobalFlags(sets.FlagSet("global"), cmd.Name(), logs.SkipLoggingConfigurationFlags())
	for _, fs := range sets.FlagSets {
		cmd.Flags().AddFlagSet(fs)
	}
	cmd.Flags().Lookup(overridesFlag).Usage = overridesUsage
	cli.SetHelp(cmd, sets)
	withOwn := cliflag.NamedFlagSets{Order: slices.Concat([]string{"strata"}, sets.Order), FlagSets: maps.Clone(sets.FlagSets)}
	withOwn.FlagSets["strata"] = s.ownFlags()
	cmd.Flags().AddFlagSet(withOwn.FlagSets["strata"])
	s.kube.Flagz = flagz.NamedFlagSetsReader{FlagSets: withOwn}
	return cmd
}

// ownFlags returns Strata's own flags, which come first in --help.
func (s *settings) ownFlags() *pflag.FlagSet {
	own := pflag.NewFlagSet("strata", pflag.ContinueOnError)
	own.SetNormalizeFunc(cliflag.WordSepNormalizeFunc)
	own.Var(&s.engine, "engine", "Cache that serves reads and watches: strata, or upstream (that of kube-apiserver).")
	own.Var(s.gates, "strata-feature-gates", gatesUsage(s.gates))
	s.limits.addFlags(own)
	s.checks.addFlags(own)
	s.tokens.addFlags(own)
	if s.hooks.AddFlags != nil {
		s.hooks.AddFlags(own)
	}
	own.Func(NoHostsFlag, "Set by strata up: addresses that no host has.", func(prefix string) error {
		p, err := netip.ParsePrefix(prefix)
		s.noHosts = append(s.noHosts, p)
		return err
	})
	utilruntime.Must(own.MarkHidden(NoHostsFlag))
	cli.ShortenDurations(own)
	return own
}
