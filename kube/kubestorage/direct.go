package kubestorage

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
)

// direct is a storage that reads from etcd. It answers probes without a read. Its lists and
// continue tokens have the same form as those of cached resources, and Drain ends its watches too.
type direct struct {
	storage.Interface
	pages       pages.Pages
	listMetrics metrics.Lists

	keys    pages.Keys
	running *watchset.Watches
}

func (c *cluster) newDirect(etcd storage.Interface, cfg storeConfig) direct {
	return direct{
		Interface:   etcd,
		pages:       c.pages(cfg.GroupResource),
		listMetrics: metrics.NewLists(cfg.GroupResource),
		keys:        pages.Keys{PathPrefix: c.prefix, ResourcePrefix: cfg.ResourcePrefix},
		running:     &c.watches,
	}
}

func (d direct) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	endProbe(ctx, nil, key, nil)
	return d.Interface.Get(ctx, key, opts, out)
}

func (d direct) GetList(ctx context.Context, key string, opts storage.ListOptions, out runtime.Object) error {
	endProbe(ctx, nil, key, nil)
	prefix, err := d.keys.Prepare(key, opts.Recursive)
	if err != nil {
		return err
	}
	if opts, err = d.pages.Open(ctx, prefix, opts); err != nil {
		return d.listMetrics.Failed(err)
	}
	d.listMetrics.Count(opts, metrics.SourceEtcd, metrics.ReasonUncached)
	return d.listMetrics.Failed(d.pages.List(ctx, d.Interface, key, prefix, d.keys.Scope(ctx, prefix, opts), opts, out))
}

func (d direct) Watch(ctx context.Context, key string, opts storage.ListOptions) (apiwatch.Interface, error) {
	endProbe(ctx, nil, key, nil)
	return d.running.Direct(ctx, d.Interface, key, opts, watch.IsWithoutDrain(ctx))
}
