package up

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/server/internal/controllers"
	"github.com/stratakube/strata/server/internal/simulation"
)

// NewSimulateCommand returns `strata simulate`: the controllers, kube-scheduler and simulated nodes
// of `strata up` as a process of its own, on an API server of any kind. It prints the line "ready"
// when the nodes are ready, and runs until the context of the command is cancelled. It is intended
// for measurements.
func NewSimulateCommand() *cobra.Command {
	o := controllers.Options{Controllers: controllers.Default}
	nodes := 0
	cmd := &cobra.Command{
		Use:    "simulate",
		Short:  "Run the controllers, the scheduler and simulated nodes on an API server",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
			if err != nil {
				return err
			}
			// one part without the others simulates nothing
			all, ctx := errgroup.WithContext(cmd.Context())
			run := func(name string, run func() error) {
				all.Go(func() error {
					if err := run(); err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					if ctx.Err() == nil {
						return fmt.Errorf("%s: %w", name, errEnded)
					}
					return context.Cause(ctx)
				})
			}
			run("controllers", func() error { return controllers.Run(ctx, o) })
			run("nodes", func() error {
				return simulation.Run(ctx, simulation.Options{
					Nodes: nodes, Kubelets: config, Scheduler: config,
					OnReady: func() { fmt.Fprintln(cmd.OutOrStdout(), "ready") },
				})
			})
			if err := all.Wait(); !errors.Is(err, context.Canceled) {
				return err
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig of a member of system:masters")
	fs.StringVar(&o.ServiceAccountKey, "service-account-private-key-file", "", "key that signs tokens of service accounts")
	fs.StringVar(&o.RootCA, "root-ca-file", "", "certificates that pods verify the API server with")
	fs.IntVar(&nodes, "nodes", 1, fmt.Sprintf("number of simulated nodes, at most %d", simulation.MaxNodes))
	return cmd
}
