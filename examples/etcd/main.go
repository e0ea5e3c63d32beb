// Command etcd mirrors the keys of an etcd below a prefix, prints their changes, and answers reads
// of old revisions from memory. It is an example of the engine without Kubernetes.
//
//	etcd -endpoints=http://127.0.0.1:2379 -prefix=/app/
//
// Each line of standard input is a request:
//
//	put KEY VALUE           write a key
//	delete KEY              delete a key
//	get KEY [REVISION]      the value of a key, from memory
//	range [REVISION]        all keys and values, from memory
//	compare [REVISION]      the same range read from etcd, compared with memory
//
// Without a revision, an answer has all writes that were complete before the request; their changes
// are printed before it. The end of the input, or a signal, ends the program.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

func main() {
	endpoints := flag.String("endpoints", "http://127.0.0.1:2379", "comma-separated etcd endpoints")
	prefix := flag.String("prefix", "/app/", "prefix of the keys; it begins and ends with a slash")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, strings.Split(*endpoints, ","), *prefix, os.Stdin, os.Stdout); err != nil && !errors.Is(err, context.Canceled) {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		os.Exit(1)
	}
}

// run mirrors the prefix and answers the requests of in until its end, or until ctx is cancelled.
func run(ctx context.Context, endpoints []string, prefix string, in io.Reader, out io.Writer) error {
	const dialTimeout = 5 * time.Second
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, DialTimeout: dialTimeout})
	if err != nil {
		return err
	}
	defer client.Close()
	v, err := open(ctx, client, prefix)
	if err != nil {
		return err
	}
	defer v.mirror.Close()

	requests := make(chan string)
	go func() { // until a pending read of in returns
		defer close(requests)
		for lines := bufio.NewScanner(in); lines.Scan(); {
			select {
			case requests <- lines.Text():
			case <-ctx.Done():
				return
			}
		}
	}()
	return v.serve(ctx, requests, out)
}
