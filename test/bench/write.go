package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

var writeWorkloads = []Workload{{
	Name: "write-mixed", Title: "create, update, merge patch, apply and delete ConfigMaps, 8 clients", Op: "write", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
	// Enough for several collections of garbage on each engine. The smaller heap is collected more
	// often: fewer writes would meet one collection of it, and none of the other.
	Run:    mixedLoad{clients: size{8, 2}, rounds: size{800, 2}}.run,
	Wanted: []Bound{toUpstream("server CPU per write", 0.8), toUpstream(latencyP99, 0.8)},
}}

const configMapsPath = "/api/v1/namespaces/" + dataset.Namespace + "/configmaps"

// temporaryName is the name of an object that does not outlive its sample.
func temporaryName(s *Sample, i int) string { return fmt.Sprintf("temporary-%d-%d", s.Number, i) }

// mixedLoad is clients, with a connection each. Each creates an object, updates it, patches it,
// applies to it and deletes it, and then takes the next, for a number of rounds.
type mixedLoad struct {
	clients, rounds size
}

func (l mixedLoad) run(ctx context.Context, s *Sample) error {
	conns, err := s.Engine.DialAll(ctx, l.clients.at(s.Scale))
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	rounds := l.rounds.at(s.Scale)
	for i, conn := range conns {
		// opens the connection, and triggers the one-time loads of a fresh process
		if err := writeObject(ctx, conn, temporaryName(s, -1-i), func(time.Duration) {}); err != nil {
			return err
		}
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		clients, ctx := errgroup.WithContext(ctx)
		for i, conn := range conns {
			clients.Go(func() error {
				for round := range rounds {
					if err := writeObject(ctx, conn, temporaryName(s, i*rounds+round), s.Observe); err != nil {
						return err
					}
				}
				return nil
			})
		}
		return clients.Wait()
	})
	if err != nil {
		return err
	}
	s.Report("writes per second", PerSecond, float64(s.observed.ops())/s.observed.Elapsed.Seconds())
	return nil
}

// writeObject creates, updates, patches, applies and deletes a ConfigMap, and calls observe with
// the latency of each write.
func writeObject(ctx context.Context, conn *target.Conn, name string, observe func(time.Duration)) error {
	var body bytes.Buffer
	write := func(r target.Request) error {
		began := time.Now()
		err := conn.Read(ctx, r, &body)
		observe(time.Since(began))
		return err
	}
	path := configMapsPath + "/" + name
	cm := dataset.NamedConfigMap(name, 0, 0)
	cm.UID, cm.CreationTimestamp = "", metav1.Time{} // the server sets them
	object, err := json.Marshal(cm)
	if err != nil {
		return fmt.Errorf("encode a ConfigMap: %w", err)
	}
	if err := write(target.Request{Method: http.MethodPost, Path: configMapsPath, Body: object, Status: http.StatusCreated}); err != nil {
		return err
	}
	if err := json.Unmarshal(body.Bytes(), cm); err != nil {
		return fmt.Errorf("read the created ConfigMap %s: %w", name, err)
	}
	cm.Data["updated"] = "true"
	if object, err = json.Marshal(cm); err != nil {
		return fmt.Errorf("encode a ConfigMap: %w", err)
	}
	for _, r := range []target.Request{
		{Method: http.MethodPut, Path: path, Body: object},
		{Method: http.MethodPatch, Path: path, Body: []byte(`{"data":{"patched":"true"}}`), ContentType: "application/merge-patch+json"},
		{
			Method: http.MethodPatch, Path: path + "?fieldManager=bench-apply", ContentType: "application/apply-patch+yaml",
			Body: fmt.Appendf(nil, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q},"data":{"applied":"true"}}`, name),
		},
		{Method: http.MethodDelete, Path: path},
	} {
		if err := write(r); err != nil {
			return err
		}
	}
	return nil
}

// writesAtOnce is the number of writes in flight, more than etcd needs to keep up.
const writesAtOnce = 32

// writes are writes beside the measured requests. They go to etcd directly, from this process, with
// values that were encoded before: so their only cost to an engine is its reaction to them, and
// their cost to the machine is minimal.
type writes struct {
	client *clientv3.Client
	keys   []string
	values []string
}

// configMapWrites change a thousand ConfigMaps, drawn at random.
func configMapWrites(s *Sample) (*writes, error) {
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	w := &writes{client: s.Etcd.Client}
	for _, i := range drawn[:min(1_000, len(drawn))] {
		cm := dataset.ConfigMap(i, 1+s.Number)
		value, err := dataset.Encode(cm)
		if err != nil {
			return nil, err
		}
		w.keys, w.values = append(w.keys, dataset.ConfigMapKey(cm.Name)), append(w.values, string(value))
	}
	return w, nil
}

func (w *writes) put(ctx context.Context, i int) error {
	i %= len(w.keys)
	if _, err := w.client.Put(ctx, w.keys[i], w.values[i]); err != nil {
		return fmt.Errorf("write %s: %w", w.keys[i], err)
	}
	return nil
}
