package kine

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

const (
	figuresMaps   = 20_000
	figuresRounds = 3 // of each server, alternating: a minute each
)

// TestKine_LatencyComparedToStock measures Strata and the stock kube-apiserver of the same minor
// version (make stock) on one kine with 20,000 ConfigMaps of 1 KB (docs/benchmarks.md).
func TestKine_LatencyComparedToStock(t *testing.T) {
	if !harness.Long() {
		t.Skip("set STRATA_TEST_LONG=1")
	}
	stock := harness.StockAPIServer(t, "1.37")
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	t.Cleanup(cancel)
	env := harness.New(t)
	f := &fixture{T: t, ctx: ctx, kine: env.Kine(t)}
	f.fill(figuresMaps)
	start := map[string]func() *harness.Server{
		"strata": func() *harness.Server {
			return env.StartAPIServer(f.kine, "--engine="+harness.Strata, harness.Unchecked("no checks during the measurement"))
		},
		"stock": func() *harness.Server { return env.StartStock(stock, f.kine) },
	}
	servers := []string{"strata", "stock"}
	figures := map[string]map[string][]time.Duration{"strata": {}, "stock": {}}
	for round := range figuresRounds {
		for i := range servers {
			name := servers[(round+i)%len(servers)] // alternate the order
			began := time.Now()
			s := start[name]()
			harness.Check(t, s.Await(ctx, "/readyz"))
			figures[name][startToReady] = append(figures[name][startToReady], time.Since(began))
			f.measure(s, figures[name])
			harness.Check(t, s.Stop())
		}
	}
	t.Logf("%-40s %10s %10s %10s %10s", "", "strata p50", "p99", "stock p50", "p99")
	for _, what := range []string{startToReady, listAny, listAnyGzip, listConsistent, listConsistentGzip, smallConsistent, smallConsistentBusy, getConsistent, getConsistentBusy, delivery} {
		line := fmt.Sprintf("%-40s", what)
		for _, name := range servers {
			line += fmt.Sprintf(" %10s %10s", quantile(figures[name][what], 50), quantile(figures[name][what], 99))
		}
		t.Log(line)
	}
}

const (
	startToReady        = "start to ready"
	listAny             = "LIST any, 20,000 objects"
	listAnyGzip         = "LIST any, gzip, 20,000 objects"
	listConsistent      = "LIST consistent, 20,000 objects"
	listConsistentGzip  = "LIST consistent, gzip, 20,000 objects"
	smallConsistent     = "LIST consistent, 10 objects"
	smallConsistentBusy = "LIST consistent, 10 objects, a writer"
	getConsistent       = "GET consistent"
	getConsistentBusy   = "GET consistent, a writer"
	delivery            = "PUT sent to event received"
)

func quantile(all []time.Duration, percent int) string {
	if len(all) == 0 {
		return "-"
	}
	all = slices.Sorted(slices.Values(all))
	return all[min(len(all)-1, len(all)*percent/100)].Round(10 * time.Microsecond).String()
}

// fill writes n ConfigMaps of 1 KB to kine in an API server's format, ten of them in a separate
// namespace.
func (f *fixture) fill(n int) {
	f.Helper()
	codec := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	client := f.kine.Client()
	var group sync.WaitGroup
	const writers = 16
	for w := range writers {
		group.Go(func() {
			for i := w; i < n; i += writers {
				namespace := "bulk"
				if i < 10 {
					namespace = "few"
				}
				m := &corev1.ConfigMap{
					TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("map-%05d", i), Namespace: namespace, UID: types.UID(fmt.Sprint("uid-", i)),
						CreationTimestamp: metav1.Now()},
					Data: map[string]string{"value": strings.Repeat(fmt.Sprint(i%10), 900)},
				}
				var value bytes.Buffer
				if err := codec.Encode(m, &value); err != nil {
					f.Error(err)
					return
				}
				key := "/registry/configmaps/" + namespace + "/" + m.Name
				_, err := client.Txn(f.ctx).If(clientv3.Compare(clientv3.ModRevision(key), "=", 0)).Then(clientv3.OpPut(key, value.String())).Commit()
				if err != nil {
					f.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if f.Failed() {
		f.FailNow()
	}
}

// measure adds to the latencies of an engine.
func (f *fixture) measure(s *harness.Server, figures map[string][]time.Duration) {
	f.Helper()
	plainConfig := rest.CopyConfig(s.Config)
	plainConfig.DisableCompression = true
	plain, gzip := s.APIFor(plainConfig), s.API()
	const small, one = "/api/v1/namespaces/few/configmaps", "/api/v1/namespaces/few/configmaps/map-00000"
	repeat := func(what string, n int, api *harness.API, path, query string, atLeast int) {
		f.Helper()
		for i := range n + 2 {
			began := time.Now()
			r, err := api.Do(f.ctx, http.MethodGet, path, query, nil)
			took := time.Since(began)
			harness.Check(f.T, err)
			if r.Code != http.StatusOK || len(r.Body) < atLeast {
				f.Fatalf("%s: %d with %d bytes", what, r.Code, len(r.Body))
			}
			if i >= 2 { // the first ones fill caches
				figures[what] = append(figures[what], took)
			}
		}
	}
	const all = figuresMaps * 1000
	repeat(listAny, 15, plain, "/api/v1/configmaps", "resourceVersion=0", all)
	repeat(listConsistent, 15, plain, "/api/v1/configmaps", "", all)
	repeat(listAnyGzip, 8, gzip, "/api/v1/configmaps", "resourceVersion=0", all)
	repeat(listConsistentGzip, 8, gzip, "/api/v1/configmaps", "", all)
	repeat(smallConsistent, 300, plain, small, "", 1000)
	repeat(getConsistent, 300, plain, one, "", 1000)

	// A writer of another resource, like renewals of leases.
	ctx, cancel := context.WithCancel(f.ctx)
	var writer sync.WaitGroup
	writer.Go(func() {
		client := f.kine.Client()
		for i := 0; ctx.Err() == nil; i++ {
			_, _ = client.Put(ctx, "/registry/strata-test/written", fmt.Sprint(i))
			select {
			case <-time.After(20 * time.Millisecond):
			case <-ctx.Done():
			}
		}
	})
	repeat(smallConsistentBusy, 200, plain, small, "", 1000)
	repeat(getConsistentBusy, 200, plain, one, "", 1000)
	cancel()
	writer.Wait()

	w := harness.StartWatch(f.T, f.ctx, plain, small, "resourceVersion=0&fieldSelector=metadata.name%3Dmap-00001")
	if _, err := w.Next(f.ctx); err != nil { // the initial event of the object
		f.Fatal(err)
	}
	for i := range 200 {
		began := time.Now()
		if _, err := plain.Patch(f.ctx, small+"/map-00001", fmt.Sprintf(`{"data":{"n":"%d"}}`, i)); err != nil {
			f.Fatal(err)
		}
		if _, err := w.Next(f.ctx); err != nil {
			f.Fatal(err)
		}
		figures[delivery] = append(figures[delivery], time.Since(began))
	}
}
