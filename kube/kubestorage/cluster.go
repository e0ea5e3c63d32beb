package kubestorage

import (
	"context"
	"path"
	"strings"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/rekey"
	"github.com/stratakube/strata/kube/internal/running"
	"github.com/stratakube/strata/mirror"
)

// cluster is what all storages of one etcd cluster and prefix share.
type cluster struct {
	opts      Options
	prefix    string // of every key, with a slash at both ends
	client    *kubernetes.Client
	mirror    *mirror.Mirror       // nil: every storage reads from etcd
	compactor *compactor           // nil: compactions go unnoticed
	checker   *consistency.Checker // nil without a mirror
	cache     *metrics.Cache
	scraped   *metrics.Cluster
	stop      context.CancelFunc // of what wg waits for
	wg        sync.WaitGroup
	blocks    *blockcache.Cache // of the engine
	tokens    *pages.Tokens
	watches   running.Watches
	reloads   rekey.Reloads
	present   present
	freshness etcdsource.Freshness
	// eventsOnly: see mirror.Options. What is not older than a revision that memory has
	// not reached goes to etcd then, because memory may not reach it soon.
	eventsOnly bool

	// Places for reads that memory cannot answer: one key each, and a page of a list each.
	getPlaces, listPlaces etcdread.Places
	ranges                clientv3.KV // for those lists: no response is larger than they may hold
}

// Bounds of what a stall of the feed, or lists of the distant past, can make of
// reads of etcd (D6, D7). A GET beyond it is refused with 429, a page waits.
const (
	maxEtcdGets = 100
	// maxEtcdPages is how many pages of lists are read at once: few, because etcd holds 8 MiB for each.
	maxEtcdPages = 4
)

// clusterKey is equal for configs that can share a cluster.
func clusterKey(c *storagebackend.ConfigForResource) string {
	t := c.Transport
	return strings.Join(append([]string{keyPrefix(c.Prefix), t.CertFile, t.KeyFile, t.TrustedCAFile}, t.ServerList...), "\x00")
}

func keyPrefix(prefix string) string {
	p := path.Join("/", prefix)
	if !strings.HasSuffix(p, "/") {
		p += "/"
	}
	return p
}

// pages returns the pages of a resource of the cluster.
func (c *cluster) pages(resource schema.GroupResource) pages.Pages {
	return pages.New(resource, c.tokens, c.opts.enabled(APIListChunking))
}

// endpoints names the cluster in metrics.
func (c *cluster) endpoints() string { return strings.Join(c.client.Endpoints(), ",") }

// close ends everything and waits for it.
func (c *cluster) close() {
	metrics.Remove(c.scraped)
	if c.stop != nil {
		c.stop()
		c.wg.Wait()
	}
	if c.checker != nil {
		c.checker.Close()
	}
	c.reloads.Close()
	if c.compactor != nil {
		c.compactor.Stop()
	}
	if c.mirror != nil {
		c.mirror.Close()
	}
	c.tokens.Close()
	_ = c.client.Close()
}
