// Command kubectl-strata is the plugin `kubectl strata`: reads of past states of a Strata server. It is `strata history` as a small
// program, without the servers. Named kubectl_complete-strata, it completes for kubectl.
package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	_ "k8s.io/client-go/plugin/pkg/client/auth" // the authentication plugins that a kubeconfig may name

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/history"
)

func main() {
	cmd := newCommand()
	if strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe") == "kubectl_complete-strata" {
		cmd.SetArgs(append([]string{cobra.ShellCompRequestCmd}, os.Args[1:]...))
	}
	os.Exit(cli.Main(cmd, os.Stderr))
}

func newCommand() *cobra.Command {
	cmd := history.NewCommand(history.Config{IOStreams: genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}})
	cmd.Use = "kubectl-strata"
	cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl strata"}
	return cmd
}
