package apiserver

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/kube/kubestorage"
)

// Variant is another form of the server of this package, with a command of its own. Its methods are
// called once, in the order in which they are declared, by one goroutine at a time. An error ends
// the start.
type Variant interface {
	// Describe sets the name and the texts of the command.
	Describe(cmd *cobra.Command)
	// AddFlags adds the variant's flags to Strata's own ones.
	AddFlags(own *pflag.FlagSet)
	// Options changes the parsed options before they are completed.
	Options(ctx context.Context, flags *pflag.FlagSet, o *options.ServerRunOptions) error
	// Completed changes the completed options before they are validated.
	Completed(o *options.CompletedOptions) error
	// Engine changes the options of the engine.
	Engine(o *kubestorage.Options)
	// Config changes the configurations of the server chain before the engine is attached to them.
	Config(config *app.Config) error
	// Attached changes the configurations with the engine attached. The outermost handler of the
	// server is then that of config.Aggregator.GenericConfig.BuildHandlerChainFunc. Resources can
	// be asked when the server serves.
	Attached(config *app.Config, engine *kubestorage.Engine, resources *Resources) error
	// Chain receives the chain of servers before it is prepared to run.
	Chain(chain *aggregatorapiserver.APIAggregator) error
	// Start begins work beside the server. stop ends it and returns when it has ended.
	Start(ctx context.Context) (stop func())
}

// NewVariantCommand returns the command of a variant. It serves until the context of the command is
// cancelled.
func NewVariantCommand(v Variant) *cobra.Command {
	s := newSettings()
	s.variant = v
	cmd := s.command(Options{})
	v.Describe(cmd)
	return cmd
}

// plain is the variant of `strata apiserver`, which changes nothing.
type plain struct{}

func (plain) Describe(*cobra.Command)                                                  {}
func (plain) AddFlags(*pflag.FlagSet)                                                  {}
func (plain) Options(context.Context, *pflag.FlagSet, *options.ServerRunOptions) error { return nil }
func (plain) Completed(*options.CompletedOptions) error                                { return nil }
func (plain) Engine(*kubestorage.Options)                                              {}
func (plain) Config(*app.Config) error                                                 { return nil }
func (plain) Attached(*app.Config, *kubestorage.Engine, *Resources) error              { return nil }
func (plain) Chain(*aggregatorapiserver.APIAggregator) error                           { return nil }
func (plain) Start(context.Context) (stop func())                                      { return func() {} }
