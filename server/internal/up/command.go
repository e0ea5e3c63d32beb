package up

import (
	"fmt"
	"net"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/stratakube/strata/server/internal/controllers"
	"github.com/stratakube/strata/server/internal/datadir"
)

const defaultPort = 6443

// NewCommand returns `strata up`. It serves until the context of the command is cancelled.
func NewCommand() *cobra.Command {
	s := settings{program: os.Args[0]}
	cmd := &cobra.Command{
		Use:   "up [flags] [-- flags of the API server]",
		Short: "Start a control plane with an embedded etcd",
		Long: fmt.Sprintf(`Start a Kubernetes control plane in one process: etcd, the API server and a few
controllers. No other program is required; strata kubectl connects to it.

The data directory contains the data of etcd (every write is on disk before it is
acknowledged), a certificate authority with its certificates and keys, the administrator's
kubeconfig, and the log. A restart with the same directory restores the same state.
Certificates are valid for a year; a start in the last three months of one renews it.

Clients need a certificate or a token: anonymous access is disabled, RBAC is enabled, and
the kubeconfig has the rights of an administrator. Other users of this machine can access
neither etcd nor the files.

The terminal shows the steps; the components log to strata.log in the data directory.

Controllers that run by default (without them, deleted namespaces are never removed):
%s

--controllers enables other controllers (short names work: default,deployment,replicaset),
or disables some of the default ones (default,-resourcequota). There is no scheduler and no
kubelet, so pods do not run. Other controllers:
%s`, wrapped(controllers.Default), wrapped(controllers.Others())),
		Example: `  strata up
  strata up --data-dir /var/lib/strata --controllers default,deployment,replicaset
  strata up --secure-port 0                    pick a free port
  strata up -- --v=2 --audit-policy-file=policy.yaml`,
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(cmd *cobra.Command, args []string) error {
			if dash := cmd.ArgsLenAtDash(); len(args) > 0 && dash != 0 {
				return fmt.Errorf("%s takes no argument %q (flags of the API server go after --)", cmd.CommandPath(), args[0])
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			s.serverFlags = args
			s.out = cmd.OutOrStdout()
			if s.dataDir == "" {
				return fmt.Errorf("--data-dir is empty")
			}
			if s.securePort < 0 || s.securePort > 65535 {
				return fmt.Errorf("--secure-port %d is not a valid port", s.securePort)
			}
			return run(cmd.Context(), s)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&s.dataDir, "data-dir", datadir.Default(os.Getenv), "data directory; $"+datadir.EnvVar+" sets the default, also for strata kubectl")
	fs.IPVar(&s.bindAddress, "bind-address", net.IPv4(127, 0, 0, 1), "address to serve on; 0.0.0.0 for all addresses of this machine")
	fs.IntVar(&s.securePort, "secure-port", defaultPort, "port to serve on; 0 picks a free one")
	fs.StringSliceVar(&s.tlsSANs, "tls-san", nil, "additional names or addresses of the API server for its certificate")
	fs.StringVar(&s.kubeconfig, "kubeconfig", "", "additional path for the administrator's kubeconfig; a file that strata up did not write is not overwritten")
	fs.StringSliceVar(&s.controllers, "controllers", []string{controllers.DefaultName},
		"controllers to run, as for kube-controller-manager: name, -name to disable one, * for all, default for those listed above, none for none")
	fs.StringVar(&s.engine, "engine", "", "cache that serves reads and watches, strata or upstream (default strata)")
	fs.DurationVar(&s.progressInterval, "etcd-progress-notify-interval", 5*time.Second, "interval at which etcd sends progress notifications to idle watches")
	return cmd
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
