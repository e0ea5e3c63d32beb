package embedetcd

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"go.uber.org/zap"
)

// startTimeout bounds the wait until etcd serves; a large database takes seconds to load.
const startTimeout = 2 * time.Minute

// NewCommand returns `strata etcd`, the embedded etcd as a separate process. It prints one line,
// "ready <endpoint>", when it serves, and stops cleanly when the context of the command is
// cancelled. It is intended for `strata up --ha`, tests and measurements, not for operators.
func NewCommand() *cobra.Command {
	cfg, peers := Config{}, Peers{}
	verbose := false
	cmd := &cobra.Command{
		Use:   "etcd",
		Short: "Run an etcd, or move a resource to another etcd",
		// the server is for strata up --ha, tests and measurements; docs/etcd-shards.md has the
		// subcommand
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if peers.Name != "" {
				cfg.Peers = &peers
			}
			if verbose {
				logger, err := zap.NewProduction()
				if err != nil {
					return fmt.Errorf("etcd logger: %w", err)
				}
				cfg.Logger = logger
			}
			startCtx, cancel := context.WithTimeout(ctx, startTimeout)
			defer cancel()
			s, err := Start(startCtx, cfg)
			if err != nil {
				return err
			}
			defer s.Close()
			fmt.Fprintln(cmd.OutOrStdout(), "ready", s.Endpoint())
			select {
			case <-ctx.Done():
				return nil
			case err := <-s.Err():
				return fmt.Errorf("etcd stopped: %w", err)
			}
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&cfg.Dir, "data-dir", "", "data directory")
	fs.StringVar(&cfg.ClientURL, "listen-client-url", "http://127.0.0.1:0", "URL to serve clients on; port 0 picks a free one, \"\" a unix socket in the data directory")
	fs.StringVar(&cfg.CertFile, "cert-file", "", "serving certificate for an https URL")
	fs.StringVar(&cfg.KeyFile, "key-file", "", "private key of the serving certificate")
	fs.StringVar(&cfg.TrustedCAFile, "trusted-ca-file", "", "require client certificates signed by this CA")
	fs.BoolVar(&cfg.UnsafeNoFsync, "unsafe-no-fsync", false, "do not sync writes to disk: faster, but a crash of the machine loses data")
	fs.Int64Var(&cfg.QuotaBytes, "quota-backend-bytes", 0, "database size in bytes beyond which writes are rejected (default 8 GiB)")
	fs.DurationVar(&cfg.ProgressNotifyInterval, "progress-notify-interval", 0, "interval of progress notifications for watches (default 10m)")
	fs.StringVar(&peers.Name, "name", "", "name of this member of a cluster of several; the following flags are for such clusters")
	fs.StringVar(&peers.Cluster, "initial-cluster", "", "all members with their URLs for peers, as name=URL, separated by commas")
	fs.StringVar(&peers.CertFile, "peer-cert-file", "", "certificate of this member, as server and as client of its peers")
	fs.StringVar(&peers.KeyFile, "peer-key-file", "", "private key of that certificate")
	fs.StringVar(&peers.TrustedCAFile, "peer-trusted-ca-file", "", "CA that signs the certificates of peers")
	cmd.MarkFlagsRequiredTogether("name", "initial-cluster", "peer-cert-file", "peer-key-file", "peer-trusted-ca-file")
	fs.BoolVar(&verbose, "verbose", false, "log all messages, not only errors")
	if err := cmd.MarkFlagRequired("data-dir"); err != nil {
		panic(err) // the flag is declared above
	}
	return cmd
}
