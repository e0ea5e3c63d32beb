package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

var writeWorkloads = []Workload{
	{
		Name: "create", Title: "create a ConfigMap", Op: "create", Dataset: configMaps, Alone: true,
		Run:    writeLoad{requests: creations, cleanUp: deleteTemporary}.run,
		Wanted: []Bound{toUpstream("server CPU per create", 1)},
	},
	{
		Name: "update", Title: "update a ConfigMap", Op: "update", Dataset: configMaps, Alone: true,
		Run:    writeLoad{requests: updates}.run,
		Wanted: []Bound{toUpstream("server CPU per update", 1)},
	},
}

// writeLoad sends Sizes.Writes writes, one after the other, each to another object.
type writeLoad struct {
	// requests returns n writes and prepares their objects, directly in etcd.
	requests func(ctx context.Context, s *Sample, n int) ([]target.Request, error)

	// cleanUp, if not nil, restores the content of etcd.
	cleanUp func(ctx context.Context, s *Sample) error
}

func (l writeLoad) run(ctx context.Context, s *Sample) (err error) {
	// A few unmeasured writes open the connection and trigger the one-time loads of a fresh
	// process.
	warmUp := max(s.Sizes.Writes/20, 1)
	requests, err := l.requests(ctx, s, warmUp+s.Sizes.Writes)
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
