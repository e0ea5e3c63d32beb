package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// checkWorkloads measure the cost of comparing memory with etcd. Upstream's checker cannot be
// requested.
var checkWorkloads = []Workload{{
	Name: "check", Title: "consistency check of all ConfigMaps", Op: "check", Dataset: onlyConfigMaps,
	Alone: true, Session: "check", Runs: 1,
	Run:    measureCheck,
	Wanted: []Bound{absolute("server CPU per check", 1), absolute(peakAbove, 30e6), absolute("etcd sent per check", 40e6)},
}}

// checks is the number of checks of a sample.
const checks = 5

// onlyConfigMaps is the data of workloads that must not mistake another resource for ConfigMaps.
func onlyConfigMaps(s Sizes) dataset.Spec { return dataset.Spec{ConfigMaps: s.Objects, Namespaces: 1} }

// measureCheck makes Strata compare memory with etcd, a few times.
func measureCheck(ctx context.Context, s *Sample) error {
	if s.Engine.Engine != strataEngine {
		return nil
	}
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(want))
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		for range checks {
			began := time.Now()
			if err := checkOnce(ctx, conn, want, s.Body); err != nil {
				return err
			}
			s.Observe(time.Since(began))
		}
		return nil
	})
}

// checkOnce compares once, and requires that it finds no difference.
func checkOnce(ctx context.Context, conn *target.Conn, want int, body *bytes.Buffer) error {
	const path = "/debug/strata/consistency?resource=configmaps"
	if err := conn.Read(ctx, target.Request{Method: http.MethodPost, Path: path}, body); err != nil {
		return err
	}
	var answer struct {
		Items []struct {
			Status, Error string
			Keys          int
		}
	}
	if err := json.Unmarshal(body.Bytes(), &answer); err != nil {
		return fmt.Errorf("POST %s: %w", path, err)
	}
	if len(answer.Items) != 1 || answer.Items[0].Status != "success" || answer.Items[0].Keys != want {
		return fmt.Errorf("POST %s: %+v, want success with %d keys", path, answer.Items, want)
	}
	return nil
}
