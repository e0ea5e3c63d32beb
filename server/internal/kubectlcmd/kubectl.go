// Package kubectlcmd implements `strata kubectl`: kubectl with the kubeconfig written by `strata
// up` as its default.
package kubectlcmd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/component-base/cli"
	"k8s.io/component-base/logs"
	kubectl "k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/plugin"
	"k8s.io/kubectl/pkg/cmd/util"

	// the authentication plugins that a kubeconfig may name
	_ "k8s.io/client-go/plugin/pkg/client/auth"

	"github.com/stratakube/strata/server/internal/datadir"
	// sets the version reported by `kubectl version`
	_ "github.com/stratakube/strata/server/internal/version"
)

// NewCommand returns `strata kubectl`. All arguments are passed to kubectl unchanged. On failure
// kubectl exits the process itself, with its own messages and exit codes.
func NewCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "kubectl ...",
		Short: "Run kubectl, by default against the control plane of strata up",
		// kubectl parses its flags, --help among them.
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := kubeconfig(args, os.Getenv, os.Geteuid())
			if err != nil {
				return err
			}
			if path != "" {
				// In the environment, so that plugins find it too.
				if err := os.Setenv(clientcmd.RecommendedConfigPathEnvVar, path); err != nil {
					return err
				}
			} else if path := missing(args, os.Getenv); path != "" {
				util.BehaviorOnFatal(func(message string, code int) {
					fmt.Fprint(os.Stderr, explain(message, path))
					os.Exit(code)
				})
			}
			Run(args)
			return nil
		},
	}
}

// Run does the same as kubectl's own main function, with args after the program name.
func Run(args []string) {
	argv := append([]string{"kubectl"}, args...)
	if _, err := logs.GlogSetter(kubectl.GetLogVerbosity(argv)); err != nil {
		util.CheckErr(err)
	}
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	cmd := kubectl.NewDefaultKubectlCommandWithArgs(kubectl.KubectlOptions{
		PluginHandler: kubectl.NewDefaultPluginHandler(plugin.ValidPluginFilenamePrefixes),
		Arguments:     argv,
		IOStreams:     streams,
	})
	cmd.SetArgs(args)
	if err := cli.RunNoErrOutput(cmd); err != nil {
		util.CheckErr(err)
	}
}

// DefaultKubeconfig returns the path of the kubeconfig of `strata up`, or "" if the environment
// names a kubeconfig or the file does not exist. A file in the working directory that may not be
// that of the user's `strata up` is an error.
func DefaultKubeconfig() (string, error) { return kubeconfig(nil, os.Getenv, os.Geteuid()) }

// kubeconfig returns the path of the kubeconfig of `strata up`. It returns "" if the arguments or
// the environment name a kubeconfig, or if the file does not exist; kubectl then uses its usual
// rules. Unless the environment names the data directory, checkImplicit may refuse the file.
func kubeconfig(args []string, getenv func(string) string, user int) (string, error) {
	path, err := filepath.Abs(datadir.Kubeconfig(datadir.Default(getenv)))
	if err != nil || getenv(clientcmd.RecommendedConfigPathEnvVar) != "" || namesKubeconfig(args) {
		return "", nil
	}
	if _, err := os.Lstat(path); err != nil {
		return "", nil
	}
	if getenv(datadir.EnvVar) == "" {
		if path, err = realPath(path); err != nil {
			return "", err
		}
		if err := checkImplicit(path, user); err != nil {
			return "", err
		}
	}
	return path, nil
}

// missing returns the path of the kubeconfig of `strata up` if kubeconfig looked for it and
// returned "".
func missing(args []string, getenv func(string) string) string {
	if getenv(clientcmd.RecommendedConfigPathEnvVar) != "" || namesKubeconfig(args) {
		return ""
	}
	path, err := filepath.Abs(datadir.Kubeconfig(datadir.Default(getenv)))
	if err != nil {
		return ""
	}
	return path
}

// explain ends the message of an error with a line feed, and adds the next step if kubectl had no
// kubeconfig: it connects to this address then.
func explain(message, missing string) string {
	if message != "" && !strings.HasSuffix(message, "\n") {
		message += "\n"
	}
	if strings.Contains(message, "localhost:8080 was refused") {
		message += fmt.Sprintf("There is no %s, which strata up writes. Run this in the working directory of strata up, or set STRATA_DATA to its data directory or KUBECONFIG to another kubeconfig.\n", missing)
	}
	return message
}

// namesKubeconfig reports whether args set --kubeconfig. Arguments after "--" belong to another
// program (kubectl exec).
func namesKubeconfig(args []string) bool {
	for _, arg := range args {
		switch {
		case arg == "--":
			return false
		case arg == "--"+clientcmd.RecommendedConfigPathFlag, strings.HasPrefix(arg, "--"+clientcmd.RecommendedConfigPathFlag+"="):
			return true
		}
	}
	return false
}
