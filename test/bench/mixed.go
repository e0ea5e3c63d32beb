package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

var mixedWorkloads = []Workload{{
	Name: "write-mixed", Title: "create, update, merge patch, apply and delete ConfigMaps, 8 clients", Op: "write", Dataset: configMaps, Alone: true,
	Session: "mixed", Tail: true,
	Run:    measureMixedWrites,
	Wanted: []Bound{toUpstream("server CPU per write", 0.9), toUpstream(latencyP99, 1)},
}}

// mixedClients is the number of clients of measureMixedWrites.
const mixedClients = 8

// measureMixedWrites sends Sizes.MixedWrites writes by mixedClients clients, each with a connection
// of its own: each creates an object, updates it, patches it, applies to it and deletes it, and
// then takes the next.
func measureMixedWrites(ctx context.Context, s *Sample) error {
	conns := s.Engine.DialAll(mixedClients)
	defer target.CloseAll(conns)
	rounds := max(1, s.Sizes.MixedWrites/mixedClients/writesOfAnObject)
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

// writesOfAnObject is the number of writes of writeObject.
const writesOfAnObject = 5

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
