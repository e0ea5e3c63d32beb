package kubestorage

import (
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror/driver"
)

// NewSimulated returns an engine whose cluster of the config is a client and a source without a
// network. The client needs a KV only; kv is its connection.
func NewSimulated(client *kubernetes.Client, kv pb.KVClient, source driver.Source, config *storagebackend.ConfigForResource, opts Options) (*Engine, error) {
	e := New(opts)
	opts = e.opts
	opts.Window = opts.window(config.EventsHistoryWindow)
	var tap *etcdfeed.Tap
	if opts.FeedServer != nil {
		tap = opts.FeedServer.Tap(source, keyPrefix(config.Prefix))
		source, opts.FeedServer = tap.Source(), nil
	}
	detected := detectedSource{source: source, latestReads: opts.latestReads(), progressMode: etcdsource.ByProgress}
	c, err := startCluster(client, nil, detected, keyPrefix(config.Prefix), opts, e.blocks)
	if err != nil {
		return nil, err
	}
	c.ranges = client.KV
	if tap != nil {
		err = tap.Attach(c.mirror, kv)
	}
	e.adopt(clusterKey(config), c)
	return e, err
}

// HistoryBytes returns the memory of history, and its bound.
func (e *Engine) HistoryBytes() (bytes, bound int64) {
	for _, c := range e.clusters {
		st := c.mirror.Stats()
		bytes, bound = bytes+st.HistoryBytes+st.VersionBytes, bound+st.HistoryLimit
	}
	return bytes, bound
}
