package up

import (
	"context"
	"fmt"
	"strings"

	"github.com/stratakube/strata/server/internal/cli"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// maxShards is the number of etcds beyond which no resource has a shard.
const maxShards = 3

// shard is an embedded etcd beside the one of all other resources.
type shard struct {
	name      string
	resources []string // as in --etcd-servers-overrides
}

// shardsOf returns the shards of a number of etcds: with two, events and leases are in one; with
// three, each has its own.
func shardsOf(n int) []shard {
	const events, leases = "/events", "coordination.k8s.io/leases"
	switch n {
	case 2:
		return []shard{{"busy", []string{events, leases}}}
	case 3:
		return []shard{{"events", []string{events}}, {"leases", []string{leases}}}
	}
	return nil
}

// checkShards compares --etcd-shards with the number of etcds of the data directory, and records it
// for a new one.
func (p *controlPlane) checkShards() error {
	n, err := p.dir.Shards()
	switch {
	case err != nil:
		return err
	case n == 0:
		n = max(p.shards, 1)
		if err := p.dir.SetShards(n); err != nil {
			return err
		}
	case p.shards != 0 && p.shards != n:
		return cli.Misusef("--etcd-shards=%d: data directory %s has %d; omit the flag to start it unchanged, or move resources between stopped etcds (docs/etcd-shards.md)",
			p.shards, p.dir.Path, n)
	}
	p.shards = n
	return nil
}

// startShards starts the etcds of the shards, and adds the overrides to the flags of the API
// server.
func (p *controlPlane) startShards(ctx context.Context) error {
	for _, s := range shardsOf(p.shards) {
		etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: p.dir.EtcdShard(s.name), ProgressNotifyInterval: p.progressInterval, Logger: p.log.etcdLogger(), Fatal: p.log.etcdFailed})
		if err != nil {
			return err
		}
		p.etcdShards = append(p.etcdShards, etcd)
		for _, r := range s.resources {
			p.overrides = append(p.overrides, r+"#"+etcd.Endpoint())
		}
		p.show.step("etcd: ready, for %s", strings.Join(s.resources, " and "))
	}
	return nil
}

// closeShards stops the etcds of the shards.
func (p *controlPlane) closeShards() {
	for _, etcd := range p.etcdShards {
		etcd.Close()
	}
}

// shardFailed returns a channel with the error of the first shard that stops serving.
func (p *controlPlane) shardFailed() <-chan error {
	failed := make(chan error, len(p.etcdShards))
	for i, etcd := range p.etcdShards {
		go func() { // until the etcd is closed
			if err, ok := <-etcd.Err(); ok {
				failed <- fmt.Errorf("etcd of %s: %w", shardsOf(p.shards)[i].name, err)
			}
		}()
	}
	return failed
}
