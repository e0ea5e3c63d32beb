package kubestorage

import (
	"context"
	"fmt"
	"path"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/etcdclient"
	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/rekey"
	"github.com/stratakube/strata/kube/internal/running"
	"github.com/stratakube/strata/mirror"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
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
	gets, lists etcdread.Places
	ranges      clientv3.KV // for those lists: no response is larger than they may hold
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

// newCluster connects to the etcd of the config and begins to compact and to mirror it.
func newCluster(config *storagebackend.ConfigForResource, opts Options, blocks *blockcache.Cache) (*cluster, error) {
	client, err := etcdclient.New(config.Transport)
	if err != nil {
		return nil, err
	}
	opts.Window = opts.window(config.EventsHistoryWindow)
	prefix := keyPrefix(config.Prefix)
	f, err := findFeed(client, prefix, opts)
	if err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("etcd at %s: %w", strings.Join(client.Endpoints(), ","), err)
	}
	return startCluster(client, startCompactor(client.Client, config.CompactionInterval, opts.Logger), f, prefix, opts, blocks)
}

// startCluster mirrors what the feed delivers; without a source its storages read
// from etcd. The cluster owns the client and the compactor, which may be nil.
func startCluster(client *kubernetes.Client, compactor *compactor, f feed, prefix string, opts Options, blocks *blockcache.Cache) (*cluster, error) {
	c := &cluster{opts: opts, prefix: prefix, client: client, compactor: compactor, blocks: blocks,
		present: f.present, freshness: f.freshness, eventsOnly: f.eventsOnly,
		gets: make(etcdread.Places, maxEtcdGets), lists: make(etcdread.Places, maxEtcdPages), ranges: etcdsource.Bounded(client.Client)}
	c.tokens = pages.NewTokens(client.KV, prefix, pages.TokenOptions{
		Seal:        opts.enabled(SealedContinueTokens),
		RefusePlain: opts.RefusePlainTokens,
		Transformer: opts.TokenTransformer,
		Rotation:    opts.TokenKeyRotation,
		Keep:        2 * opts.Window.MaxAge,
		Logger:      opts.Logger,
	})
	if f.source == nil {
		return c, nil
	}
	m, err := mirror.New(mirror.Options{
		Prefix:         prefix,
		Source:         f.source,
		Window:         opts.Window,
		Replay:         opts.replay(),
		UnclaimedBytes: opts.UnclaimedBytes,
		IdleProgress:   opts.ProgressInterval,
		EventsOnly:     f.eventsOnly,
		EveryRevision:  f.freshness == etcdsource.ByEvents,
		Logger:         opts.Logger,
	})
	if err != nil {
		c.close()
		return nil, err
	}
	c.mirror = m
	c.checker = consistency.New(consistency.Options{
		Interval:      opts.ConsistencyCheckInterval,
		Off:           !opts.enabled(DetectCacheInconsistency),
		ChecksArrival: m.ChecksArrival,
		OnFailure:     onInconsistency,
		Logger:        opts.Logger,
	})
	c.cache = metrics.NewCache(m)
	ctx, cancel := context.WithCancel(context.Background())
	c.stop = cancel
	c.wg.Go(func() { c.cache.Run(ctx) })
	if compactor != nil {
		compactor.tell(m)
	}
	c.scraped = &metrics.Cluster{
		Mirror:    m,
		Blocks:    c.blocks,
		Prefix:    c.prefix,
		Freshness: c.freshness,
		Endpoints: c.endpoints,
		Lists:     func() (reading, limit int) { return len(c.lists), cap(c.lists) },
		AddLag:    c.addLag,
	}
	if compactor != nil {
		c.scraped.Compactor = compactor.Compactor
	}
	metrics.Add(c.scraped)
	return c, nil
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

// newStore makes a storage for a resource; see Engine.Decorator.
func (c *cluster) newStore(config *storagebackend.ConfigForResource, resourcePrefix string, newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, uncached bool) (storage.Interface, factory.DestroyFunc, error) {
	transformer := config.Transformer
	if transformer == nil {
		transformer = identity.NewEncryptCheckTransformer()
	}
	return c.open(StoreConfig{
		Codec:          config.Codec,
		GroupResource:  config.GroupResource,
		ResourcePrefix: resourcePrefix,
		NewFunc:        newFunc,
		NewListFunc:    newListFunc,
		GetAttrs:       getAttrs,
		Transformer:    transformer,
		Leases:         config.LeaseManagerConfig,
		Uncached:       uncached,
	})
}

// Rekeyed is implemented by a transformer whose keys change while it is in use. Derived data is
// dropped when they do. The transformers of an EncryptionConfiguration that is reloaded
// automatically need not implement it.
type Rekeyed = rekey.Transformer

// StoreConfig describes one storage: one resource in one served version.
type StoreConfig struct {
	Codec          runtime.Codec
	GroupResource  schema.GroupResource
	ResourcePrefix string // begins with a slash
	NewFunc        func() runtime.Object
	NewListFunc    func() runtime.Object
	GetAttrs       storage.AttrFunc
	// Transformer decrypts values. What its keys decrypt to is cached: a transformer whose keys
	// change must be that of Kubernetes' encryption configuration, or implement Rekeyed.
	Transformer value.Transformer
	Leases      etcd3.LeaseManagerConfig
	Uncached    bool // serve from etcd, keep nothing in memory
}

func (c *cluster) open(cfg StoreConfig) (storage.Interface, factory.DestroyFunc, error) {
	versioner := storage.APIObjectVersioner{}
	decoder := etcd3.NewDefaultDecoder(cfg.Codec, versioner)
	transformer := cfg.Transformer
	keys, err := rekey.KeysOf(transformer, cfg.GroupResource)
	if err != nil {
		c.opts.Logger.Error("Reloads of the encryption configuration cannot be observed, so the resource is served from etcd",
			"resource", cfg.GroupResource.String(), "err", err)
		cfg.Uncached = true
	}
	unsafeDelete := utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion)
	if unsafeDelete {
		transformer = etcd3.WithCorruptObjErrorHandlingTransformer(transformer)
		decoder = etcd3.WithCorruptObjErrorHandlingDecoder(decoder)
	}
	var compactor etcd3.Compactor // a nil interface if there is none
	if c.compactor != nil {
		compactor = c.compactor
	}
	etcd, err := etcd3.New(c.client, compactor, cfg.Codec, cfg.NewFunc, cfg.NewListFunc, c.prefix, cfg.ResourcePrefix,
		cfg.GroupResource, transformer, cfg.Leases, decoder, versioner)
	if err != nil {
		return nil, nil, fmt.Errorf("storage of %s: %w", cfg.GroupResource, err)
	}
	var raw storage.Interface = etcd
	if unsafeDelete {
		raw = etcd3.NewStoreWithUnsafeCorruptObjectDeletion(raw, cfg.GroupResource)
	}
	var once sync.Once
	if c.mirror == nil {
		return c.newDirect(raw, cfg), func() { once.Do(etcd.Close) }, nil
	}
	resource, err := c.claim(cfg)
	if err != nil {
		etcd.Close()
		return nil, nil, fmt.Errorf("storage of %s: %w", cfg.GroupResource, err)
	}
	if cfg.Uncached {
		return c.newDirect(raw, cfg), func() { once.Do(func() { resource.Release(); etcd.Close() }) }, nil
	}
	c.cache.Add(resource, cfg.GroupResource)
	s := newStore(c, raw, resource, cfg, objects.Config{
		Resource: cfg.GroupResource, Transformer: transformer, Keys: keys, Decoder: decoder, NewFunc: cfg.NewFunc, GetAttrs: cfg.GetAttrs, Blocks: c.blocks,
	}, unsafeDelete)
	unchecked := c.checker.Add(resource, cfg.GroupResource)
	unfollowed := c.reloads.Add(s.view)
	return s, func() { once.Do(func() { unchecked(); unfollowed(); s.stop(); etcd.Close() }) }, nil
}

// window returns the bounds of history, which is kept for as long as upstream's watch cache would
// keep it, or for longer.
func (o *Options) window(upstream time.Duration) mirror.Window {
	w := o.Window
	if w.MaxAge == 0 {
		w.MaxAge = mirror.DefaultWindow.MaxAge
	}
	if w.MaxBytes == 0 {
		w.MaxBytes = mirror.DefaultWindow.MaxBytes
	}
	w.MaxAge = max(w.MaxAge, upstream)
	return w
}

// replay returns the bounds of the history that is restored.
func (o *Options) replay() mirror.ReplayBounds {
	if !o.enabled(WatchHistoryRestore) {
		return mirror.ReplayBounds{Revisions: -1}
	}
	return o.Replay
}

func (c *cluster) claim(cfg StoreConfig) (*mirror.Resource, error) {
	prefix := c.prefix + strings.Trim(cfg.ResourcePrefix, "/") + "/"
	if cfg.Uncached {
		return c.mirror.Exclude(prefix)
	}
	return c.mirror.Claim(prefix)
}
