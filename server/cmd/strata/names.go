package main

import (
	"path/filepath"
	"slices"
	"strings"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

// programName returns the name by which the program was started. A copy of the program, or a link
// to it, with the name of another program is that program: kube-apiserver is strata apiserver,
// kubectl is kubectl, etcd is etcd, and kubectl-strata is strata history. Archives for
// setup-envtest have such copies.
func programName(arg0 string) string { return strings.TrimSuffix(filepath.Base(arg0), ".exe") }

// runEtcd runs etcd with its own flags and exits, with the intervals of a single member unless the
// flags set others: it elects itself in 0.25 s in place of a second.
func runEtcd(args []string) {
	etcdmain.Main(withDefaults(args, "--heartbeat-interval=50", "--election-timeout=250"))
}

// withDefaults returns args with those of the flags in defaults inserted after the program's name
// that they do not set. Without flags, and for the subcommands of etcd, it returns args.
func withDefaults(args []string, defaults ...string) []string {
	if len(args) < 2 || !strings.HasPrefix(args[1], "-") {
		return args
	}
	for _, flag := range defaults {
		name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), "=")
		sets := func(arg string) bool {
			given, _, _ := strings.Cut(strings.TrimLeft(arg, "-"), "=")
			return strings.HasPrefix(arg, "-") && (given == name || given == "config-file")
		}
		if !slices.ContainsFunc(args[1:], sets) {
			args = slices.Insert(slices.Clone(args), 1, flag)
		}
	}
	return args
}
