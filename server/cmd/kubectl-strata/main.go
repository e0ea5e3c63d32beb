// Command kubectl-strata is the plugin `kubectl strata`: reads of past states of a Strata server.
// It is `strata history` as a small program, without the servers. Named kubectl_complete-strata, it
// completes for kubectl.
package main

import (
	"os"

	"github.com/spf13/cobra"
	// the authentication plugins that a kubeconfig may name
	_ "k8s.io/client-go/plugin/pkg/client/auth"

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/history"
	"github.com/stratakube/strata/server/internal/version"
)

func main() { os.Exit(cli.Main(newCommand(os.Args), os.Stderr)) }

func newCommand(args []string) *cobra.Command {
	cmd := history.NewPlugin(args)
	cmd.Version = version.Get().Strata
	// without the shorthand -v, which is kubectl's verbosity
	cmd.Flags().Bool("version", false, "print the version of the plugin")
	return cmd
}
