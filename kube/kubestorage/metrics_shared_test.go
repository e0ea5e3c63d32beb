package kubestorage

import (
	"io"
	"log/slog"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Two servers in one process, each with an engine on the same etcd and prefix, have the same labels in their metrics.
func TestMetrics_TwoEnginesOfOneCluster_AreGathered(t *testing.T) {
	config := storagebackend.ConfigForResource{GroupResource: schema.GroupResource{Resource: "pods"}, Config: storagebackend.Config{
		Prefix:              "/registry",
		Transport:           storagebackend.TransportConfig{ServerList: startEtcd(t, nil).Endpoints()},
		Codec:               testCodec(),
		EventsHistoryWindow: storagebackend.DefaultEventsHistoryWindow,
		LeaseManagerConfig:  etcd3.NewDefaultLeaseManagerConfig(),
	}}
	families := func() (ready int) {
		t.Helper()
		gathered, err := legacyregistry.DefaultGatherer.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range gathered {
			if family.GetName() != "strata_mirror_ready" {
				continue
			}
			for _, m := range family.Metric {
				for _, label := range m.Label {
					if label.GetName() == "endpoints" && label.GetValue() == config.Transport.ServerList[0] {
						ready++
					}
				}
			}
		}
		return ready
	}
	for range 2 {
		engine := New(Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		t.Cleanup(engine.Close)
		opts, err := engine.RESTOptionsGetter(getterFunc(func(schema.GroupResource) generic.RESTOptions {
			return generic.RESTOptions{Decorator: generic.UndecoratedStorage}
		})).GetRESTOptions(config.GroupResource, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, destroy, err := opts.Decorator(&config, "/pods/", nil, newExamplePod, newExamplePodList, podAttrs, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(destroy) // before its engine is closed
		if n := families(); n != 1 {
			t.Errorf("strata_mirror_ready has %d series of the cluster, want 1", n)
		}
	}
}
