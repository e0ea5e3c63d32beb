package console

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
	"k8s.io/kubectl/pkg/scheme"
)

// NewCommand returns `strata console`. defaultKubeconfig returns the path of the kubeconfig that is
// used if the user names none, "" for kubectl's rules. An error ends the command.
func NewCommand(defaultKubeconfig func() (string, error)) *cobra.Command {
	flags := genericclioptions.NewConfigFlags(true)
	cmd := &cobra.Command{
		Use:   "console",
		Short: "Print a link that opens the console of strata up in a browser",
		Long: `Print a link that opens the console of a server in a browser on the same machine: resources, plots, past states, slow watches.

The link is valid once and for ten minutes. The console may read all objects except for Secrets, and nothing else.
Only strata up has links. For other servers, run strata kubectl proxy and open the path ` + Path + `/
there: the console then has the rights of your kubeconfig.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if *flags.KubeConfig == "" {
				path, err := defaultKubeconfig()
				if err != nil {
					return err
				}
				*flags.KubeConfig = path
			}
			config, err := flags.ToRESTConfig()
			if err != nil {
				return fmt.Errorf("read the kubeconfig: %w; name one with --kubeconfig or KUBECONFIG", err)
			}
			config.GroupVersion, config.NegotiatedSerializer = &schema.GroupVersion{}, scheme.Codecs.WithoutConversion()
			client, err := rest.UnversionedRESTClientFor(config)
			if err != nil {
				return fmt.Errorf("connect to %s: %w", config.Host, err)
			}
			body, err := client.Post().AbsPath(LinkPath).Do(cmd.Context()).Raw()
			if err != nil {
				return failed(config.Host, err)
			}
			var link Link
			if err := json.Unmarshal(body, &link); err != nil {
				return fmt.Errorf("decode the link of %s: %w", config.Host, err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s%s\nvalid once, until %s\n", config.Host, link.Path, link.Ends.Local().Format(time.TimeOnly))
			return err
		},
	}
	cmd.Flags().StringVar(flags.KubeConfig, "kubeconfig", "", "path to the kubeconfig; that of strata up by default")
	cmd.Flags().StringVar(flags.Context, "context", "", "the context of the kubeconfig")
	return cmd
}

// failed describes a request for a link that failed, with the next step.
func failed(host string, err error) error {
	if request, is := errors.AsType[*url.Error](err); is {
		cause := request.Err
		if call, is := errors.AsType[*os.SyscallError](cause); is {
			cause = call.Err // without the address, which host has
		}
		return fmt.Errorf("request a link: %s cannot be reached: %w; start it with strata up, or name the kubeconfig of a running server with --kubeconfig or KUBECONFIG "+
			"(strata up --data-dir=DIR writes DIR/kubeconfig)", host, cause)
	}
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s has no links: it is not strata up, or listens on no loopback address; run strata kubectl proxy and open %s/ there", host, Path)
	case apierrors.IsForbidden(err) && strings.Contains(err.Error(), notLocal):
		return fmt.Errorf("request a link from %s: %s", host, notLocal)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; a link needs the right to post to this path: run strata kubectl proxy and open %s/ there", err, Path)
	}
	return fmt.Errorf("request a link from %s: %w", host, err)
}
