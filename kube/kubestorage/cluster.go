package kubestorage

import (
	"context"
	"path"
	"strings"
	"sync"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/keyrotation"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// cluster is the state shared by all storages of one etcd cluster and prefix.
type cluster struct {
	opts      Options
	prefix    string // of every key, with a slash at both ends
	client    *kubernetes.Client
	mirror    *mirror.Mirror       // nil: every storage reads from etcd
	compactor *compactor           // nil: compactions are not followed
	checker   *consistency.Checker // nil without a mirror
	cache     *metrics.Cache
	scraped   *metrics.Cluster
	running   running
	blocks    *blockcache.Cache // of the engine
	tokens    *pages.Tokens
	watches   watchset.Watches
	// from resource prefix, without slashes at its ends, to the name of the resource
	resources sync.Map
	total     atomic.Int64 // see totalKeys
	reloads   keyrotation.Reloads
	// detected is what etcd can do. With eventsOnly reads at or above a revision beyond the
	// published revision go to etcd, because the mirror may not reach that revision soon.
	detected detectedSource
	lag      replicaLag // followed with Options.ReadOnly

	// Places for reads that memory cannot answer: one per key, and one per page of a list.
	getPlaces, listPlaces etcdread.Places
	ranges                clientv3.KV // for listPlaces: bounds the size of a response
}

// running is goroutines that end together. The zero value has none.
type running struct {
	stop context.CancelFunc
	wg   sync.WaitGroup
}

func (r *running) end() {
	if r.stop != nil {
		r.stop()
		r.wg.Wait()
	}
}

// Bounds of the reads of etcd that a stalled feed or lists of old revisions can cause (D6, D7). A
// GET beyond the bound is refused with 429, a page waits.
const (
	maxEtcdGets = 100
	// maxEtcdPages is how many pages of lists are read at once: few, because etcd holds 8 MiB for
	// each.
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

// close ends all goroutines of the cluster and waits for them.
func (c *cluster) close() {
	metrics.Remove(c.scraped)
	c.running.end()
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

// addLag adds, by resource, the number of events of the log that the slowest watch has not read.
func (c *cluster) addLag(lag map[schema.GroupResource]int) {
	behind := map[*watch.Env]mirror.Revision{}
	c.watches.EachDrainable(func(w watchset.Watch) {
		st, ok := w.(*watch.Stream)
		if !ok {
			return
		}
		at := st.Position()
		if least, known := behind[st.Env()]; !known || at < least {
			behind[st.Env()] = at
		}
	})
	for env, at := range behind {
		l := env.Lists
		lag[l.View.Kind().GroupResource] = max(lag[l.View.Kind().GroupResource], eventsAfter(l.Memory, l.Mirror.PublishedRevision(), at))
	}
}

// eventsAfter returns the number of events in the log after rev; now is the published revision. If
// rev is below the log's floor, all events count. Cost is a walk over them.
func eventsAfter(r *mirror.Resource, now, rev mirror.Revision) int {
	if rev >= now {
		return 0
	}
	cur, err := r.CursorAfter(rev, "", "")
	if err != nil {
		return r.Stats().Events
	}
	n := 0
	for buf := make([]*mirror.Event, 0, 1024); ; {
		if buf, err = cur.Next(buf[:0], cap(buf)); err != nil || len(buf) == 0 {
			return n
		}
		n += len(buf)
	}
}
