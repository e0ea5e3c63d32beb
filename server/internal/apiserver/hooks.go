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

// Hooks make another command of the server of this package. Each may be nil. They are called once,
// in the order in which they are declared, by one goroutine at a time. An error ends the start.
type Hooks struct {
	// AddFlags adds flags to Strata's own ones.
	AddFlags func(own *pflag.FlagSet)
	// Options changes the parsed options before they are completed.
	Options func(ctx context.Context, flags *pflag.FlagSet, o *options.ServerRunOptions) error
	// Completed changes the completed options before they are validated.
	Completed func(o *options.CompletedOptions) error
	// Engine changes the options of the engine.
	Engine func(o *kubestorage.Options)
	// Config changes the configurations of the server chain before the engine is attached to them.
	Config func(config *app.Config) error
	// Attached changes the configurations with the engine attached. The outermost handler of the
	// server is then that of config.Aggregator.GenericConfig.BuildHandlerChainFunc. Resources can
	// be asked when the server serves.
	Attached func(config *app.Config, engine *kubestorage.Engine, resources *Resources) error
	// Chain receives the chain of servers before it is prepared to run.
	Chain func(chain *aggregatorapiserver.APIAggregator) error
	// Start begins work beside the server. stop ends it and returns when it has ended.
	Start func(ctx context.Context) (stop func())
}

// NewCommandWithHooks returns `strata apiserver` with hooks; the caller sets its name and texts. It
// serves until the context of the command is cancelled.
func NewCommandWithHooks(hooks Hooks) *cobra.Command {
	s := newSettings()
	s.hooks = hooks
	return s.command(Options{})
}

// call calls a hook, if there is one.
func call[T any](hook func(T) error, arg T) error {
	if hook == nil {
		return nil
	}
	return hook(arg)
}
