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
		Long: fmt.Sprintf(`Start a Kubernetes control plane in one process: an etcd, the API server on it, and a
few controllers. Nothing else need be installed; strata kubectl talks to it.

Everything is kept in the data directory: the data of etcd (every write is on disk before
it is acknowledged), a certificate authority with the certificates and keys it signed, the
administrator's kubeconfig, and the log. Starting again with the same directory finds
everything as it was. Certificates last a year, and a start in the last three months of one
renews it.

Clients need a certificate or a token: anonymous access is off, RBAC is on, and the
kubeconfig is the administrator's. Other users of this machine reach neither etcd nor the
files.

The terminal shows the steps; what the parts log goes to strata.log in the data directory.

Controllers that run by default (without any, deleted namespaces would never go):
%s

--controllers adds some of the others (short names work: default,deployment,replicaset), or
leaves out some of these (default,-resourcequota). Nothing runs pods:
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
				return fmt.Errorf("--secure-port %d is not a port", s.securePort)
			}
			return run(cmd.Context(), s)
		},
	}
	fs := cmd.Flags()
	fs.SortFlags = false
	fs.StringVar(&s.dataDir, "data-dir", datadir.Default(os.Getenv), "directory for everything that is kept; $"+datadir.EnvVar+" sets the default, also for strata kubectl")
	fs.IPVar(&s.bindAddress, "bind-address", net.IPv4(127, 0, 0, 1), "address to serve on; 0.0.0.0 for all of this machine's")
	fs.IntVar(&s.securePort, "secure-port", defaultPort, "port to serve on; 0 picks a free one")
	fs.StringSliceVar(&s.tlsSANs, "tls-san", nil, "more names or addresses under which clients reach the API server, for its certificate")
	fs.StringVar(&s.kubeconfig, "kubeconfig", "", "write the administrator's kubeconfig to this path too; a file that strata up did not write is left alone")
	fs.StringSliceVar(&s.controllers, "controllers", []string{controllers.DefaultName},
		"controllers to run, as for kube-controller-manager: name, -name to leave one out, * for all; default for those listed above, none for none")
	fs.StringVar(&s.engine, "engine", "", "what answers reads and watches, strata or upstream (default strata)")
	fs.DurationVar(&s.progressInterval, "etcd-progress-notify-interval", 5*time.Second, "how often etcd tells idle watches how far they are")
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
