// Command strata is a Kubernetes control plane whose reads are served from memory.
//
//	strata up           a control plane with an embedded etcd, data in this directory
//	strata kubectl      kubectl, connected to it
//	strata history      past states of its resources
//	strata console      a link to its console in the browser
//	strata apiserver    replaces kube-apiserver, on an existing etcd
//	strata replica      reads of a cluster from memory, in front of its API servers
//	strata etcd copy    copies a resource to another etcd, while all API servers are stopped
//	strata version      the versions of all parts
//
// # In place of kube-apiserver
//
// In the manifest of a control plane (with kubeadm: /etc/kubernetes/manifests/kube-apiserver.yaml)
// the image and the command change, and every flag stays:
//
//	spec:
//	  containers:
//	  - name: kube-apiserver
//	    image: strata                         # an image that contains the strata binary
//	    command:
//	    - strata                              # replaces kube-apiserver
//	    - apiserver
//	    - --etcd-servers=https://127.0.0.1:2379
//	    - --authorization-mode=Node,RBAC      # and all other flags of kube-apiserver
//
// Clients and the data in etcd need no change. There are two ways back: the old manifest, or
// --engine=upstream as one more flag in the new one. With that flag the same binary serves reads
// from the cache that Kubernetes ships.
//
// Strata's own flags are optional. `strata apiserver --help` lists them first, and
// docs/reference.md with their defaults. Besides --engine, the first ones to know are
// --strata-history-age, --strata-history-bytes (how far back watches resume and lists read) and
// --strata-feature-gates. docs/operations.md describes installation, sizes and failures.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/console"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/etcdcopy"
	"github.com/stratakube/strata/server/internal/history"
	"github.com/stratakube/strata/server/internal/kubectlcmd"
	"github.com/stratakube/strata/server/internal/replica"
	"github.com/stratakube/strata/server/internal/testserver"
	"github.com/stratakube/strata/server/internal/up"
	"github.com/stratakube/strata/server/internal/version"
)

func main() {
	root := newRootCommand()
	switch programName(os.Args[0]) {
	case "etcd":
		runEtcd(os.Args)
		return
	case "kubectl":
		kubectlcmd.Run(os.Args[1:])
		return
	case history.PluginName, history.PluginCompleteName:
		root = history.NewPlugin(os.Args)
	case "kube-apiserver":
		root.SetArgs(append([]string{"apiserver"}, os.Args[1:]...))
	}
	os.Exit(cli.Main(root, os.Stderr))
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "strata",
		Short: "A Kubernetes control plane whose reads are served from memory",
		Long: `Strata is a Kubernetes control plane on etcd. It answers every read and watch from
memory, with the same guarantees as etcd.`,
		Example: `  strata up                     a control plane with an embedded etcd, data in this directory
  strata kubectl get pods -A    kubectl, connected to it
  strata apiserver --help       run in place of kube-apiserver, on an existing etcd`,
	}
	cli.SetHelp(root, cliflag.NamedFlagSets{})
	cobra.EnableCommandSorting = false // the commands for new users come first
	root.AddCommand(
		untilSignal(up.NewCommand()),
		kubectlcmd.NewCommand(),
		history.NewCommand(history.Config{
			IOStreams:         genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr},
			DefaultKubeconfig: kubectlcmd.DefaultKubeconfig,
		}),
		untilSignal(console.NewCommand(kubectlcmd.DefaultKubeconfig)),
		untilSignal(apiserver.NewCommand()),
		untilSignal(replica.NewCommand()),
		newVersionCommand(),
		newEtcdCommand(),
		untilSignal(testserver.NewCommand()),
		untilSignal(up.NewSimulateCommand()),
	)
	addVersionFlag(root)
	return root
}

// newEtcdCommand returns `strata etcd` with its subcommand.
func newEtcdCommand() *cobra.Command {
	cmd := untilSignal(embedetcd.NewCommand())
	cmd.AddCommand(untilSignal(etcdcopy.NewCommand()))
	cli.SetHelp(cmd, cliflag.NamedFlagSets{})
	return cmd
}

// addVersionFlag makes `strata --version` print the same as `strata version`. Cobra adds the flags
// of pflag.CommandLine to every command, and component-base defines its own --version there. That
// flag is hidden except in apiserver, which has it like kube-apiserver.
func addVersionFlag(root *cobra.Command) {
	root.Flags().Bool("version", false, "print the versions and exit")
	root.Version = version.Get().String()
	root.SetVersionTemplate("{{.Version}}\n")
	if f := pflag.CommandLine.Lookup("version"); f != nil {
		hidden := *f
		hidden.Hidden = true
		root.PersistentFlags().AddFlag(&hidden)
	}
}

// untilSignal runs cmd with a context that the first SIGINT or SIGTERM cancels. After that, signals
// have their default effect, so that a second one ends the process immediately.
func untilSignal(cmd *cobra.Command) *cobra.Command {
	run := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		context.AfterFunc(ctx, stop)
		cmd.SetContext(ctx)
		return run(cmd, args)
	}
	return cmd
}

// programName returns the name by which the program was started. A copy of the program, or a link
// to it, with the name of another program is that program: kube-apiserver is strata apiserver,
// kubectl is kubectl, etcd is etcd, and kubectl-strata is strata history. Archives for
// setup-envtest have such copies.
func programName(arg0 string) string { return strings.TrimSuffix(filepath.Base(arg0), ".exe") }

// runEtcd runs etcd with its own flags and exits, with the intervals of a single member unless the
// flags set others: it elects itself in 0.25 s in place of a second.
func runEtcd(args []string) {
	etcdmain.Main(withDefaults(args, "--heartbeat-interval=50", "--election-timeout=250"))
}

// withDefaults returns args with those of the flags in defaults inserted after the program's name
// that they do not set. Without flags, and for the subcommands of etcd, it returns args.
func withDefaults(args []string, defaults ...string) []string {
	if len(args) < 2 || !strings.HasPrefix(args[1], "-") {
		return args
	}
	for _, flag := range defaults {
		name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "=")
		sets := func(arg string) bool {
			given, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			return strings.HasPrefix(arg, "-") && (given == name || given == "config-file")
		}
		if !slices.ContainsFunc(args[1:], sets) {
			args = slices.Insert(slices.Clone(args), 1, flag)
		}
	}
	return args
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the versions of Strata and its components",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version.Get())
			return err
		},
	}
}
