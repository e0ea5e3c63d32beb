package main

import (
	"context"
	"fmt"
	"net/url"
	"time"
)

// shardCount is how many shards the ConfigMaps are listed in.
const shardCount = 16

// shardWorkloads list all ConfigMaps at once and in shards, each in engines of their own whose gate for shards is on.
var shardWorkloads = []Workload{
	sharded("list-whole-json", "LIST all, JSON, beside shards", listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat}.run),
	sharded("list-shards-json", "LIST all in 16 shards, JSON", shardLoad{format: jsonFormat}.run),
	sharded("list-whole-protobuf", "LIST all, protobuf, beside shards", listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: protobufFormat}.run),
	sharded("list-shards-protobuf", "LIST all in 16 shards, protobuf", shardLoad{format: protobufFormat}.run),
}

func sharded(name, title string, run func(context.Context, *Sample) error) Workload {
	const gate = "--feature-gates=ShardedListAndWatch=true"
	return Workload{
		Name: name, Title: title, Op: "LIST", Dataset: configMaps,
		Variant: "shards", Flags: map[string][]string{strataEngine: {gate}, upstreamEngine: {gate}},
		Run:    run,
		Wanted: []Bound{toUpstream(cpuPerList, 1./5)},
	}
}

// shardLoad is one client that LISTs all ConfigMaps in shards, one after the other. An operation is all of them.
type shardLoad struct{ format format }

func (l shardLoad) run(ctx context.Context, s *Sample) error {
	want, err := stored("configmaps")(ctx, s)
	if err != nil {
		return err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		began, objects, bytes := time.Now(), 0, int64(0)
		for i := range shardCount {
			list, err := doList(ctx, conn, allConfigMaps+"?shardSelector="+url.QueryEscape(shardSelector(i)), l.format)
			if err != nil {
				return err
			}
			objects, bytes = objects+list.Objects, bytes+list.Bytes
		}
		s.Observe(time.Since(began))
		if objects != want {
			return fmt.Errorf("%d shards have %d objects, want %d", shardCount, objects, want)
		}
		s.Detail("%s objects, %s", grouped(objects), Bytes.Format(float64(bytes)))
		return nil
	})
}

// shardSelector selects the i-th shard of shardCount.
func shardSelector(i int) string {
	end := "0x10000000000000000"
	if i+1 < shardCount {
		end = fmt.Sprintf("0x%x000000000000000", i+1)
	}
	return fmt.Sprintf("shardRange(object.metadata.uid, '0x%x000000000000000', '%s')", i, end)
}
