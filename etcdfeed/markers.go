package etcdfeed

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror/driver"
)

// Pauses before a lost watch of the compaction key is restarted, and the bound of a read of it.
const (
	markerFirst = 50 * time.Millisecond
	markerLast  = time.Second
	markerRead  = 2 * time.Second
)

// followMarkers records the events of the compaction key, with one watch of etcd for all clients, until ctx ends. The watch is on the gRPC
// stream of etcdsource.Compactor.
func (a *attachment) followMarkers(ctx context.Context) {
	for pause := markerFirst; ; pause = min(2*pause, markerLast) {
		before := a.markers.state().end
		_ = a.watchMarkers(ctx) // the compactor of the same process logs an outage
		if a.markers.state().end > before {
			pause = markerFirst
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
	}
}

// watchMarkers watches the key after the end of the log, or after a new read of the key if etcd has compacted that revision or is another one.
func (a *attachment) watchMarkers(ctx context.Context) error {
	read, cancelRead := context.WithTimeout(ctx, markerRead)
	defer cancelRead()
	now, err := a.client.Get(read, etcdsource.CompactionKey)
	if err != nil {
		return err
	}
	if st := a.markers.state(); st.cluster != now.Header.ClusterId || st.end > now.Header.Revision {
		a.markers.begin(driver.Header{ClusterID: now.Header.ClusterId, Revision: now.Header.Revision}, false)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream := clientv3.WithRequireLeader(metadata.NewOutgoingContext(ctx, metadata.Pairs("strata-stream", "compaction")))
	for resp := range a.client.Watch(stream, etcdsource.CompactionKey, clientv3.WithRev(a.markers.state().end+1)) {
		if err := resp.Err(); err != nil {
			if errors.Is(err, rpctypes.ErrCompacted) {
				a.markers.begin(driver.Header{ClusterID: now.Header.ClusterId, Revision: now.Header.Revision}, false)
			}
			return err
		}
		if resp.Header.ClusterId != now.Header.ClusterId {
			return fmt.Errorf("etcd was replaced: cluster ID %x, was %x", resp.Header.ClusterId, now.Header.ClusterId)
		}
		if len(resp.Events) == 0 {
			continue
		}
		b := driver.Batch{}
		for _, e := range resp.Events {
			b.Through = max(b.Through, e.Kv.ModRevision)
			b.Changes = append(b.Changes, driver.Change{Deleted: e.Type == mvccpb.DELETE, KV: driver.KV{Key: e.Kv.Key, Value: e.Kv.Value,
				CreateRevision: e.Kv.CreateRevision, ModRevision: e.Kv.ModRevision, Version: e.Kv.Version}})
		}
		a.markers.append(b)
	}
	return ctx.Err()
}
