package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
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
	read   func(io.Reader) (wire.List, error)
}

var (
	jsonFormat     = format{"application/json", wire.ReadJSONList}
	protobufFormat = format{"application/vnd.kubernetes.protobuf", wire.ReadProtobufList}

	customJSON = format{"application/json", wire.ReadCustomJSONList}

	// tableFormat is the format that kubectl get requests.
	tableFormat = format{
		"application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json", wire.ReadJSONList,
	}
)

// Names of measures that have bounds.
const (
	latency        = "latency p50"
	latencyP99     = "latency p99"
	cpuPerList     = "server CPU per LIST"
	sentPerList    = "etcd sent per LIST"
	compressedSize = "compressed size"
	peakAbove      = "peak above before"
	objectReads    = "reads of objects from etcd"
)

// idleSent is less than etcd sends for a single page of objects, and more than for background
// requests of servers.
const idleSent = 100e3

const allConfigMaps, allPods = "/api/v1/configmaps", "/api/v1/pods"

var listWorkloads = []Workload{
	{
		Name: "list-cold-three", Title: "the first three LISTs of all, one after the other, JSON", Op: "LIST", Dataset: configMaps,
		Alone: true, Runs: 3,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat, times: 3}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 0.1)},
	},
	{
		Name: "list-json", Title: "LIST all, JSON, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1./8)},
	},
	{
		Name: "list-protobuf", Title: "LIST all, protobuf, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: protobufFormat}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1./5)},
	},
	{
		Name: "list-gzip-json-changed", Title: "LIST all, gzip, JSON, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat, gzip: true}.run,
		Wanted: []Bound{toUpstream(latency, 1./3), toUpstream(compressedSize, 1.05)},
	},
	{
		Name: "list-pages", Title: "LIST all by pages, JSON", Op: "LIST", Dataset: configMaps,
		Run:    pagesLoad{path: allConfigMaps, want: stored("configmaps"), format: jsonFormat}.run,
		Wanted: []Bound{toUpstream(latency, 0.06), toUpstream(cpuPerList, 0.036), none(objectReads), absolute(sentPerList, idleSent)},
	},
	// tables, 500 rows at a time, are the requests of kubectl get pods
	{
		Name: "table-page", Title: "kubectl get, the first page of pods", Op: "LIST", Dataset: configMaps, PassesOn: true,
		Run:    listLoad{path: firstTablePage, want: firstPage, format: tableFormat, repeat: true}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1.2)},
	},
	{
		Name: "table-all", Title: "kubectl get, all pods by pages", Op: "LIST", Dataset: configMaps, PassesOn: true,
		Run:    pagesLoad{path: allPods, want: stored("pods"), format: tableFormat, repeat: true}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1.2)},
	},
	{
		Name: "quiet-list", Title: "consistent LIST of a quiet resource, 300 writes/s elsewhere", Op: "LIST", Dataset: configMaps, Tail: true,
		Run:    quietLoad{objects: size{100, 10}, during: span{5 * time.Second, 300 * time.Millisecond}, writes: 300}.run,
		Wanted: []Bound{absolute(latencyP99, 5e-3)},
	},
}

// selectorWorkloads are reads by labels and fields.
var selectorWorkloads = []Workload{
	{
		Name: "label-one", Title: "LIST by a label that 1 % have, JSON", Op: "LIST", Dataset: configMaps,
		Run:    listLoad{path: fixed(allConfigMaps + "?labelSelector=app%3Dapp-7"), want: onePercentOf, format: jsonFormat, repeat: true}.run,
		Wanted: []Bound{absolute(latency, 15e-3)},
	},
	{
		Name: "list-node-16", Title: "LIST the pods of one node, protobuf, 16 clients at once", Op: "LIST", Dataset: pods,
		Run:    nodesLoad{clients: size{16, 3}}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 0.4)},
	},
	{
		Name: "list-cold-pages", Title: "the first LIST of all pods, by pages, JSON", Op: "LIST", Dataset: pods, Alone: true, Runs: 3,
		Run:    pagesLoad{path: allPods, want: stored("pods"), format: jsonFormat}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 0.2)},
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

func firstTablePage(s *Sample) string { return fmt.Sprintf("%s?limit=%d", allPods, page.at(s.Scale)) }

func firstPage(_ context.Context, s *Sample) (int, error) {
	return min(page.at(s.Scale), s.Data.Pods), nil
}

func onePercentOf(_ context.Context, s *Sample) (int, error) { return s.Data.ConfigMaps / 100, nil }

func thingOfAColor(s *Sample) string {
	return dataset.ThingsPath + "?fieldSelector=spec.color%3D" + dataset.Color(s.Data.Things/2)
}

func one(context.Context, *Sample) (int, error) { return 1, nil }

// changeSome changes one in a hundred ConfigMaps, drawn at random.
func changeSome(ctx context.Context, s *Surroundings) error {
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	return putAll(ctx, s, max(1, len(drawn)/100), func(i int) (string, []byte, error) {
		cm := dataset.ConfigMap(drawn[i], 1+s.Number)
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
}

// putAll puts n objects into etcd, some at a time.
func putAll(ctx context.Context, s *Surroundings, n int, object func(i int) (key string, value []byte, err error)) error {
	const putsInFlight = 32
	puts, ctx := errgroup.WithContext(ctx)
	puts.SetLimit(putsInFlight)
	for i := range n {
		puts.Go(func() error {
			key, value, err := object(i)
			if err != nil {
				return err
			}
			if _, err := s.Etcd.Client.Put(ctx, key, string(value)); err != nil {
				return fmt.Errorf("put %s: %w", key, err)
			}
			return nil
		})
	}
	return puts.Wait()
}

// listLoad is one client that LISTs.
type listLoad struct {
	path   func(s *Sample) string // with the query; called before each LIST
	want   count
	format format
	gzip   bool // compressed; decompressed and verified behind the measured time
	repeat bool // for loop, one after the other; otherwise once
	times  int  // LISTs one after the other; 0 means one
}

func (l listLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	conns, err := s.opened(ctx, 1)
	if err != nil {
		return err
	}
	defer target.CloseAll(conns)
	verify := func(path string, list wire.List, err error) error {
		if err == nil && list.Objects != want {
			err = fmt.Errorf("it has %d objects, want %d", list.Objects, want)
		}
		if err != nil {
			return fmt.Errorf("LIST %s: %w", path, err)
		}
		s.Detail("%s objects, %s", grouped(list.Objects), Bytes.Format(float64(list.Bytes)))
		return nil
	}
	path := ""
	err = s.Measure(ctx, func(ctx context.Context) error {
		for deadline, n := time.Now().Add(loop.at(s.Scale)), 1; ; n++ {
			path = l.path(s)
			began := time.Now()
			if l.gzip {
				err = readCompressed(ctx, conns[0], target.Request{Path: path, Accept: l.format.accept, Encoding: "gzip"}, s.Body)
				s.Observe(time.Since(began))
			} else {
				var list wire.List
				list, err = doList(ctx, conns[0], path, l.format)
				s.Observe(time.Since(began))
				err = verify(path, list, err)
			}
			if err != nil || !l.repeat && n >= l.times || l.repeat && time.Now().After(deadline) {
				return err
			}
		}
	})
	if err != nil || !l.gzip {
		return err
	}
	s.Report(compressedSize, Bytes, float64(s.Body.Len()))
	list, err := gunzip(s.Body.Bytes(), l.format.read)
	return verify(path, list, err)
}

// doList sends a LIST and reads the answer to its end.
func doList(ctx context.Context, conn *target.Conn, path string, format format) (wire.List, error) {
	response, err := conn.Do(ctx, target.Request{Path: path, Accept: format.accept})
	if err != nil {
		return wire.List{}, err
	}
	defer response.Body.Close()
	return format.read(response.Body)
}

// readCompressed reads a compressed answer into body, replacing its content.
func readCompressed(ctx context.Context, conn *target.Conn, r target.Request, body *bytes.Buffer) error {
	response, err := conn.Do(ctx, r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if encoding := response.Header.Get("Content-Encoding"); encoding != "gzip" {
		return fmt.Errorf("the answer is encoded as %q, want gzip", encoding)
	}
	body.Reset()
	_, err = body.ReadFrom(response.Body)
	return err
}

// gunzip reads a list out of a gzip file, which must be a single member: clients such as curl stop
// after the first.
func gunzip(compressed []byte, read func(io.Reader) (wire.List, error)) (wire.List, error) {
	rest := bytes.NewReader(compressed)
	reader, err := gzip.NewReader(rest)
	if err != nil {
		return wire.List{}, err
	}
	reader.Multistream(false)
	list, err := read(reader)
	if err == nil && rest.Len() > 0 {
		err = fmt.Errorf("%d bytes follow the gzip member", rest.Len())
	}
	return list, err
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
	conns, err := s.opened(ctx, 1)
	if err != nil {
		return err
	}
	conn := conns[0]
	defer conn.Close()
	var pages []time.Duration
	err = s.Measure(ctx, func(ctx context.Context) error {
		for deadline := time.Now().Add(loop.at(s.Scale)); ; {
			began, before := time.Now(), len(pages)
			objects, err := l.pages(ctx, s, conn, func(took time.Duration) { pages = append(pages, took) })
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
	if err != nil {
		return err
	}
	slices.Sort(pages)
	s.Report("page p50", Seconds, stats.Percentile(pages, 0.5).Seconds())
	s.Report("page p99", Seconds, stats.Percentile(pages, 0.99).Seconds())
	if l.path == allConfigMaps {
		s.Report(objectReads, Count, s.observed.ObjectReads)
	}
	return nil
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
		body := s.Body.Bytes()
		next := wire.Continue(body)
		list, err := l.format.read(bytes.NewReader(body))
		if err != nil {
			return objects, fmt.Errorf("LIST %s: %w", path, err)
		}
		objects += list.Objects
		if path = ""; next != "" {
			path = limited + "&continue=" + next
		}
	}
	return objects, nil
}

// opened returns n new connections, which are made. The caller must close them.
func (s *Sample) opened(ctx context.Context, n int) ([]*target.Conn, error) {
	conns := s.Engine.DialAll(n)
	for _, conn := range conns {
		if err := conn.Open(ctx); err != nil {
			target.CloseAll(conns)
			return nil, err
		}
	}
	return conns, nil
}

// repeatedly measures n clients, each with a connection of its own, that do operations one after
// the other until the deadline, at least one each.
func repeatedly(ctx context.Context, s *Sample, n int, during time.Duration, operation func(ctx context.Context, conn *target.Conn) error) error {
	conns, err := s.opened(ctx, n)
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
		list, err := doList(ctx, conn, path, protobufFormat)
		if want := s.Data.Pods / s.Data.Nodes; err == nil && list.Objects != want {
			err = fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, want)
		}
		return err
	})
}

// ofNode selects the pods of a node.
func ofNode(i int, s *Sample) string {
	return "fieldSelector=spec.nodeName%3D" + dataset.NodeName(i, s.Data.Nodes)
}

// quietResource is the resource of quietLoad: no server changes PodTemplates by itself.
const quietResource = "podtemplates"

// quietLoad is a client that LISTs few objects that nothing changes, one after the other, while
// ConfigMaps change at a rate.
type quietLoad struct {
	objects size
	during  span
	writes  int // per second
}

func (l quietLoad) run(ctx context.Context, s *Sample) error {
	objects, during := l.objects.at(s.Scale), l.during.at(s.Scale)
	there, err := dataset.Count(ctx, s.Etcd.Client, quietResource)
	if err == nil && there != objects {
		err = putAll(ctx, &s.Surroundings, objects, func(i int) (string, []byte, error) {
			template := dataset.PodTemplate(i)
			value, err := dataset.Encode(template)
			return dataset.PodTemplateKey(template.Name), value, err
		})
	}
	if err != nil {
		return err
	}
	elsewhere, err := configMapWrites(s)
	if err != nil {
		return err
	}
	s.Detail("%s objects", grouped(objects))
	beside, stop := context.WithCancel(ctx)
	defer stop()
	var writing errgroup.Group
	err = repeatedly(ctx, s, 1, during, func(ctx context.Context, conn *target.Conn) error {
		if s.observed.ops() == 0 { // begins with the measurement, and with the first LIST
			writing.Go(func() error { return elsewhere.run(beside, l.writes, during) })
		}
		list, err := doList(ctx, conn, "/api/v1/namespaces/"+dataset.Namespace+"/"+quietResource, protobufFormat)
		if err == nil && list.Objects != objects {
			err = fmt.Errorf("LIST %s has %d objects, want %d", quietResource, list.Objects, objects)
		}
		return err
	})
	if err != nil {
		stop()
	}
	return errors.Join(err, writing.Wait())
}
