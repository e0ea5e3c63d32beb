package history

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

// Names of the plugin of kubectl, and of the program that kubectl runs to complete its arguments.
const (
	PluginName         = "kubectl-strata"
	PluginCompleteName = "kubectl_complete-strata"
)

// NewPlugin returns the plugin `kubectl strata`, which has the subcommands of NewCommand and
// kubectl's kubeconfig. args are those of the process, with the name of the program: with
// PluginCompleteName, the command completes.
func NewPlugin(args []string) *cobra.Command {
	cmd := NewCommand(Config{IOStreams: genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}})
	cmd.Use = PluginName
	cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl strata"}
	if strings.TrimSuffix(filepath.Base(args[0]), ".exe") == PluginCompleteName {
		cmd.SetArgs(append([]string{cobra.ShellCompRequestCmd}, args[1:]...))
	} else {
		cmd.SetArgs(args[1:])
	}
	return cmd
}
