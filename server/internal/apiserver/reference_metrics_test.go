package apiserver_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	storagemetrics "k8s.io/apiserver/pkg/storage/metrics"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/registry/core/configmap/storage"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/loadshed"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// metric is a descriptor of a registry.
type metric struct{ name, kind, labels, help string }

// metricDocs is docs/metrics.yaml: the normal range of each metric, and the action outside of it.
type metricDocs struct{ Strata, Cache map[string]metricDoc }

type metricDoc struct {
	Meaning string // of a metric of Cache; a metric of Strata has its help text
	Normal  string
	Action  string
}

func readMetricDocs(t *testing.T) (docs metricDocs) {
	t.Helper()
	text, err := os.ReadFile("../../../docs/metrics.yaml")
	testcheck.NoError(t, err)
	if err := yaml.UnmarshalStrict(text, &docs); err != nil {
		t.Fatalf("docs/metrics.yaml: %v", err)
	}
	return docs
}

// metricTable returns a row for each metric. It fails the test for a metric without documentation,
// and for documentation without a metric.
func metricTable(t *testing.T, registered []metric, docs map[string]metricDoc) string {
	t.Helper()
	table := "| metric | type | labels | meaning | normal range; action outside of it |\n| --- | --- | --- | --- | --- |\n"
	left := maps.Clone(docs)
	for _, m := range registered {
		doc := docs[m.name]
		delete(left, m.name)
		if doc.Normal == "" || doc.Action == "" {
			t.Errorf("docs/metrics.yaml has no normal range or no action for %s", m.name)
		}
		meaning := doc.Meaning
		if meaning == "" {
			meaning = cell(m.help)
		}
		table += fmt.Sprintf("| `%s` | %s | %s | %s | %s |\n", m.name, m.kind, code(m.labels), meaning, rangeAndAction(doc))
	}
	for name := range left {
		t.Errorf("docs/metrics.yaml has an entry for %s, which no server has", name)
	}
	return table
}

// alertNames are the alerts of a metric at the end of its action. The table omits them: an alert
// names its metric.
var alertNames = regexp.MustCompile(` \(alerts? [A-Za-z, ]+\)$`)

// rangeAndAction returns the last cell of a metric: its normal range, and the action outside of it.
// The cell omits a range that depends on clients, a constant, and an action "none".
func rangeAndAction(doc metricDoc) string {
	var parts []string
	if doc.Normal != "depends on clients" && doc.Normal != "constant" {
		parts = append(parts, doc.Normal)
	}
	if doc.Action != "none" {
		parts = append(parts, alertNames.ReplaceAllString(doc.Action, ""))
	}
	return metricNames(strings.Join(parts, "; "))
}

// metricNames puts names of metrics in backquotes, unless they are.
func metricNames(text string) string {
	return regexp.MustCompile("`?\\b((strata|apiserver)_[a-z_]+)`?").ReplaceAllString(text, "`$1`")
}

// descriptor matches the text of a prometheus.Desc, which has no other accessors: name, help and
// labels.
var descriptor = regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), help: ("(?:[^"\\]|\\.)*"),.* variableLabels: \{([^}]*)\}\}$`)

// registeredMetrics returns the metrics of Strata and those of kube-apiserver's watch cache that
// the engine reports, by name. The descriptors of a registry include the metrics without a series.
func registeredMetrics(t *testing.T) (strata, cache []metric) {
	openCluster(t)
	registry, ok := legacyregistry.Registerer().(interface {
		prometheus.Registerer
		prometheus.Collector
	})
	if !ok {
		t.Fatalf("the registry, a %T, does not describe its metrics", legacyregistry.Registerer())
	}
	descs := make(chan *prometheus.Desc)
	go func() {
		defer close(descs)
		registry.Describe(descs)
	}()
	var all []*prometheus.Desc
	for d := range descs {
		all = append(all, d)
	}
	for _, d := range all {
		parts := descriptor.FindStringSubmatch(d.String())
		if parts == nil {
			t.Fatalf("cannot read descriptor %s", d)
		}
		name, err := strconv.Unquote(parts[1])
		testcheck.NoError(t, err)
		help, err := strconv.Unquote(parts[2])
		testcheck.NoError(t, err)
		into := &strata
		switch {
		case ofWatchCache.MatchString(name):
			into = &cache
		case !strings.HasPrefix(name, "strata_"):
			continue
		}
		*into = append(*into, metric{name: name, kind: kindOf(t, registry, d, name), labels: strings.ReplaceAll(parts[3], ",", ", "),
			help: strings.TrimPrefix(help, "[ALPHA] ")})
	}
	for _, metrics := range [][]metric{strata, cache} {
		slices.SortFunc(metrics, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
	}
	return strata, cache
}

// ofWatchCache matches the metrics of upstream's watch cache and its lists that the engine reports.
// The others count changes of a capacity that the engine does not have.
var ofWatchCache = regexp.MustCompile(`^(apiserver_(init_events|terminated_watchers|watch_shards|watch_filtered_events|storage_consistency_checks)_total|` +
	`apiserver_storage_list_.*|apiserver_watch_cache_.*|apiserver_watch_events_dispatch_duration_seconds|watch_cache_capacity)$`)

// kindOf returns the type of a metric: that of its collector or, if the collector has several
// metrics, by the rule that counters, and only they, end in _total.
// TestEngines_PassSameServerChecks compares the result with /metrics.
func kindOf(t *testing.T, registry prometheus.Registerer, d *prometheus.Desc, name string) string {
	var known prometheus.AlreadyRegisteredError
	if err := registry.Register(described{d}); err == nil {
		t.Fatalf("%s was not registered", name)
	} else if errors.As(err, &known) {
		switch c := known.ExistingCollector.(type) {
		case *metrics.Counter, *metrics.CounterVec:
			return "counter"
		case *metrics.Gauge, *metrics.GaugeVec:
			return "gauge"
		case *metrics.Histogram, *metrics.HistogramVec:
			return "histogram"
		case metrics.StableCollector: // computes its metrics at a scrape
		default:
			t.Fatalf("%s: type %T has no name here", name, c)
		}
	}
	if strings.HasSuffix(name, "_total") {
		return "counter"
	}
	return "gauge"
}

// described is a collector of one descriptor.
type described struct{ desc *prometheus.Desc }

func (d described) Describe(ch chan<- *prometheus.Desc) { ch <- d.desc }
func (d described) Collect(chan<- prometheus.Metric)    {}

// openCluster makes a storage, a read path and a Shedder, which register all metrics, and registers
// those of a gate that is off by default.
func openCluster(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true})
	testcheck.NoError(t, err)
	t.Cleanup(etcd.Close)
	engine := kubestorage.New(kubestorage.Options{})
	t.Cleanup(engine.Close)
	config := storagebackend.NewDefaultConfig("/registry", legacyscheme.Codecs.LegacyCodec(corev1.SchemeGroupVersion))
	config.Transport.ServerList = []string{etcd.Endpoint()}
	configMaps, err := storage.NewREST(engine.RESTOptionsGetter(undecorated{config}))
	testcheck.NoError(t, err)
	t.Cleanup(configMaps.Destroy)
	testcheck.NoError(t, engine.WaitLoaded(ctx, time.Minute))
	readpath.New(readpath.Options{})
	loadshed.New(nil)
	storagemetrics.Register() // by the route /metrics
	for _, gated := range []metrics.Registerable{cachermetrics.WatchShardsTotal, cachermetrics.WatchFilteredEventsTotal} {
		if err := legacyregistry.Register(gated); err != nil && !errors.As(err, &prometheus.AlreadyRegisteredError{}) {
			t.Fatal(err)
		}
	}
}

// undecorated is the getter of a server that does not cache.
type undecorated struct{ config *storagebackend.Config }

func (u undecorated) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig: u.config.ForResource(resource), Decorator: generic.UndecoratedStorage, ResourcePrefix: resource.Resource,
	}, nil
}
