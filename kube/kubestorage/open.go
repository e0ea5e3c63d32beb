package kubestorage

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/etcdclient"
	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/keyrotation"
	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/kube/kind"
	"github.com/stratakube/strata/mirror"
)

// newCluster connects to the etcd of the config, for at most the time dial, and starts to compact
// and to mirror it. ctx ends the attempt to connect, and has no effect after it.
func newCluster(ctx context.Context, dial time.Duration, config *storagebackend.ConfigForResource, opts Options, blocks *blockcache.Cache) (*cluster, error) {
	client, err := etcdclient.New(ctx, dial, config.Transport, opts.ReadOnly)
	if err != nil {
		return nil, err
	}
	opts.Window = opts.window(config.EventsHistoryWindow)
	prefix := keyPrefix(config.Prefix)
	f, err := detectSource(client, prefix, opts)
	if err != nil {
		_ = client.Close()
		return nil, fmt.Errorf("etcd at %s: %w", strings.Join(client.Endpoints(), ","), err)
	}
	interval := config.CompactionInterval
	if opts.ReadOnly {
		interval = 0
	}
	return startCluster(client, startCompactor(client.Client, interval, opts.ReadOnly, opts.Logger), f, prefix, opts, blocks)
}

// startCluster mirrors the feed; without a source its storages read from etcd. The cluster owns the
// client and the compactor, which may be nil.
func startCluster(client *kubernetes.Client, compactor *compactor, f detectedSource, prefix string, opts Options, blocks *blockcache.Cache) (*cluster, error) {
	c := &cluster{opts: opts, prefix: prefix, client: client, compactor: compactor, blocks: blocks, detected: f,
		getPlaces: make(etcdread.Places, maxEtcdGets), listPlaces: make(etcdread.Places, maxEtcdPages), ranges: etcdsource.Bounded(client.Client)}
	c.tokens = pages.NewTokens(client.KV, prefix, pages.TokenOptions{
		Seal:        opts.enabled(SealedContinueTokens),
		RefusePlain: opts.RefusePlainTokens,
		ReadOnly:    opts.ReadOnly,
		Transformer: opts.TokenTransformer,
		Rotation:    opts.TokenKeyRotation,
		Keep:        2 * opts.Window.MaxAge,
		Logger:      opts.Logger,
	})
	if f.source == nil {
		return c, nil
	}
	if err := c.startMirror(); err != nil {
		c.close()
		return nil, err
	}
	c.observe()
	return c, nil
}

// startMirror starts the mirror of the detected source, the feed of other replicas, and the
// comparison with etcd.
func (c *cluster) startMirror() error {
	opts, f := c.opts, c.detected
	source, tap := f.source, feedTap(opts, f, c.prefix)
	if tap != nil {
		source = tap.Source()
	}
	m, err := mirror.New(mirror.Options{
		Prefix:         c.prefix,
		Source:         source,
		Window:         opts.Window,
		Replay:         opts.replayBounds(),
		UnclaimedBytes: opts.UnclaimedBytes,
		IdleProgress:   opts.ProgressInterval,
		EventsOnly:     f.eventsOnly,
		EveryRevision:  f.progressMode == etcdsource.ByEvents,
		Logger:         opts.Logger,
	})
	if err != nil {
		return err
	}
	c.mirror = m
	if tap != nil {
		if err := tap.Attach(m, pb.NewKVClient(c.client.ActiveConnection())); err != nil {
			return fmt.Errorf("serve the feed of etcd at %s: %w", c.endpoints(), err)
		}
	}
	c.checker = consistency.New(consistency.Options{
		Interval:         opts.ConsistencyCheckInterval,
		Off:              !opts.enabled(DetectCacheInconsistency),
		VerifiesVersions: m.VerifiesVersions,
		OnFailure:        onInconsistency,
		Logger:           opts.Logger,
	})
	if c.compactor != nil {
		c.compactor.add(m)
	}
	return nil
}

// observe starts the goroutines of the metrics and of the lag of the mirror.
func (c *cluster) observe() {
	ctx, cancel := context.WithCancel(context.Background())
	c.running.stop = cancel
	c.cache = metrics.NewCache(c.mirror)
	c.running.wg.Go(func() { c.cache.Run(ctx) })
	if c.opts.ReadOnly {
		c.running.wg.Go(func() { c.lag.follow(ctx, c.mirror) })
	}
	c.scraped = &metrics.Cluster{
		Mirror:       c.mirror,
		Blocks:       c.blocks,
		Prefix:       c.prefix,
		ProgressMode: c.detected.progressMode,
		Endpoints:    c.endpoints,
		EtcdPages:    func() (reading, limit int) { return len(c.listPlaces), cap(c.listPlaces) },
		AddLag:       c.addLag,
	}
	if c.compactor != nil {
		c.scraped.Compactor = c.compactor.Compactor
	}
	metrics.Add(c.scraped)
}

// feedTap returns the tap of Options.FeedServer on a source, nil if there is none. A store without
// reliable progress cannot be followed through this server.
func feedTap(opts Options, f detectedSource, prefix string) *etcdfeed.Tap {
	switch {
	case opts.FeedServer == nil:
		return nil
	case f.progressMode != etcdsource.ByProgress:
		opts.Logger.Error("Cannot feed other replicas: etcd has no reliable progress; requests to the feed are refused", "freshness", f.progressMode.String())
		opts.FeedServer.Refuse("this replica cannot feed others, because its etcd has no reliable progress (" + f.progressMode.String() +
			"); connect to etcd instead, or upgrade it and restart the replica")
		return nil
	}
	return opts.FeedServer.Tap(f.source, prefix)
}

// panicEnv makes a check that finds a difference end the process, for tests: the variable, and its
// effect, are upstream's.
const panicEnv = "KUBE_WATCHCACHE_CONSISTENCY_CHECKER"

// onInconsistency panics if the environment variable requests it.
func onInconsistency(r consistency.Result) {
	if on, _ := strconv.ParseBool(os.Getenv(panicEnv)); on {
		panic(fmt.Sprintf("memory differs from etcd (%s): %+v", panicEnv, r))
	}
}

// newStore makes a storage for a resource; see Engine.Decorator.
func (c *cluster) newStore(config *storagebackend.ConfigForResource, resourcePrefix string, reverse upstream.ReverseKeyFunc,
	newFunc, newListFunc func() runtime.Object, getAttrs storage.AttrFunc, indexers *cache.Indexers, uncached bool) (storage.Interface, factory.DestroyFunc, error) {
	transformer := config.Transformer
	if transformer == nil {
		transformer = identity.NewEncryptCheckTransformer()
	}
	return c.open(storeConfig{
		Codec: config.Codec,
		Kind: kind.Kind{
			GroupResource: config.GroupResource, NewFunc: newFunc, NewListFunc: newListFunc, GetAttrs: getAttrs, Declared: index.DeclaredFields(indexers),
		},
		ResourcePrefix: resourcePrefix,
		ReverseKey:     reverse,
		Transformer:    transformer,
		Leases:         config.LeaseManagerConfig,
		Uncached:       uncached,
	})
}

func (c *cluster) open(cfg storeConfig) (storage.Interface, factory.DestroyFunc, error) {
	versioner := storage.APIObjectVersioner{}
	cfg.Decoder = etcd3.NewDefaultDecoder(cfg.Codec, versioner)
	if c.opts.Kinds != nil {
		cfg.Form = c.opts.Kinds(cfg.GroupResource, cfg.NewFunc())
	}
	transformer := cfg.Transformer
	keys, err := keyrotation.KeysOf(transformer, cfg.GroupResource)
	if err != nil {
		c.opts.Logger.Error("Cannot detect reloads of the encryption configuration; serving the resource from etcd",
			"resource", cfg.GroupResource.String(), "err", err)
		cfg.Uncached = true
	}
	unsafeDelete := utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion)
	if unsafeDelete {
		transformer = etcd3.WithCorruptObjErrorHandlingTransformer(transformer)
		cfg.Decoder = etcd3.WithCorruptObjErrorHandlingDecoder(cfg.Decoder)
	}
	conversions := c.conversions(&cfg)
	var compactor etcd3.Compactor // an interface value that is nil without a compactor
	if c.compactor != nil {
		compactor = c.compactor
	}
	etcd, err := upstream.NewEtcd(c.client, compactor, cfg.Codec, cfg.NewFunc, cfg.NewListFunc, cfg.ReverseKey, c.prefix, cfg.ResourcePrefix,
		cfg.GroupResource, transformer, cfg.Leases, conversions.Decoder(cfg.Decoder), versioner)
	if err != nil {
		return nil, nil, fmt.Errorf("create storage of %s: %w", cfg.GroupResource, err)
	}
	var raw storage.Interface = etcd
	if unsafeDelete {
		raw = etcd3.NewStoreWithUnsafeCorruptObjectDeletion(raw, cfg.GroupResource)
	}
	if c.opts.ReadOnly {
		raw = readOnly(raw, cfg.GroupResource)
	}
	var once sync.Once
	if c.mirror == nil {
		return c.newDirect(raw, cfg), func() { once.Do(etcd.Close) }, nil
	}
	resource, err := c.claim(cfg)
	if err != nil {
		etcd.Close()
		return nil, nil, fmt.Errorf("create storage of %s: %w", cfg.GroupResource, err)
	}
	if cfg.Uncached {
		return c.newDirect(raw, cfg), func() { once.Do(func() { resource.Release(); etcd.Close() }) }, nil
	}
	c.cache.Add(resource, cfg.GroupResource)
	s := newStore(c, raw, resource, cfg, objects.Config{
		Kind: cfg.Kind, Transformer: transformer, Keys: keys, Blocks: c.blocks, Conversions: conversions,
	}, unsafeDelete)
	unchecked := c.checker.Add(resource, cfg.GroupResource)
	unfollowed := c.reloads.Add(s.view)
	return s, func() { once.Do(func() { unchecked(); unfollowed(); s.stop(); etcd.Close() }) }, nil
}

// conversions returns the conversions of a storage that may block, nil if it has none.
func (c *cluster) conversions(cfg *storeConfig) *objects.Conversions {
	if _, custom := cfg.NewFunc().(runtime.Unstructured); !custom || c.opts.Converts != nil && !c.opts.Converts(cfg.GroupResource) {
		return nil
	}
	return objects.NewConversions(cfg.NewFunc, metrics.Conversions(cfg.GroupResource))
}

func (c *cluster) claim(cfg storeConfig) (*mirror.Resource, error) {
	name := strings.Trim(cfg.ResourcePrefix, "/")
	c.resources.Store(name, cfg.GroupResource.String())
	prefix := c.prefix + name + "/"
	if cfg.Uncached {
		return c.mirror.Exclude(prefix)
	}
	return c.mirror.Claim(prefix)
}

// undecodableFor is watch.Env.RetryFor.
const undecodableFor = 30 * time.Second

func newStore(c *cluster, etcd storage.Interface, r *mirror.Resource, cfg storeConfig, view objects.Config, unsafeDelete bool) *Store {
	s := &Store{
		cluster:  c,
		etcd:     etcd,
		group:    cfg.GroupResource,
		keys:     pages.Keys{PathPrefix: c.prefix, ResourcePrefix: cfg.ResourcePrefix},
		mirror:   c.mirror,
		resource: r,
		fresh:    freshness.New(c.mirror, r, cfg.GroupResource, c.detected.eventsOnly),
		sizes:    utilfeature.DefaultFeatureGate.Enabled(features.SizeBasedListCostEstimate),
	}
	lists, watches := metrics.NewLists(cfg.GroupResource), metrics.NewWatches(cfg.GroupResource)
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.view = objects.New(view, func() { dropReplaced(s) })
	s.selections = index.New(index.Config{
		Resource:  r,
		View:      s.view,
		Blocks:    c.blocks,
		Context:   s.ctx,
		Logger:    c.opts.Logger,
		Eager:     index.EagerFields(cfg.GroupResource, cfg.NewFunc(), cfg.GetAttrs),
		Start:     s.goroutines.Start,
		Unindexed: watches.Unindexed,
		Filtered:  watches.Filtered,
		Read:      lists.Read,
		Refused:   lists.IndexRefused,
		Measured:  lists.Indexes,
	})
	s.lists = &list.Env{
		Mirror: c.mirror, Memory: r, Fresh: s.fresh, View: s.view, Selections: s.selections,
		Keys:  s.keys,
		Pages: c.pages(cfg.GroupResource),
		Etcd:  etcd,
		Past:  etcdread.Reader{Places: c.listPlaces, Ranges: c.ranges, Mirror: c.mirror, Group: cfg.GroupResource, Keep: list.KeepBytes},
		Gates: list.Gates{
			Latest: c.detected.latestReads.lists, AtRevision: c.opts.enabled(ListFromCacheSnapshot), UnsafeDelete: unsafeDelete,
			Shards: utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch),
		},
		Metrics: lists,
	}
	s.watches = &watch.Env{
		Lists: s.lists, Running: &c.watches, Goroutines: &s.goroutines, Context: s.ctx, Conversions: view.Conversions,
		Metrics: watches, Logger: c.opts.Logger, RetryFor: undecodableFor,
		Gates: watch.Gates{Bookmarks: c.opts.enabled(WatchBookmark), WatchList: utilfeature.DefaultFeatureGate.Enabled(features.WatchList)},
	}
	context.AfterFunc(s.ctx, func() { c.endStreams(s) })
	return s
}

// endStreams ends the streams of a store that is being destroyed.
func (c *cluster) endStreams(s *Store) {
	c.watches.Every(func(w watchset.Watch) {
		if st, ok := w.(*watch.Stream); ok && st.Env() == s.watches {
			st.Abort(watchset.ByStorage)
		}
	})
}
