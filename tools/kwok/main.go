// Command kwok-replay replays a recording to an etcd, as `kwokctl snapshot replay` does: with the same decoder, loader and order of
// steps of kwok, without its management of clusters. Tests of `strata history export` run it.
//
//	kwok-replay KUBECONFIG ETCD-URL ETCD-PREFIX RECORDING
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"time"

	"sigs.k8s.io/kwok/pkg/kwokctl/etcd"
	"sigs.k8s.io/kwok/pkg/kwokctl/recording"
	"sigs.k8s.io/kwok/pkg/utils/client"
	"sigs.k8s.io/kwok/pkg/utils/file"
	"sigs.k8s.io/kwok/pkg/utils/yaml"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kwok-replay:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) != 4 {
		return fmt.Errorf("usage: kwok-replay KUBECONFIG ETCD-URL ETCD-PREFIX RECORDING")
	}
	clientset, err := client.NewClientset("", args[0])
	if err != nil {
		return err
	}
	store, err := etcd.NewClient(etcd.ClientConfig{Endpoints: []string{args[1]}})
	if err != nil {
		return err
	}
	loader, err := etcd.NewLoader(etcd.LoadConfig{Clientset: clientset, Client: store, Prefix: args[2]})
	if err != nil {
		return err
	}
	f, err := os.Open(args[3])
	if err != nil {
		return err
	}
	defer f.Close()
	plain, err := file.Decompress(args[3], f)
	if err != nil {
		return err
	}
	defer plain.Close()
	now := time.Now()
	decoder := yaml.NewDecoder(recording.NewReadHook(plain, func(text []byte) []byte { return recording.RevertTimeFromRelative(now, text) }))
	if err := loader.Load(ctx, decoder); err != nil {
		return err
	}
	return loader.Replay(ctx, decoder)
}
