// Package history implements `strata history` and the kubectl plugin kubectl-strata: reads of past revisions of a Strata server, by
// its public API and with the rights of the user. It links no part of an API server.
package history

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config is the environment of the commands.
type Config struct {
	genericiooptions.IOStreams
	// DefaultKubeconfig returns a kubeconfig for users who name none, or "" for kubectl's rules. It may be nil.
	DefaultKubeconfig func() string
}

// base is shared by all subcommands of one command.
type base struct {
	Config
	flags *genericclioptions.ConfigFlags
}

// NewCommand returns the command with its subcommands, named history.
func NewCommand(c Config) *cobra.Command {
	b := &base{Config: c, flags: genericclioptions.NewConfigFlags(true)}
	b.flags.WrapConfigFn = func(config *rest.Config) *rest.Config {
		config.QPS, config.Burst = 50, 300 // as kubectl
		return config
	}
	cmd := &cobra.Command{
		Use:   "history",
		Short: "Read past states of a Strata server: get, diff, log, replay, export; top",
		Long: `Read past states of the resources of a Strata server: objects, their changes, and the times and managers of these.
The server keeps every revision of a window in memory: --strata-history-age and --strata-history-bytes.

get needs the right to list the resource, the other commands that to watch it too.`,
		Example: `  get pods -A --at 5m                     the pods of five minutes ago
  diff deployments --since 10m            what has changed since, field by field
  log configmap/settings                  every version, with the manager that wrote it
  replay pods --since 10m --speed 10x     the events again, ten times as fast
  replay --since 10m --serve              a read-only server of the past, for any client
  export --since 10m -f window.yaml       a recording for kwok
  top                                     objects, bytes, watchers and reads of each resource`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.SetIn(c.In)
	cmd.SetOut(c.Out)
	cmd.SetErr(c.ErrOut)
	b.flags.AddFlags(cmd.PersistentFlags())
	cmd.AddCommand(b.commands()...)
	_ = cmd.RegisterFlagCompletionFunc("namespace", b.completeNamespaces)
	return cmd
}

func (b *base) commands() []*cobra.Command {
	all := []*cobra.Command{b.getCommand(), b.diffCommand(), b.logCommand(), b.replayCommand(), b.exportCommand(), b.topCommand()}
	for _, cmd := range all {
		run := cmd.RunE
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends the process immediately
			cmd.SetContext(ctx)
			err := run(cmd, args)
			switch {
			case err != nil && ctx.Err() != nil:
				return errors.New("interrupted")
			case err != nil:
				return errors.New(message(err))
			}
			return nil
		}
	}
	return all
}

// connect returns a client for the server of the user's flags.
func (b *base) connect() (*client, error) {
	if b.DefaultKubeconfig != nil && *b.flags.KubeConfig == "" && os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		*b.flags.KubeConfig = b.DefaultKubeconfig()
	}
	config, err := b.flags.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w; name one with --kubeconfig or KUBECONFIG", err)
	}
	return newClient(config, b.flags, b.ErrOut)
}

// message returns the text of an error for the user, on one line.
func message(err error) string {
	var status apierrors.APIStatus
	text := err.Error()
	switch {
	case errors.As(err, &status) && apierrors.IsForbidden(err) && strings.Contains(text, "/metrics"):
		text += "; top needs the right to get the path /metrics"
	case errors.As(err, &status) && apierrors.IsForbidden(err):
		text += "; get needs the right to list the resource, the other commands also that to watch it"
	case errors.As(err, &status) && apierrors.IsUnauthorized(err):
		text += "; check the credentials of the kubeconfig"
	}
	return strings.Join(strings.Fields(text), " ")
}
