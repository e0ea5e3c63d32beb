// Package stall tests a server whose etcd answers requests but delivers no watch events, so that
// memory cannot catch up: a proxy between the two blocks the events. Consistent lists have to be
// refused then, at no cost to etcd; reads of one object and writes have to continue.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_STALL  how long the load on the stalled server lasts (default 6s)
package stall

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

const (
	testTimeout = 10 * time.Minute // of a failing test

	// for the load, each with a connection of its own: HTTP/2 limits the requests per connection
	clients = 8

	mapsPath   = "/api/v1/namespaces/default/configmaps"
	newest     = "newest" // a ConfigMap that is changed at each phase of a test
	newestPath = mapsPath + "/" + newest
	leasesPath = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
)

// stallTime is the duration of the load on a stalled server.
func stallTime(t *testing.T) time.Duration {
	text := os.Getenv("STRATA_TEST_STALL")
	if text == "" {
		return 6 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal("STRATA_TEST_STALL:", err)
	}
	return d
}

// scene is a server with a proxy in front of its etcd. Only the test and the server itself write to
// it.
type scene struct {
	etcd   *harness.Etcd
	proxy  *harness.Proxy
	server *harness.Server
	api    *harness.API
	load   []*harness.API

	took latencies
}

// newScene starts a scene with objects ConfigMaps of about 1 KB, and one more.
func newScene(t *testing.T, ctx context.Context) *scene {
	e := harness.New(t).DefaultGC()
	s := &scene{etcd: e.Etcd()}
	s.proxy = e.Proxy(s.etcd)
	s.server = e.APIServer(s.proxy.Etcd(), "--disable-admission-plugins=ServiceAccount")
	s.api = s.server.API()
	for range clients {
		config := *s.server.Config
		// client-go shares no connections of clients with their own dialer
		config.Dial = (&net.Dialer{}).DialContext
		config.DisableCompression = true
		s.load = append(s.load, s.server.APIFor(&config))
	}
	value := strings.Repeat("0123456789abcdef", 48)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(clients)
	for i := range objects {
		group.Go(func() error {
			_, err := s.load[i%clients].Create(ctx, mapsPath, configMap(fmt.Sprintf("map-%04d", i), value))
			return err
		})
	}
	group.Go(func() error {
		_, err := s.api.Create(ctx, mapsPath, configMap(newest, "created"))
		return err
	})
	harness.Check(t, group.Wait())
	return s
}

// stall starts a stall, and writes an object, whose event memory does not receive. It returns the
// object.
func (s *scene) stall(t *testing.T, ctx context.Context) harness.Object {
	t.Helper()
	s.proxy.Stall(true)
	o, err := s.api.Update(ctx, newestPath, configMap(newest, "stalled"))
	harness.Check(t, err)
	return o
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

func configMap(name, value string) object {
	return object{"metadata": object{"name": name}, "data": object{"value": value}}
}

// lease returns a Lease after n renewals. An empty resource version is omitted.
func lease(name string, n int, resourceVersion string) object {
	return object{"metadata": object{"name": name, "resourceVersion": resourceVersion}, "spec": object{
		"holderIdentity": "holder", "leaseDurationSeconds": 15,
		"renewTime": time.Unix(int64(n), 0).UTC().Format("2006-01-02T15:04:05.000000Z07:00"),
	}}
}
