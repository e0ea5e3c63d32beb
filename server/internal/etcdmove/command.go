package etcdmove

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/progress"
	"github.com/stratakube/strata/server/internal/cli"
)

// dialTimeout bounds the wait for the first answer of an etcd.
const dialTimeout = 10 * time.Second

// errUnsafe is the error of a command that would begin or continue a move.
var errUnsafe = errors.New("a resource cannot be moved while API servers run, and no etcd was contacted: watches at servers that are restarted late " +
	"omit events of the other etcd, and a server whose etcd was restored from a backup accepts writes that are lost. " +
	"Move it with all API servers stopped (docs/etcd-shards.md, \"Moving a resource\"); a command for that copy will follow. " +
	"To end a move of an earlier build, add --abort or --delete-source")

// flags are the values of the flags.
type flags struct {
	from, to                  []string
	prefix                    string
	caFile, certFile, keyFile string
	dryRun, deleteSource      bool
	serversRestarted, abort   bool
}

// NewCommand returns `strata etcd move`, which ends moves and begins none.
func NewCommand() *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "move RESOURCE --from=SERVERS --to=SERVERS",
		Short: "End a move of a resource to another etcd",
		Long: `End a move of a resource that an earlier build has begun.

A move while API servers run is unsafe, so this command no longer begins or continues one:
a server that is restarted late gives clients revisions that the other etcd has not reached,
and their watches then omit events; and a server whose etcd was restored from a backup does
not notice the move, and accepts writes that are lost. A copy between stopped servers will
replace it; docs/etcd-shards.md has the steps that are possible today.

The resource is built-in or custom: events, leases, example.com/widgets.

--abort lets servers write again after a move that stopped: in the etcd of --from if the
copy is not complete, in that of --to if it is.

--delete-source deletes the old objects of a complete move. A server without the override
would show that deletion to its clients, and the command cannot see such a server, so
--servers-restarted has to state that all API servers run with the override.`,
		Example: `  {program} move events --from=http://etcd1:2379 --to=http://etcd2:2379 --abort
  {program} move events --from=http://etcd1:2379 --to=http://etcd2:2379 --delete-source --servers-restarted`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) != 1 {
				return cli.Misusef("%s needs one resource, such as events or leases.coordination.k8s.io, got %d", cmd.CommandPath(), len(args))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if f.abort && f.deleteSource {
				return cli.Misusef("--abort ends a move that did not end, and --delete-source needs one that did; give one of both")
			}
			if !f.abort && !f.deleteSource {
				return errUnsafe
			}
			r, err := parseResource(args[0])
			if err != nil {
				return cli.Misuse(err)
			}
			return f.run(cmd, r)
		},
	}
	fs := cmd.Flags()
	fs.StringSliceVar(&f.from, "from", nil, "comma-separated URLs of the etcd that had the resource before the move")
	fs.StringSliceVar(&f.to, "to", nil, "comma-separated URLs of the etcd that it was moved to")
	fs.StringVar(&f.prefix, "etcd-prefix", "/registry", "the flag --etcd-prefix of the API servers")
	fs.StringVar(&f.caFile, "etcd-cafile", "", "certificate authority of both etcds")
	fs.StringVar(&f.certFile, "etcd-certfile", "", "client certificate for both etcds")
	fs.StringVar(&f.keyFile, "etcd-keyfile", "", "private key of the client certificate")
	fs.BoolVar(&f.dryRun, "dry-run", false, "print the numbers of keys and the revisions, and change nothing")
	fs.BoolVar(&f.deleteSource, "delete-source", false, "delete the old objects from the etcd of --from after a complete move")
	fs.BoolVar(&f.abort, "abort", false, "let servers write the resource again after a move that stopped")
	fs.BoolVar(&f.serversRestarted, "servers-restarted", false, "state that all API servers run with the override, which --delete-source requires")
	for _, name := range []string{"from", "to"} {
		if err := cmd.MarkFlagRequired(name); err != nil {
			panic(err) // the flags are declared above
		}
	}
	return cmd
}

func (f *flags) run(cmd *cobra.Command, r resource) error {
	ctx := cmd.Context()
	source, err := f.connect(ctx, "--from", f.from)
	if err != nil {
		return err
	}
	defer source.Close()
	target := end{servers: f.to}
	connectTarget := func() (end, error) { return f.connect(ctx, "--to", f.to) }
	if !f.abort { // the failure of that etcd is a reason to abort
		if target, err = connectTarget(); err != nil {
			return err
		}
		defer target.Close()
	}
	m := &mover{source: source, target: target, prefix: strings.TrimSuffix(path.Join("/", f.prefix), "/") + "/", resource: r,
		out: cmd.OutOrStdout(), shown: progress.Start(cmd.ErrOrStderr())}
	defer m.shown.Stop()
	if f.abort {
		return m.abort(ctx, connectTarget, f.dryRun)
	}
	return m.deleteSource(ctx, f.serversRestarted, f.dryRun)
}

// connect returns the etcd of a flag when it has answered.
func (f *flags) connect(ctx context.Context, flag string, servers []string) (e end, err error) {
	var tlsConfig *tls.Config
	if f.caFile != "" || f.certFile != "" || f.keyFile != "" {
		info := transport.TLSInfo{CertFile: f.certFile, KeyFile: f.keyFile, TrustedCAFile: f.caFile}
		if tlsConfig, err = info.ClientConfig(); err != nil {
			return e, fmt.Errorf("client certificate: %w; check --etcd-cafile, --etcd-certfile and --etcd-keyfile", err)
		}
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: servers, TLS: tlsConfig, Logger: zap.NewNop(),
		DialKeepAliveTime: dialTimeout, DialKeepAliveTimeout: dialTimeout})
	if err != nil {
		return e, cli.Misusef("%s %s: %w", flag, strings.Join(servers, ","), err)
	}
	answer, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if _, err := client.Get(answer, "health"); err != nil {
		_ = client.Close()
		return e, fmt.Errorf("etcd at %s does not answer: %w; check %s, and that etcd is running", strings.Join(servers, ","), err, flag)
	}
	return end{Client: client, servers: servers}, nil
}
