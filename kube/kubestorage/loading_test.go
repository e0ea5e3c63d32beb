package kubestorage

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/test/testetcd"
)

// An engine that has loaded reports the objects of etcd; the names of resources come from the keys,
// whose prefixes may differ from them.
func TestLoadState_LoadedEngine_HasNumbersOfEtcd(t *testing.T) {
	client := startEtcd(t, testetcd.Config{})
	for i := range 7 {
		if _, err := client.Put(t.Context(), fmt.Sprintf("/registry/pods/default/p%d", i), "x"); err != nil {
			t.Fatal(err)
		}
	}
	e := loadedEngine(t, client.Endpoints())
	var state LoadState
	eventually(t, "etcd counts its keys", func() bool {
		state = e.LoadState(t.Context())
		return state.Total != 0
	})
	if state.Loading || state.Objects != 7 || state.Total != 7 {
		t.Errorf("%+v, want 7 of 7 objects, loaded", state)
	}
	if _, err := client.Delete(t.Context(), "/registry/pods/default/p0"); err != nil {
		t.Fatal(err)
	}
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if state := e.LoadState(canceled); state.Total != 7 {
		t.Errorf("%+v, want the total of the first call", state)
	}
}

func TestLoadState_EtcdDoesNotAnswer_HasNoTotal(t *testing.T) {
	t.Parallel()
	e := loadedEngine(t, startEtcd(t, testetcd.Config{}).Endpoints())
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if state := e.LoadState(canceled); state.Total != 0 {
		t.Errorf("%+v, want no total", state)
	}
}

func TestLoadState_Resource_IsThatOfTheKey(t *testing.T) {
	c := &cluster{prefix: "/registry/"}
	c.resources.Store("pods", "pods")
	c.resources.Store("services/specs", "services")
	c.resources.Store("example.com/widgets", "widgets.example.com")
	for key, want := range map[string]string{
		"":                                   "",
		"/registry/pods/default/a":           "pods",
		"/registry/services/specs/default/a": "services",
		"/registry/others/default/a":         "others",
		"/registry/example.com/widgets/a":    "widgets.example.com",
		"/registry/compact_rev_key":          "compact_rev_key",
	} {
		if got := c.resourceOf(key); got != want {
			t.Errorf("%s: resource %q, want %q", key, got, want)
		}
	}
}

// loadedEngine returns an engine on an etcd, with a storage that is loaded.
func loadedEngine(t *testing.T, endpoints []string) *Engine {
	t.Helper()
	e := &openedEngine{New(Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}), storagebackend.ConfigForResource{Config: storagebackend.Config{
		Prefix:               "/registry",
		Transport:            storagebackend.TransportConfig{ServerList: endpoints},
		Codec:                testCodec(),
		DBMetricPollInterval: time.Hour,
		EventsHistoryWindow:  storagebackend.DefaultEventsHistoryWindow,
		LeaseManagerConfig:   etcd3.NewDefaultLeaseManagerConfig(),
	}}}
	t.Cleanup(e.Close)
	requireSharedMirror(t, e.open(t, schema.GroupResource{Resource: "pods"}))
	return e.Engine
}
