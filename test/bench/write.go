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

var writeWorkloads = []Workload{
	{
		Name: "create", Title: "create a ConfigMap", Op: "create", Dataset: configMaps, Alone: true,
		Run:    writeLoad{writes: fiveThousand, requests: creations, cleanUp: deleteTemporary}.run,
		Wanted: []Bound{toUpstream("server CPU per create", 1)},
	},
	{
		Name: "update", Title: "update a ConfigMap", Op: "update", Dataset: configMaps, Alone: true,
		Run:    writeLoad{writes: fiveThousand, requests: updates}.run,
		Wanted: []Bound{toUpstream("server CPU per update", 1)},
	},
	{
		Name: "write-mixed", Title: "create, update, merge patch, apply and delete ConfigMaps, 8 clients", Op: "write", Dataset: configMaps, Alone: true, Tail: true,
		Run:    mixedLoad{clients: 8, rounds: size{100, 2}}.run,
		Wanted: []Bound{toUpstream("server CPU per write", 0.9), toUpstream(latencyP99, 1)},
	},
}

// fiveThousand is enough for the tail of a sample.
var fiveThousand = size{5_000, 20}

// writeLoad sends writes, one after the other, each to another object.
type writeLoad struct {
	writes size

	// requests returns n writes and prepares their objects, directly in etcd.
	requests func(ctx context.Context, s *Sample, n int) ([]target.Request, error)

	// cleanUp, if not nil, restores the content of etcd.
	cleanUp func(ctx context.Context, s *Sample) error
}

func (l writeLoad) run(ctx context.Context, s *Sample) (err error) {
	// A few unmeasured writes open the connection and trigger the one-time loads of a fresh
	// process.
	writes := l.writes.at(s.Scale)
	warmUp := max(writes/20, 1)
	requests, err := l.requests(ctx, s, warmUp+writes)
	if err != nil {
		return err
	}
	if l.cleanUp != nil {
		defer func() {
			if cleanErr := l.cleanUp(ctx, s); err == nil {
				err = cleanErr
			}
		}()
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	var body bytes.Buffer
	for _, request := range requests[:warmUp] {
		if err := conn.Read(ctx, request, &body); err != nil {
			return err
		}
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		for _, request := range requests[warmUp:] {
			began := time.Now()
			if err := conn.Read(ctx, request, &body); err != nil {
				return err
			}
			s.Observe(time.Since(began))
		}
		return nil
	})
}

const configMapsPath = "/api/v1/namespaces/" + dataset.Namespace + "/configmaps"

// podPath is the path of the pod with this index.
func podPath(index int, data dataset.Spec) string {
	return "/api/v1/namespaces/" + dataset.PodNamespace(index, data.Namespaces) + "/pods/" + dataset.PodName(index)
}

// temporaryName is the name of an object that does not outlive its sample; all begin with
// temporaryPrefix.
func temporaryName(s *Sample, i int) string {
	return fmt.Sprintf("%s%d-%d", temporaryPrefix, s.Number, i)
}

const temporaryPrefix = "temporary-"

func creations(_ context.Context, s *Sample, n int) ([]target.Request, error) {
	requests := make([]target.Request, n)
	for i := range requests {
		cm := dataset.NamedConfigMap(temporaryName(s, i), i, 0)
		cm.UID, cm.CreationTimestamp = "", metav1.Time{} // the server sets them
		body, err := json.Marshal(cm)
		if err != nil {
			return nil, fmt.Errorf("encode a ConfigMap: %w", err)
		}
		requests[i] = target.Request{Method: http.MethodPost, Path: configMapsPath, Body: body, Status: http.StatusCreated}
	}
	return requests, nil
}

// updates replaces objects as a client does that has read them: with the resource version that it
// saw.
func updates(ctx context.Context, s *Sample, n int) ([]target.Request, error) {
	requests := make([]target.Request, n)
	for i, index := range s.Rand.Perm(s.Data.ConfigMaps)[:n] {
		cm := dataset.ConfigMap(index, 1+s.Number)
		response, err := s.Etcd.Client.Get(ctx, dataset.ConfigMapKey(cm.Name), clientv3.WithKeysOnly())
		if err != nil {
			return nil, fmt.Errorf("read the revision of %s: %w", cm.Name, err)
		}
		if len(response.Kvs) != 1 {
			return nil, fmt.Errorf("etcd does not hold ConfigMap %s", cm.Name)
		}
		cm.ResourceVersion = fmt.Sprint(response.Kvs[0].ModRevision)
		body, err := json.Marshal(cm)
		if err != nil {
			return nil, fmt.Errorf("encode a ConfigMap: %w", err)
		}
		requests[i] = target.Request{Method: http.MethodPut, Path: configMapsPath + "/" + cm.Name, Body: body}
	}
	return requests, nil
}

func deleteTemporary(ctx context.Context, s *Sample) error {
	if _, err := s.Etcd.Client.Delete(ctx, dataset.ConfigMapKey(temporaryPrefix), clientv3.WithPrefix()); err != nil {
		return fmt.Errorf("delete what the sample left: %w", err)
	}
	return nil
}

// mixedLoad is clients, with a connection each. Each creates an object, updates it, patches it,
// applies to it and deletes it, and then takes the next, for a number of rounds.
type mixedLoad struct {
	clients int
	rounds  size
}

func (l mixedLoad) run(ctx context.Context, s *Sample) error {
	conns := s.Engine.DialAll(l.clients)
	defer target.CloseAll(conns)
	rounds := l.rounds.at(s.Scale)
	for i, conn := range conns {
		// opens the connection, and triggers the one-time loads of a fresh process
		if err := writeObject(ctx, conn, temporaryName(s, -1-i), func(time.Duration) {}); err != nil {
			return err
		}
	}
	err := s.Measure(ctx, func(ctx context.Context) error {
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

// newWrites makes n writes, each of the key and value that object returns for its index.
func newWrites(s *Sample, n int, object func(i int) (key string, value []byte, err error)) (*writes, error) {
	w := &writes{client: s.Etcd.Client, keys: make([]string, n), values: make([]string, n)}
	for i := range n {
		key, value, err := object(i)
		if err != nil {
			return nil, err
		}
		w.keys[i], w.values[i] = key, string(value)
	}
	return w, nil
}

// configMapWrites change a thousand ConfigMaps, drawn at random.
func configMapWrites(s *Sample) (*writes, error) {
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	return newWrites(s, min(1_000, len(drawn)), func(i int) (string, []byte, error) {
		cm := dataset.ConfigMap(drawn[i], 1+s.Number)
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
}

// run writes at a rate: all of them in turn, repeatedly.
func (w *writes) run(ctx context.Context, rate int, duration time.Duration) error {
	return perSecond(rate, duration, writesAtOnce).run(ctx, w.put)
}

func (w *writes) put(ctx context.Context, i int) error {
	i %= len(w.keys)
	if _, err := w.client.Put(ctx, w.keys[i], w.values[i]); err != nil {
		return fmt.Errorf("write %s: %w", w.keys[i], err)
	}
	return nil
}
