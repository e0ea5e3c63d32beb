// Package etcdcopy implements `strata etcd copy`, which copies the keys of a resource from one etcd
// cluster to another while all API servers are stopped.
package etcdcopy

import (
	"context"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

// dialTimeout bounds the wait for the first answer of an etcd.
const dialTimeout = 10 * time.Second

type flags struct {
	from, to        []string
	prefix          string
	tls             clientv3.SecureConfig
	dryRun, replace bool
}

// NewCommand returns `strata etcd copy`.
func NewCommand() *cobra.Command {
	f := flags{tls: clientv3.SecureConfig{InsecureTransport: true}} // unless there are files
	cmd := &cobra.Command{
		Use:   "copy RESOURCE --from=SERVERS --to=SERVERS",
		Short: "Copy a resource to another etcd while all API servers are stopped",
		Long: `Copy the keys of a resource to another etcd, while all API servers are stopped.

The resource is built-in or custom: events, leases, example.com/widgets. Keys, values and the
remaining times of leases are copied as they are, so encrypted objects stay readable. Both
copies are then compared. The revision of the other etcd is raised above that of the first
one, and compacted, so that clients list again. The first etcd is not changed.

The command refuses to begin while an API server renews its identity lease, or anything else
below the prefix is written, in either etcd: it watches both for 12 s. It fails if the first
etcd was written meanwhile. Start all API servers with the override afterwards.`,
		Example: `  {program} copy events --from=http://etcd1:2379 --to=http://etcd2:2379 --dry-run
  {program} copy events --from=http://etcd1:2379 --to=http://etcd2:2379`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			r, err := parseResource(args[0])
			if err != nil {
				return cli.Misuse(err)
			}
			return f.run(cmd, r)
		},
	}
	fs := cmd.Flags()
	fs.StringSliceVar(&f.from, "from", nil, "comma-separated URLs of the etcd that has the resource")
	fs.StringSliceVar(&f.to, "to", nil, "comma-separated URLs of the etcd that gets it")
	fs.StringVar(&f.prefix, "etcd-prefix", "/registry", "the flag --etcd-prefix of the API servers")
	fs.StringVar(&f.tls.Cacert, "etcd-cafile", "", "certificate authority of both etcds")
	fs.StringVar(&f.tls.Cert, "etcd-certfile", "", "client certificate for both etcds")
	fs.StringVar(&f.tls.Key, "etcd-keyfile", "", "private key of the client certificate")
	fs.BoolVar(&f.dryRun, "dry-run", false, "print the numbers of keys and the revisions, and change nothing")
	fs.BoolVar(&f.replace, "replace", false, "delete the keys that the etcd of --to has of the resource first")
	_, _ = cmd.MarkFlagRequired("from"), cmd.MarkFlagRequired("to") // which are declared above
	return cmd
}

func (f *flags) run(cmd *cobra.Command, r resource) error {
	ctx := cmd.Context()
	source, err := f.connect(ctx, "--from", f.from)
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := f.connect(ctx, "--to", f.to)
	if err != nil {
		return err
	}
	defer target.Close()
	c := &copier{source: source, target: target, resource: r, quiet: identityRenewal,
		prefix: strings.TrimSuffix(path.Join("/", f.prefix), "/") + "/",
		out:    cmd.OutOrStdout(), shown: statusline.Start(cmd.ErrOrStderr())}
	defer c.shown.Stop()
	return c.run(ctx, f.replace, f.dryRun)
}

// connect returns the etcd of a flag when it has answered.
func (f *flags) connect(ctx context.Context, flag string, servers []string) (e end, err error) {
	config, err := clientv3.NewClientConfig(&clientv3.ConfigSpec{Endpoints: servers, Secure: &f.tls,
		KeepAliveTime: dialTimeout, KeepAliveTimeout: dialTimeout}, zap.NewNop())
	if err != nil {
		return e, fmt.Errorf("client certificate: %w; check --etcd-cafile, --etcd-certfile and --etcd-keyfile", err)
	}
	config.Logger = zap.NewNop()
	client, err := clientv3.New(*config)
	if err != nil {
		return e, cli.Misusef("%s %s: %w", flag, strings.Join(servers, ","), err)
	}
	answer, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if _, err := client.Get(answer, "health"); err != nil {
		_ = client.Close()
		return e, fmt.Errorf("etcd at %s does not answer: %w; check %s, and that etcd is running",
			strings.Join(servers, ","), err, flag)
	}
	return end{Client: client, servers: servers}, nil
}
