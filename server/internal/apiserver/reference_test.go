package apiserver_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/registry/core/configmap/storage"

	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/readpath"
	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/embedetcd"
	"github.com/stratakube/strata/server/internal/up"
)

const referenceFile = "../../../docs/reference.md"

var update = flag.Bool("update", false, "write the generated tables to docs/reference.md")

// TestReference_TablesAreCurrent compares the tables in docs/reference.md with the flags of the commands and with the metrics
// that the packages register. With -update (make generate) it writes the tables.
func TestReference_TablesAreCurrent(t *testing.T) {
	t.Setenv(datadir.EnvVar, "") // the default of a flag of strata up
	before, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	after := before
	for _, table := range []struct{ name, text string }{
		{"flags of strata apiserver", flagTable(apiserver.NewCommand().Flags(), func(f *pflag.Flag) bool {
			return f.Name == "engine" || strings.HasPrefix(f.Name, "strata-")
		})},
		{"flags of strata up", flagTable(up.NewCommand().Flags(), func(f *pflag.Flag) bool { return f.Name != "help" })},
		{"metrics", metricTable(t)},
	} {
		if after, err = replaceTable(after, table.name, table.text); err != nil {
			t.Fatal(err)
		}
	}
	switch {
	case bytes.Equal(before, after):
	case *update:
		if err := os.WriteFile(referenceFile, after, 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("docs/reference.md is stale (make generate); first line that differs: %s", firstDifference(before, after))
	}
}

// TestReference_HasGates checks the rows of the gates: name and default.
func TestReference_HasGates(t *testing.T) {
	text, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	for name, spec := range kubestorage.Gates() {
		state := "off"
		if spec.Default {
			state = "on"
		}
		if row := fmt.Sprintf("\n| `%s` | %s", name, state); !bytes.Contains(text, []byte(row)) {
			t.Errorf("docs/reference.md has no row %q", strings.TrimSpace(row))
		}
	}
}

// replaceTable replaces the lines between the markers of a table.
func replaceTable(text []byte, name, table string) ([]byte, error) {
	begin, end := fmt.Sprintf("<!-- generated: %s -->\n", name), fmt.Sprintf("<!-- end of %s -->\n", name)
	head, rest, found := bytes.Cut(text, []byte(begin))
	_, tail, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return nil, fmt.Errorf("docs/reference.md lacks the markers %q and %q", begin, end)
	}
	return slices.Concat(head, []byte(begin), []byte(table), []byte(end), tail), nil
}

func firstDifference(a, b []byte) string {
	lines := strings.Split(string(b), "\n")
	for i, line := range strings.Split(string(a), "\n") {
		if i >= len(lines) || lines[i] != line {
			return line
		}
	}
	return "at the end"
}

// flagTable lists the visible flags of own, in the order of --help.
func flagTable(flags *pflag.FlagSet, own func(*pflag.Flag) bool) string {
	table := "| flag | type | default | meaning |\n| --- | --- | --- | --- |\n"
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || !own(f) {
			return
		}
		usage, _, _ := strings.Cut(f.Usage, " Options are:")
		kind := strings.ReplaceAll(f.Value.Type(), "|", " or ")
		table += fmt.Sprintf("| `--%s` | %s | %s | %s |\n", f.Name, kind, code(defaultOf(f)), cell(usage))
	})
	return table
}

// defaultOf returns the default of a flag, durations without zero units.
func defaultOf(f *pflag.Flag) string {
	if f.Value.Type() == "duration" {
		d := regexp.MustCompile(`(\D)0s$`).ReplaceAllString(f.DefValue, "$1")
		return regexp.MustCompile(`(\D)0m$`).ReplaceAllString(d, "$1")
	}
	return strings.Trim(f.DefValue, "[]")
}

// metric is a descriptor of a registry.
type metric struct{ name, kind, labels, help string }

func metricTable(t *testing.T) string {
	table := "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n"
	for _, m := range registeredMetrics(t) {
		table += fmt.Sprintf("| `%s` | %s | %s | %s |\n", m.name, m.kind, code(m.labels), cell(m.help))
	}
	return table
}

// descriptor matches the text of a prometheus.Desc, which has no other accessors: name, help and labels.
var descriptor = regexp.MustCompile(`^Desc\{fqName: ("[^"]*"), help: ("(?:[^"\\]|\\.)*"),.* variableLabels: \{([^}]*)\}\}$`)

// registeredMetrics returns the metrics of Strata by name. The descriptors of a registry include the metrics without a series.
func registeredMetrics(t *testing.T) (found []metric) {
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
		if err != nil {
			t.Fatal(err)
		}
		help, err := strconv.Unquote(parts[2])
		if err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(name, "strata_") {
			continue
		}
		found = append(found, metric{name: name, kind: kindOf(t, registry, d, name), labels: strings.ReplaceAll(parts[3], ",", ", "),
			help: strings.TrimPrefix(help, "[ALPHA] ")})
	}
	slices.SortFunc(found, func(a, b metric) int { return cmp.Compare(a.name, b.name) })
	return found
}

// kindOf returns the type of a metric: that of its collector or, if the collector has several metrics, by the rule that counters,
// and only they, end in _total. TestEngines_PassSameServerChecks compares the result with /metrics.
func kindOf(t *testing.T, registry prometheus.Registerer, d *prometheus.Desc, name string) string {
	var known prometheus.AlreadyRegisteredError
	if err := registry.Register(described{d}); err == nil {
		t.Fatalf("%s was not registered", name)
	} else if errors.As(err, &known) {
		switch c := known.ExistingCollector.(type) {
		case *metrics.Counter, *metrics.CounterVec:
			return "counter"
		case *metrics.Histogram, *metrics.HistogramVec:
			return "histogram"
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

// openCluster makes a storage and a read path, which register all metrics.
func openCluster(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{Dir: t.TempDir(), ClientURL: "http://127.0.0.1:0", UnsafeNoFsync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(etcd.Close)
	engine := kubestorage.New(kubestorage.Options{})
	t.Cleanup(engine.Close)
	config := storagebackend.NewDefaultConfig("/registry", legacyscheme.Codecs.LegacyCodec(corev1.SchemeGroupVersion))
	config.Transport.ServerList = []string{etcd.Endpoint()}
	configMaps, err := storage.NewREST(engine.RESTOptionsGetter(undecorated{config}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(configMaps.Destroy)
	if err := engine.WaitLoaded(ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
	readpath.New(readpath.Config{})
}

// undecorated is the getter of a server that does not cache.
type undecorated struct{ config *storagebackend.Config }

func (u undecorated) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig: u.config.ForResource(resource), Decorator: generic.UndecoratedStorage, ResourcePrefix: resource.Resource,
	}, nil
}

// named matches names of metrics, flags and gates in help texts.
var named = regexp.MustCompile(`--[a-z][a-z-]*[a-z]|\b(strata|apiserver)_[a-z_]+|\b(compact_rev_key|GOMEMLIMIT|STRATA_DATA)\b|(GET|POST) /[a-z/]+`)

// cell formats a help text as a cell of a table.
func cell(help string) string {
	help = named.ReplaceAllString(help, "`$0`")
	return strings.ReplaceAll(strings.ReplaceAll(help, "|", `\|`), "*", `\*`)
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
