package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
	"github.com/stratakube/strata/test/bench/internal/wire"
)

// format is a form of lists.
type format struct {
	accept string
	count  func(body []byte) (objects int, err error)
}

var (
	jsonFormat     = format{"application/json", wire.CountJSON}
	protobufFormat = format{"application/vnd.kubernetes.protobuf", wire.CountProtobuf}

	// tableFormat is the format that kubectl get requests.
	tableFormat = format{
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json", wire.CountJSON,
	}
)

// Names of measures that have bounds.
const (
	latency        = "latency p50"
	latencyP99     = "latency p99"
	cpuPerList     = "server CPU per LIST"
	compressedSize = "compressed size"
)

const allConfigMaps, allPods = "/api/v1/configmaps", "/api/v1/pods"

// listBounds are those of most LISTs of the sequence.
var listBounds = []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerList, 1)}

// customWorkloads read custom resources.
var customWorkloads = []Workload{
	{
		Name: "custom-json", Title: "LIST all custom resources, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: fixed(dataset.ThingsPath), want: stored(dataset.ThingsResource), format: jsonFormat}.run, Wanted: listBounds,
	},
	{
		Name: "custom-gzip", Title: "LIST all custom resources, gzip, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: fixed(dataset.ThingsPath), want: stored(dataset.ThingsResource), format: jsonFormat, gzip: true}.run, Wanted: listBounds,
	},
	{
		Name: "custom-field", Title: "LIST the custom resource with a value of a selectable field, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: thingOfAColor, want: one, format: jsonFormat, repeat: true}.run, Wanted: listBounds,
	},
	{
		Name: "custom-namespace", Title: "LIST the custom resources of a namespace, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: thingsOfANamespace, want: thingsOfEachNamespace, format: jsonFormat, repeat: true}.run, Wanted: listBounds,
	},
	{
		Name: "custom-watch", Title: "one watch of all custom resources, many events", Op: "event", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
		Run: watchLoad{watchers: size{1, 1}, rate: 2_000, during: tenSeconds, of: changedThings}.run, Wanted: eventTail,
	},
}

var listWorkloads = []Workload{
	{
		Name: "list-node", Title: "LIST the pods of one node, protobuf, one client", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: nodesLoad{clients: size{1, 1}}.run, Wanted: []Bound{toUpstream(latencyP99, 0.7), toUpstream(cpuPerList, 0.5)},
	},
	{
		Name: "list-node-16", Title: "LIST the pods of one node, protobuf, 16 clients at once", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: nodesLoad{clients: size{16, 3}}.run, Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerList, 0.45)},
	},
	{
		Name: "list-namespace", Title: "LIST the pods of one namespace, protobuf", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: podsOfANamespace, want: podsOfEachNamespace, format: protobufFormat, repeat: true}.run, Wanted: listBounds,
	},
	{
		Name: "list-label", Title: "LIST the pods with a label that 1 % have, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: fixed(allPods + "?labelSelector=app%3Dapp-7"), want: onePercentOf, format: jsonFormat, repeat: true}.run, Wanted: listBounds,
	},
	{
		Name: "list-json", Title: "LIST all ConfigMaps, JSON, 1 % changed before", Op: "LIST", Dataset: cluster, Lived: true, Tail: true, Change: changeSome,
		Run: listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat}.run, Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerList, 1./8)},
	},
	{
		Name: "list-protobuf", Title: "LIST all pods, protobuf", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: listLoad{path: fixed(allPods), want: stored("pods"), format: protobufFormat}.run, Wanted: []Bound{toUpstream(cpuPerList, 1./5)},
	},
	{
		Name: "list-pages", Title: "LIST all pods by pages, JSON", Op: "LIST", Dataset: cluster, Lived: true, Tail: true,
		Run: pagesLoad{path: allPods, want: stored("pods"), format: jsonFormat}.run, Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream(cpuPerList, 1./5)},
	},
	{ // by 500 rows, as kubectl get pods requests them
		Name: "table-all", Title: "kubectl get, all pods by pages", Op: "LIST", Dataset: configMaps, PassesOn: true,
		Run:    pagesLoad{path: allPods, want: stored("pods"), format: tableFormat, repeat: true}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1.2)},
	},
}

func fixed(path string) func(*Sample) string { return func(*Sample) string { return path } }

// count is the number of objects that an answer must have.
type count func(ctx context.Context, s *Sample) (int, error)

// stored expects as many objects as there are in etcd, including a few ConfigMaps of the servers.
func stored(resource string) count {
	return func(ctx context.Context, s *Sample) (int, error) { return dataset.Count(ctx, s.Etcd.Client, resource) }
}

func podsOfANamespace(s *Sample) string {
	return "/api/v1/namespaces/" + dataset.PodNamespace(s.Rand.IntN(s.Data.Namespaces), s.Data.Namespaces) + "/pods"
}

func podsOfEachNamespace(_ context.Context, s *Sample) (int, error) {
	return s.Data.Pods / s.Data.Namespaces, nil
}

func thingsNamespace(s *Sample) string {
	return dataset.PodNamespace(s.Number%s.Data.Namespaces, s.Data.Namespaces)
}

func thingsOfANamespace(s *Sample) string { return dataset.ThingsIn(thingsNamespace(s)) }

func thingsOfEachNamespace(ctx context.Context, s *Sample) (int, error) {
	return dataset.Count(ctx, s.Etcd.Client, dataset.ThingsResource+"/"+thingsNamespace(s))
}

func onePercentOf(_ context.Context, s *Sample) (int, error) { return s.Data.Pods / 100, nil }

func thingOfAColor(s *Sample) string {
	return dataset.ThingsPath + "?fieldSelector=spec.color%3D" + dataset.Color(s.Data.Things/2)
}

func one(context.Context, *Sample) (int, error) { return 1, nil }

// changeSome changes one in a hundred ConfigMaps, drawn at random.
func changeSome(ctx context.Context, s *Surroundings) error {
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	return dataset.PutAll(ctx, s.Etcd.Client, max(1, len(drawn)/100), func(i int) (string, []byte, error) {
		cm := dataset.ConfigMap(drawn[i], 1+s.Number)
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
}

// listLoad is one client that LISTs.
type listLoad struct {
	path   func(s *Sample) string // with the query; called before each LIST
	want   count
	format format
	gzip   bool // compressed; decompressed and verified behind the measured time
	repeat bool // for loop, one after the other; otherwise once
}

func (l listLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	conns, err := s.Engine.DialAll(ctx, 1)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	// verify is behind the measured time, except of the answers before the last.
	verify := func(path string, body []byte) error {
		objects, err := l.format.count(body)
		if err == nil && objects != want {
			err = fmt.Errorf("it has %d objects, want %d", objects, want)
		}
		if err != nil {
			return fmt.Errorf("LIST %s: %w", path, err)
		}
		s.Detail("%s objects, %s", grouped(objects), Bytes.Format(float64(len(body))))
		return nil
	}
	path, request := "", target.Request{Accept: l.format.accept}
	if l.gzip {
		request.Encoding = "gzip"
	}
	err = s.Measure(ctx, func(ctx context.Context) error {
		for deadline := time.Now().Add(loop.at(s.Scale)); ; {
			path = l.path(s)
			request.Path = path
			began := time.Now()
			if err := conns[0].Read(ctx, request, s.Body); err != nil {
				return err
			}
			s.Observe(time.Since(began))
			if !l.repeat || time.Now().After(deadline) {
				return nil
			}
			if err := verify(path, s.Body.Bytes()); err != nil {
				return err
			}
		}
	})
	if err != nil {
		return err
	}
	body := s.Body.Bytes()
	if l.gzip {
		s.Report(compressedSize, Bytes, float64(len(body)))
		if body, err = gunzip(body); err != nil {
			return fmt.Errorf("LIST %s: %w", path, err)
		}
	}
	return verify(path, body)
}

// countList sends a LIST with a pooled buffer, and returns the number of its objects.
func countList(ctx context.Context, conn *target.Conn, path string, format format) (objects int, err error) {
	body := bodies.Get().(*bytes.Buffer)
	defer bodies.Put(body)
	if err := conn.Read(ctx, target.Request{Path: path, Accept: format.accept}, body); err != nil {
		return 0, err
	}
	return format.count(body.Bytes())
}

// gunzip decompresses a gzip file, which must be a single member: clients such as curl stop after
// the first.
func gunzip(compressed []byte) ([]byte, error) {
	rest := bytes.NewReader(compressed)
	reader, err := gzip.NewReader(rest)
	if err != nil {
		return nil, err
	}
	reader.Multistream(false)
	body, err := io.ReadAll(reader)
	if err == nil && rest.Len() > 0 {
		err = fmt.Errorf("%d bytes follow the gzip member", rest.Len())
	}
	return body, err
}

// pagesLoad is one client that reads a list page by page. An operation is the whole of it.
type pagesLoad struct {
	path   string // without a query
	want   count
	format format
	repeat bool // for loop, one after the other; otherwise once
}

func (l pagesLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	conns, err := s.Engine.DialAll(ctx, 1)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	var pages []time.Duration
	err = s.Measure(ctx, func(ctx context.Context) error {
		for deadline := time.Now().Add(loop.at(s.Scale)); ; {
			began, before := time.Now(), len(pages)
			objects, err := l.pages(ctx, s, conns[0], func(took time.Duration) { pages = append(pages, took) })
			if err != nil {
				return err
			}
			s.Observe(time.Since(began))
			if objects != want {
				return fmt.Errorf("the pages of %s have %d objects, want %d", l.path, objects, want)
			}
			s.Detail("%s objects on %s pages", grouped(objects), grouped(len(pages)-before))
			if !l.repeat || time.Now().After(deadline) {
				return nil
			}
		}
	})
	slices.Sort(pages)
	s.Report("page p50", Seconds, stats.Percentile(pages, 0.5).Seconds())
	s.Report("page p99", Seconds, stats.Percentile(pages, 0.99).Seconds())
	return err
}

// pages reads one page after the other, and calls each with the time of each page.
func (l pagesLoad) pages(ctx context.Context, s *Sample, conn *target.Conn, each func(time.Duration)) (objects int, err error) {
	limited := fmt.Sprintf("%s?limit=%d", l.path, page.at(s.Scale))
	for path := limited; path != ""; {
		began := time.Now()
		if err := conn.Read(ctx, target.Request{Path: path, Accept: l.format.accept}, s.Body); err != nil {
			return objects, err
		}
		each(time.Since(began))
		n, err := l.format.count(s.Body.Bytes())
		if err != nil {
			return objects, fmt.Errorf("LIST %s: %w", path, err)
		}
		objects, path = objects+n, ""
		if next := wire.Continue(s.Body.Bytes()); next != "" {
			path = limited + "&continue=" + next
		}
	}
	return objects, nil
}

// repeatedly measures n clients, each with a connection of its own, that do operations one after
// the other until the deadline, at least one each.
func repeatedly(ctx context.Context, s *Sample, n int, during time.Duration, operation func(ctx context.Context, conn *target.Conn) error) error {
	conns, err := s.Engine.DialAll(ctx, n)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	return s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(during)
		clients, ctx := errgroup.WithContext(ctx)
		for _, conn := range conns {
			clients.Go(func() error {
				for {
					began := time.Now()
					if err := operation(ctx, conn); err != nil {
						return err
					}
					s.Observe(time.Since(began))
					if !time.Now().Before(deadline) {
						return nil
					}
				}
			})
		}
		return clients.Wait()
	})
}

// nodesLoad is clients, with a connection each, that LIST the pods of nodes one after the other.
type nodesLoad struct{ clients size }

func (l nodesLoad) run(ctx context.Context, s *Sample) error {
	var next atomic.Int64
	nodes := s.Rand.Perm(s.Data.Nodes)
	return repeatedly(ctx, s, l.clients.at(s.Scale), loop.at(s.Scale), func(ctx context.Context, conn *target.Conn) error {
		path := allPods + "?" + ofNode(nodes[int(next.Add(1))%len(nodes)], s)
		objects, err := countList(ctx, conn, path, protobufFormat)
		if want := s.Data.Pods / s.Data.Nodes; err == nil && objects != want {
			err = fmt.Errorf("LIST %s has %d objects, want %d", path, objects, want)
		}
		return err
	})
}

// ofNode selects the pods of a node.
func ofNode(i int, s *Sample) string {
	return "fieldSelector=spec.nodeName%3D" + dataset.NodeName(i, s.Data.Nodes)
}
