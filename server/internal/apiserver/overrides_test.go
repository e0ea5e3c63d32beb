package apiserver

import (
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/funcr"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func TestParseOverrides_InvalidValue_IsNamed(t *testing.T) {
	for name, test := range map[string]struct {
		values []string
		want   string
	}{
		"no servers":      {[]string{"/events"}, `"/events" is not group/resource#servers`},
		"no group":        {[]string{"events#http://b:1"}, `"events#http://b:1" is not group/resource#servers`},
		"no resource":     {[]string{"apps/#http://b:1"}, `"apps/#http://b:1" is not group/resource#servers`},
		"an empty server": {[]string{"/events#http://b:1;"}, "is not group/resource#servers"},
		"no URL":          {[]string{"/events#b:2379"}, `"b:2379" is not the URL of an etcd`},
		"no host":         {[]string{"/events#http://"}, "is not the URL of an etcd"},
		"two etcds":       {[]string{"/events#http://b:1", "events.k8s.io/events#http://c:1"}, "events is in two etcds, http://b:1 and http://c:1"},
	} {
		t.Run(name, func(t *testing.T) {
			o := etcdOptions("http://a:1")
			o.EtcdServersOverrides = test.values
			if _, err := parseOverrides(o); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

func TestOverrides_Servers(t *testing.T) {
	o := etcdOptions("http://a:1", "http://a:2")
	o.EtcdServersOverrides = []string{
		"events.k8s.io/events#http://b:1;http://b:2",
		"coordination.k8s.io/leases#http://b:2;http://b:1",
		"example.com/*#http://c:1",
		"example.com/kept#http://a:2;http://a:1",
		"/services#http://d:1",
	}
	parsed, err := parseOverrides(o)
	testcheck.NoError(t, err)
	b := []string{"http://b:1", "http://b:2"}
	for resource, want := range map[schema.GroupResource][]string{
		{Resource: "events"}:                         b,
		{Group: "events.k8s.io", Resource: "events"}: b,
		// in the order of the first override, so that both are in one cluster
		{Group: "coordination.k8s.io", Resource: "leases"}: b,
		{Group: "example.com", Resource: "widgets"}:        {"http://c:1"},
		{Group: "example.com", Resource: "kept"}:           {"http://a:1", "http://a:2"},
		{Group: "example.org", Resource: "widgets"}:        nil,
		{Resource: "pods"}:                                 nil,
	} {
		if got := parsed.servers(resource); !slices.Equal(got, want) {
			t.Errorf("servers of %s: %v, want %v", resource, got, want)
		}
	}
	for servers, want := range map[string]bool{"http://b:1,http://b:2": true, "http://c:1": true, "http://a:1,http://a:2": false, "http://d:1": false} {
		if got := parsed.deferrable(storagebackend.TransportConfig{ServerList: strings.Split(servers, ",")}); got != want {
			t.Errorf("a start without %s: %v, want %v", servers, got, want)
		}
	}
}

func TestOverrides_ChecksAreNamedAndNotInLivez(t *testing.T) {
	o := etcdOptions("http://a:1")
	o.EtcdServersOverrides = []string{"/events#http://b:1", "coordination.k8s.io/leases#http://b:1", "/pods#unix:///run/etcd.sock"}
	parsed, err := parseOverrides(o)
	testcheck.NoError(t, err)
	var checks []healthz.HealthChecker
	for _, name := range []string{"ping", "etcd", "etcd-override-0", "etcd-override-readiness-0", "etcd-override-1"} {
		checks = append(checks, healthz.NamedCheck(name, func(*http.Request) error { return nil }))
	}
	first := &genericapiserver.Config{HealthzChecks: checks, LivezChecks: checks, ReadyzChecks: checks}
	second := &genericapiserver.Config{HealthzChecks: checks, LivezChecks: checks, ReadyzChecks: checks}
	stopped := make(chan struct{})
	defer close(stopped)
	testcheck.NoError(t, parsed.installChecks(o.StorageConfig, stopped, first, second))
	names := func(checks []healthz.HealthChecker) (all []string) {
		for _, c := range checks {
			all = append(all, c.Name())
		}
		return all
	}
	want := []string{"ping", "etcd", "etcd-override-0:events,leases.coordination.k8s.io@b:1", "etcd-override-1:pods@run_etcd.sock"}
	for _, config := range []*genericapiserver.Config{first, second} {
		if got := names(config.ReadyzChecks); !slices.Equal(got, want) {
			t.Errorf("readyz: %q, want %q", got, want)
		}
		if got := names(config.LivezChecks); !slices.Equal(got, want[:2]) {
			t.Errorf("livez: %q, want %q", got, want[:2])
		}
	}
}

// TestOverrides_ResourceNotServed_IsLogged: an override with a wrong name has no effect, so the
// server names it when it has started.
func TestOverrides_ResourceNotServed_IsLogged(t *testing.T) {
	var lines []string // of the calls below only
	klog.SetLogger(funcr.New(func(_, args string) {
		if strings.Contains(args, "no API serves") {
			lines = append(lines, args)
		}
	}, funcr.Options{}))
	defer klog.ClearLogger()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch req.URL.Path {
		case "/api":
			_, _ = io.WriteString(w, `{"kind":"APIVersions","versions":["v1"]}`)
		case "/apis":
			_, _ = io.WriteString(w, `{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}]}]}`)
		case "/api/v1":
			_, _ = io.WriteString(w, `{"kind":"APIResourceList","groupVersion":"v1","resources":[{"name":"events","kind":"Event"}]}`)
		case "/apis/apps/v1":
			_, _ = io.WriteString(w, `{"kind":"APIResourceList","groupVersion":"apps/v1","resources":[{"name":"deployments","kind":"Deployment"}]}`)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer server.Close()
	o := etcdOptions("http://a:1")
	o.EtcdServersOverrides = []string{"/events#http://b:1", "apps/*#http://b:1", "/evnets#http://c:1", "example.com/*#http://c:1"}
	parsed, err := parseOverrides(o)
	testcheck.NoError(t, err)
	parsed.warnUnserved(t.Context(), &rest.Config{Host: server.URL})
	for i, want := range []string{`"resource"="evnets"`, `"resource"="*.example.com"`} {
		if i >= len(lines) || !strings.Contains(lines[i], want) {
			t.Fatalf("logged %q, want a line with %s", lines, want)
		}
	}
	if len(lines) != 2 {
		t.Errorf("logged %q, want two lines", lines)
	}
}
