package up

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/tools/clientcmd"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/controllers"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/simulation"
)

const defaultPort = 6443

// minProgressInterval is the shortest interval of progress notifications that etcd accepts.
const minProgressInterval = 100 * time.Millisecond

// NewCommand returns `strata up`. It serves until the context of the command is cancelled.
func NewCommand() *cobra.Command {
	s := settings{program: os.Args[0]}
	cmd := &cobra.Command{
		Use:   "up [flags] [-- flags of the API server]",
		Short: "Start a control plane with an embedded etcd",
		Long: fmt.Sprintf(`Start a Kubernetes control plane in one process: etcd, the API server and the
controllers. No other program is required; strata kubectl connects to it.

The data directory contains the data of etcd (every write is on disk before it is
acknowledged), a certificate authority with its certificates and keys, the administrator's
kubeconfig, and the log. A restart with the same directory restores the same state.
Certificates are valid for a year; a start in the last three months of one renews it.

Clients need a certificate or a token: anonymous access is disabled, RBAC is enabled, and
the kubeconfig has the rights of an administrator. Other users of this machine can access
neither etcd nor the files.

The terminal shows the steps; the components log to strata.log in the data directory.
It also shows a link to the console, a page in a browser on this machine with the state of
the server and the past of its resources; strata console prints another link.

There is no kubelet and no scheduler, so pods remain Pending. With --nodes, there are
simulated nodes and kube-scheduler: pods get a node and become Running, and pods of Jobs
complete, but no container is started. The number of nodes is that of the last start.

Controllers that run by default:
%s

--controllers enables other controllers (default,horizontalpodautoscaling; short names work),
or disables some of the default ones (default,-cronjob). Other controllers:
%s`, wrapped(controllers.Default), wrapped(controllers.Others())),
		Example: `  {program} up
  {program} up --nodes 3                          pods run, on simulated nodes
  {program} up --data-dir /var/lib/strata --controllers default,-cronjob
  {program} up --secure-port 0                    pick a free port
  {program} up -- --v=2 --audit-policy-file=policy.yaml`,
		Args: func(cmd *cobra.Command, args []string) error {
			if dash := cmd.ArgsLenAtDash(); len(args) > 0 && dash != 0 {
				return cli.Misusef("%s takes no argument %q; flags of the API server go after --", cmd.CommandPath(), args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			s.serverFlags = args
			s.out = cmd.OutOrStdout()
			if err := s.check(cmd.Flags().Changed("etcd-shards")); err != nil {
				return err
			}
			return run(cmd.Context(), s)
		},
	}
	fs := cmd.Flags()
	s.addFlags(fs)
	cli.ShortenDurations(fs)
	cli.SetHelp(cmd, cliflag.NamedFlagSets{})
	return cmd
}

func (s *settings) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&s.dataDir, "data-dir", datadir.Default(os.Getenv), "directory of all files of the control plane; the environment variable "+datadir.EnvVar+" sets the default, also for strata kubectl")
	fs.IPVar(&s.bindAddress, "bind-address", net.IPv4(127, 0, 0, 1), "IP address on which the API server listens; 0.0.0.0 means all addresses of the machine")
	fs.IntVar(&s.securePort, "secure-port", defaultPort, "port on which the API server listens; 0 selects a free port")
	fs.StringSliceVar(&s.tlsSANs, "tls-san", nil, "comma-separated names and IP addresses to add to the certificate of the API server")
	fs.StringVar(&s.kubeconfig, "kubeconfig", "", "path to which the administrator's kubeconfig is also written; an existing file of others is an error")
	fs.IntVar(&s.nodes, "nodes", 0, fmt.Sprintf("number of simulated nodes, at most %d, on which pods seem to run; 0 removes those of an earlier start", simulation.MaxNodes))
	fs.StringSliceVar(&s.controllers, "controllers", []string{controllers.DefaultName},
		"comma-separated controllers to run: name, -name to exclude one, * for all, default for the list above, none for none")
	fs.DurationVar(&s.progressInterval, "etcd-progress-notify-interval", 5*time.Second, "interval of etcd's progress notifications; at least 100ms, 0 means 10m")
	fs.BoolVar(&s.ha, "ha", false, "run three etcd members, three API servers, two read replicas and a balancer as processes, to try restarts and failures")
	fs.IntVar(&s.shards, "etcd-shards", 0, "number of embedded etcds, up to 3: events and leases in one of their own, or in one each; 0 means that of the data directory, or 1")
	fs.StringVar(&s.engine, "engine", "", "cache that serves reads and watches: strata or upstream")
	utilruntime.Must(fs.MarkDeprecated("engine", "use strata up -- --engine; the flag will be removed in v0.2"))
}

// check returns an error for values that no start can have. shardsSet reports whether the number of
// shards is from the command line.
func (s *settings) check(shardsSet bool) error {
	if s.dataDir == "" {
		return cli.Misusef("--data-dir is empty: name the directory of the control plane's files, such as %s", datadir.Default(func(string) string { return "" }))
	}
	if s.securePort < 0 || s.securePort > 65535 {
		return cli.Misusef("--secure-port %d is not a valid port: choose one between 1 and 65535, or 0 for a free one", s.securePort)
	}
	if s.ha && s.securePort == 65535 {
		return cli.Misusef("--ha needs the port after --secure-port too: choose one below 65535")
	}
	if s.ha && s.shards > 1 {
		return cli.Misusef("--ha and --etcd-shards=%d exclude each other: --ha has one etcd of three members; omit one of the flags", s.shards)
	}
	if s.nodes < 0 || s.nodes > simulation.MaxNodes {
		return cli.Misusef("--nodes %d is not between 0 and %d", s.nodes, simulation.MaxNodes)
	}
	if n := s.shards; shardsSet && (n < 1 || n > maxShards) {
		return cli.Misusef("--etcd-shards %d is not between 1 and %d", n, maxShards)
	}
	if s.progressInterval != 0 && s.progressInterval < minProgressInterval {
		return cli.Misusef("--etcd-progress-notify-interval %s is too short: choose at least %s, or 0 for etcd's default of 10m", s.progressInterval, minProgressInterval)
	}
	for _, name := range s.tlsSANs {
		if net.ParseIP(name) == nil && len(validation.IsDNS1123Subdomain(strings.TrimPrefix(name, "*."))) > 0 {
			return cli.Misusef("--tls-san %q is neither an IP address nor a name of a host, such as strata.example.com", name)
		}
	}
	return nil
}

// wrapped returns names in lines for a help text.
func wrapped(names []string) string {
	const width = 88
	text, line := "", " "
	for i, name := range names {
		if i < len(names)-1 {
			name += ","
		}
		if len(line)+1+len(name) > width {
			text += line + "\n"
			line = " "
		}
		line += " " + name
	}
	return text + line
}

// NewSimulateCommand returns `strata simulate`: the controllers, kube-scheduler and simulated nodes
// of `strata up` as a process of its own, on an API server of any kind. It prints the line "ready"
// when the nodes are ready, and runs until the context of the command is cancelled. It is intended
// for measurements.
func NewSimulateCommand() *cobra.Command {
	o := controllers.Options{Controllers: controllers.Default}
	nodes := 0
	cmd := &cobra.Command{
		Use:    "simulate",
		Short:  "Run the controllers, the scheduler and simulated nodes on an API server",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := clientcmd.BuildConfigFromFlags("", o.Kubeconfig)
			if err != nil {
				return err
			}
			// one part without the others simulates nothing
			all, ctx := errgroup.WithContext(cmd.Context())
			run := func(name string, run func() error) {
				all.Go(func() error {
					if err := run(); err != nil {
						return fmt.Errorf("%s: %w", name, err)
					}
					if ctx.Err() == nil {
						return fmt.Errorf("%s: %w", name, errEnded)
					}
					return context.Cause(ctx)
				})
			}
			run("controllers", func() error { return controllers.Run(ctx, o) })
			run("nodes", func() error {
				return simulation.Run(ctx, simulation.Options{
					Nodes: nodes, Kubelets: config, Scheduler: config,
					OnReady: func() { fmt.Fprintln(cmd.OutOrStdout(), "ready") },
				})
			})
			if err := all.Wait(); !errors.Is(err, context.Canceled) {
				return err
			}
			return nil
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&o.Kubeconfig, "kubeconfig", "", "kubeconfig of a member of system:masters")
	fs.StringVar(&o.ServiceAccountKey, "service-account-private-key-file", "", "key that signs tokens of service accounts")
	fs.StringVar(&o.RootCA, "root-ca-file", "", "certificates that pods verify the API server with")
	fs.IntVar(&nodes, "nodes", 1, fmt.Sprintf("number of simulated nodes, at most %d", simulation.MaxNodes))
	return cmd
}
