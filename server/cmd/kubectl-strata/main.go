// Command kubectl-strata is the plugin `kubectl strata`: reads of past states of a Strata server.
// It is `strata history` as a small program, without the servers. Named kubectl_complete-strata, it
// completes for kubectl.
package main

import (
	"os"

	// the authentication plugins that a kubeconfig may name
	_ "k8s.io/client-go/plugin/pkg/client/auth"

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/history"
)

func main() { os.Exit(cli.Main(history.NewPlugin(os.Args), os.Stderr)) }
