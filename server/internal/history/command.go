// Package history implements `strata history` and the kubectl plugin kubectl-strata: reads of past
// revisions of a Strata server, by its public API and with the rights of the user. It links no part
// of an API server.
package history

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

// Config is the environment of the commands.
type Config struct {
	genericiooptions.IOStreams
	// DefaultKubeconfig returns a kubeconfig for users who name none, or "" for kubectl's rules. An
	// error ends the command. It may be nil.
	DefaultKubeconfig func() (string, error)
}

// base is shared by all subcommands of one command.
type base struct {
	Config
	flags        *genericclioptions.ConfigFlags
	noKubeconfig bool // connect has found none: the address is the default of kubectl's libraries
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
		Short: "Read past states of a Strata server: get, diff, log, replay; top",
		Long: `Read past states of the resources of a Strata server: objects, their changes, and the times and managers of these.
The server keeps every revision of a window in memory: --strata-history-age and --strata-history-bytes.

get needs the right to list the resource, the other commands that to watch it too.`,
		Example: `  {program} get pods -A --at 5m                     the pods of five minutes ago
  {program} diff deployments --since 10m            what has changed since, field by field
  {program} log configmap/settings                  every version, with the manager that wrote it
  {program} replay pods --since 10m --speed 10x     the events again, ten times as fast
  {program} replay --since 10m --serve              a read-only server of the past, for any client
  {program} top                                     objects, bytes, watchers and reads of each resource`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.SetIn(c.In)
	cmd.SetOut(c.Out)
	cmd.SetErr(c.ErrOut)
	b.flags.AddFlags(cmd.PersistentFlags())
	cmd.AddCommand(b.commands()...)
	b.setHelp(cmd)
	_ = cmd.RegisterFlagCompletionFunc("namespace", b.completeNamespaces)
	return cmd
}

// setHelp sets the help of the commands, with the flags of kubectl's libraries in sections after
// those of Strata.
func (b *base) setHelp(cmd *cobra.Command) {
	var connection cliflag.NamedFlagSets
	b.flags.AddFlags(connection.FlagSet(connectionSection))
	cli.SetHelp(cmd, connection)
	for _, child := range cmd.Commands() {
		var upstream cliflag.NamedFlagSets
		if child.Name() == "get" {
			printing := upstream.FlagSet("printing")
			child.Flags().VisitAll(func(flag *pflag.Flag) {
				if slices.Contains([]string{"allow-missing-template-keys", "show-managed-fields", "template"}, flag.Name) {
					printing.AddFlag(flag)
				}
			})
		}
		b.flags.AddFlags(upstream.FlagSet(connectionSection))
		cli.SetHelp(child, upstream)
	}
}

// connectionSection is the section of the flags that name the server and the user.
const connectionSection = "connection"

func (b *base) commands() []*cobra.Command {
	all := []*cobra.Command{b.getCommand(), b.diffCommand(), b.logCommand(), b.replayCommand(), b.topCommand()}
	for _, cmd := range all {
		run := cmd.RunE
		cmd.RunE = func(cmd *cobra.Command, args []string) error {
			// libraries of Kubernetes log errors that they also return
			klog.SetLogger(logr.Discard())
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			context.AfterFunc(ctx, stop) // a second signal ends the process immediately
			cmd.SetContext(ctx)
			err := run(cmd, args)
			switch {
			case err != nil && ctx.Err() != nil:
				return errors.New("interrupted")
			case cli.IsMisuse(err):
				return cli.Misuse(errors.New(message(err, b.start())))
			case err != nil:
				return errors.New(message(err, b.start()))
			}
			return nil
		}
	}
	return all
}

// begin returns a client, and the status line of its command on the terminal. The caller stops it.
func (b *base) begin() (*client, *statusline.Steps, error) {
	c, err := b.connect()
	if err != nil {
		return nil, nil, err
	}
	shown := statusline.Start(b.ErrOut)
	shown.Next("discovering the resources of %s", c.config.Host)
	return c, shown, nil
}

// connect returns a client for the server of the user's flags.
func (b *base) connect() (*client, error) {
	if b.DefaultKubeconfig != nil && *b.flags.KubeConfig == "" && os.Getenv(clientcmd.RecommendedConfigPathEnvVar) == "" {
		path, err := b.DefaultKubeconfig()
		if err != nil {
			return nil, err
		}
		*b.flags.KubeConfig = path
	}
	if _, err := clientcmd.ParseTimeout(*b.flags.Timeout); err != nil {
		return nil, cli.Misusef("--request-timeout %q: must be a duration such as 30s", *b.flags.Timeout)
	}
	config, err := b.flags.ToRESTConfig()
	if err != nil {
		next := "name one with --kubeconfig or KUBECONFIG"
		if strings.HasPrefix(err.Error(), "context ") { // "context NAME does not exist"
			next = "`kubectl config get-contexts` lists its contexts"
		}
		text, _, damaged := strings.Cut(err.Error(), ": couldn't get version/kind")
		if damaged {
			text += ": the file is not a kubeconfig"
		}
		return nil, fmt.Errorf("read the kubeconfig: %s; %s", text, next)
	}
	if raw, err := b.flags.ToRawKubeConfigLoader().RawConfig(); err == nil && *b.flags.APIServer == "" {
		b.noKubeconfig = clientcmdapi.IsConfigEmpty(&raw)
	}
	return newClient(config, b.flags, b.ErrOut)
}

// checkServer is the next step for a server that does not accept connections.
const checkServer = "check that the server is running, and its address: --kubeconfig, --context, --server"

// start returns the next step for a server that does not accept connections.
func (b *base) start() string {
	if !b.noKubeconfig {
		return checkServer
	}
	next := "there is no kubeconfig: name one with --kubeconfig or KUBECONFIG (strata up --data-dir=DIR writes DIR/kubeconfig)"
	if b.DefaultKubeconfig != nil {
		next += ", run this in the working directory of strata up, or set STRATA_DATA to its data directory"
	}
	return next
}

// message returns the text of an error for the user, on one line. start is the next step for a
// server that does not accept connections.
func message(err error, start string) string {
	text := err.Error()
	if failed, is := errors.AsType[*url.Error](err); is {
		text = strings.Replace(text, failed.Error(), unreachable(failed, start), 1)
	}
	var status apierrors.APIStatus
	isStatus := errors.As(err, &status)
	switch {
	case isStatus && apierrors.IsForbidden(err) && strings.Contains(text, "/metrics"):
		text += "; top needs the right to get the path /metrics"
	case isStatus && apierrors.IsForbidden(err):
		text += "; get needs the right to list the resource, the other commands also that to watch it"
	case isStatus && apierrors.IsUnauthorized(err):
		text += "; check the credentials of the kubeconfig, which may have expired"
	}
	return strings.Join(strings.Fields(text), " ")
}

// unreachable describes a request without a response: the server, the cause, and the next step.
func unreachable(failed *url.Error, start string) string {
	host := failed.URL
	if u, err := url.Parse(failed.URL); err == nil {
		host = u.Scheme + "://" + u.Host
	}
	cause, next := failed.Err, start
	if invalid, is := errors.AsType[x509.CertificateInvalidError](cause); is && invalid.Reason == x509.Expired {
		next = "compare the clocks of both machines, or renew the certificate of the server"
	} else if _, is := errors.AsType[*tls.CertificateVerificationError](cause); is {
		next = "check the certificate authority of the kubeconfig, or give one with --certificate-authority"
	} else if failed.Timeout() {
		next = "try again, or give it more time with --request-timeout"
	}
	if call, is := errors.AsType[*os.SyscallError](cause); is {
		cause = call.Err // without the address, which host has
	}
	return fmt.Sprintf("%s cannot be reached: %v; %s", host, cause, next)
}

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
