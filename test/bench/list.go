package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
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
	cpuPerList     = "server CPU per LIST"
	sentPerList    = "etcd sent per LIST"
	compressedSize = "compressed size"
	peakAbove      = "peak above before"
	objectReads    = "reads of objects from etcd"
)

// idleSent is less than etcd sends for a single page of objects, and more than for background
// requests of servers.
const idleSent = 100e3

const (
	allConfigMaps = "/api/v1/configmaps"
)

var listWorkloads = []Workload{
	{
		Name: "list-json", Title: "LIST all, JSON, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat}.run,
		Wanted: []Bound{toLimit(latency, 1.6), toUpstream(cpuPerList, 1./8)},
	},
	{
		Name: "list-protobuf", Title: "LIST all, protobuf, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: protobufFormat}.run,
		Wanted: []Bound{toLimit(latency, 1.6), toUpstream(cpuPerList, 1./5)},
	},
	{
		Name: "list-gzip-json-changed", Title: "LIST all, gzip, JSON, 1 % changed before", Op: "LIST", Dataset: configMaps, Change: changeSome,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat, gzip: true}.run,
		Wanted: []Bound{toUpstream(latency, 1./3), toUpstream(compressedSize, 1.05)},
	},
	{
		Name: "list-pages", Title: "LIST all by pages, JSON", Op: "LIST", Dataset: configMaps, Dear: true,
		Run:    pagesLoad{path: allConfigMaps, want: stored("configmaps"), format: jsonFormat}.run,
		Wanted: []Bound{toUpstream(latency, 0.06), toUpstream(cpuPerList, 0.036), none(objectReads), absolute(sentPerList, idleSent)},
	},
	{
		Name: "list-pages-past", Title: "LIST all by pages at an old revision, JSON, 1 % changed since", Op: "LIST", Dataset: configMaps, Dear: true,
		Prepare: changeAfterMark,
		Run:     pagesLoad{path: allConfigMaps, want: stored("configmaps"), format: jsonFormat, past: true}.run,
		Wanted:  []Bound{toUpstream(cpuPerList, 1./8), none(objectReads), absolute(sentPerList, idleSent)},
	},
	{
		Name: "list-namespace", Title: "LIST the pods of one namespace, protobuf", Op: "LIST", Dataset: configMaps,
		Run:    listLoad{path: podsOfANamespace, want: podsOfEachNamespace, format: protobufFormat, repeat: true}.run,
		Wanted: []Bound{absolute(latency, 4e-3)},
	},
}

// coldWorkloads are the first LIST of their media type in a process: two of different media types
// share one.
var coldWorkloads = []Workload{
	{
		Name: "list-cold-three", Title: "the first three LISTs of all, one after the other, JSON", Op: "LIST", Dataset: configMaps,
		Alone: true, Session: "cold 3", Runs: 3,
		Run:    listLoad{path: fixed(allConfigMaps), want: stored("configmaps"), format: jsonFormat, times: 3}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 0.1)},
	},
}

// coldPagesWorkloads read all pods for the first time in a process.
var coldPagesWorkloads = []Workload{{
	Name: "list-cold-pages", Title: "the first LIST of all pods, by pages, JSON", Op: "LIST", Dataset: pods, Alone: true, Session: "cold pages", Runs: 3,
	Run:    pagesLoad{path: "/api/v1/pods", want: stored("pods"), format: jsonFormat}.run,
	Wanted: []Bound{toUpstream(cpuPerList, 0.2)},
}}

// tableWorkloads are the requests of kubectl get pods: tables, 500 rows at a time.
var tableWorkloads = []Workload{
	{
		Name: "table-page", Title: "kubectl get, the first page of pods", Op: "LIST", Dataset: configMaps, PassesOn: true,
		Run:    listLoad{path: firstTablePage, want: firstPage, format: tableFormat, repeat: true}.run,
		Wanted: []Bound{toUpstream(cpuPerList, 1.2)},
	},
	{
		Name: "table-all", Title: "kubectl get, all pods by pages", Op: "LIST", Dataset: configMaps, PassesOn: true,
		Run:    pagesLoad{path: "/api/v1/pods", want: stored("pods"), format: tableFormat, repeat: true}.run,
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

// nodes is the number of nodes that a sample draws from: few enough that the first sample of the
// limit draws all of them.
func (s *Sample) nodes() int {
	if s.Engine.IsLimit() {
		return min(s.Data.Nodes, limitObjects)
	}
	return s.Data.Nodes
}

func podsOfANamespace(s *Sample) string {
	return "/api/v1/namespaces/" + dataset.PodNamespace(s.Rand.IntN(s.Data.Namespaces), s.Data.Namespaces) + "/pods"
}

func podsOfEachNamespace(_ context.Context, s *Sample) (int, error) {
	return s.Data.Pods / s.Data.Namespaces, nil
}

func firstTablePage(s *Sample) string { return fmt.Sprintf("/api/v1/pods?limit=%d", s.Sizes.Page) }

func firstPage(_ context.Context, s *Sample) (int, error) { return min(s.Sizes.Page, s.Data.Pods), nil }

// changeSome changes Sizes.Changed ConfigMaps, drawn at random.
func changeSome(ctx context.Context, s *Surroundings) error {
	return putAll(ctx, s, s.Sizes.Changed, func() func(i int) (string, []byte, error) {
		drawn := s.Rand.Perm(s.Data.ConfigMaps)
		return func(i int) (string, []byte, error) {
			cm := s.Data.ConfigMap(drawn[i], 1+s.Number)
			value, err := dataset.Encode(cm)
			return dataset.ConfigMapKey(cm.Name), value, err
		}
	}())
}

// pastKey is written before the changes after a listed revision, and its own revision is the listed
// one.
const pastKey = "/bench/past"

// changeAfterMark changes Sizes.Changed ConfigMaps after a revision that markedRevision returns.
func changeAfterMark(ctx context.Context, s *Surroundings) error {
	if _, err := s.Etcd.Client.Put(ctx, pastKey, ""); err != nil {
		return fmt.Errorf("write %s: %w", pastKey, err)
	}
	return changeSome(ctx, s)
}

func (s *Surroundings) markedRevision(ctx context.Context) (int64, error) {
	mark, err := s.Etcd.Client.Get(ctx, pastKey)
	if err != nil || len(mark.Kvs) != 1 {
		return 0, fmt.Errorf("read %s: %d keys: %w", pastKey, len(mark.Kvs), err)
	}
	return mark.Kvs[0].ModRevision, nil
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
	gzip   bool
	repeat bool // for Sizes.Loop, one after the other; otherwise once
	times  int  // LISTs one after the other; 0 means one
}

func (l listLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	if l.gzip {
		return l.runGzip(ctx, s, conn, want)
	}
	least := 0
	if s.Engine.IsLimit() && s.Thorough {
		// it must record the answers to all draws of later samples
		least = drawsEach * max(s.nodes(), s.Data.Namespaces)
	}
	return s.Measure(ctx, func(ctx context.Context) error {
		for deadline, n := time.Now().Add(s.Sizes.Loop), 1; ; least, n = least-1, n+1 {
			path := l.path(s)
			began := time.Now()
			list, err := doList(ctx, conn, path, l.format)
			if err != nil {
				return err
			}
			s.Observe(time.Since(began))
			if list.Objects != want {
				return fmt.Errorf("LIST %s has %d objects, want %d", path, list.Objects, want)
			}
			s.Detail("%s objects, %s", grouped(list.Objects), Bytes.Format(float64(list.Bytes)))
			if !l.repeat && n >= l.times || l.repeat && time.Now().After(deadline) && least <= 0 {
				return nil
			}
		}
	})
}

// drawsEach is the number of random draws for each possible value, so that the probability of
// missing one of a hundred is 1 in 30,000.
const drawsEach = 15

// doList sends a LIST and reads the answer to its end.
func doList(ctx context.Context, conn *target.Conn, path string, format format) (wire.List, error) {
	response, err := conn.Do(ctx, target.Request{Path: path, Accept: format.accept})
	if err != nil {
		return wire.List{}, err
	}
	defer response.Body.Close()
	list, err := format.read(response.Body)
	if err != nil {
		return wire.List{}, fmt.Errorf("LIST %s: %w", path, err)
	}
	return list, nil
}

// runGzip measures a compressed LIST, without decompressing it; its content is verified afterwards.
func (l listLoad) runGzip(ctx context.Context, s *Sample, conn *target.Conn, want int) error {
	path := l.path(s)
	err := s.Measure(ctx, func(ctx context.Context) error {
		began := time.Now()
		response, err := conn.Do(ctx, target.Request{Path: path, Accept: l.format.accept, Encoding: "gzip"})
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if encoding := response.Header.Get("Content-Encoding"); encoding != "gzip" {
			return fmt.Errorf("LIST %s is encoded as %q, want gzip", path, encoding)
		}
		s.Body.Reset()
		if _, err := s.Body.ReadFrom(response.Body); err != nil {
			return fmt.Errorf("LIST %s: %w", path, err)
		}
		s.Observe(time.Since(began))
		return nil
	})
	if err != nil {
		return err
	}
	compressed := s.Body.Bytes()
	s.Report(compressedSize, Bytes, float64(len(compressed)))
	size, err := gzipSize(compressed)
	if err != nil {
		return fmt.Errorf("LIST %s: %w", path, err)
	}
	s.Detail("%s objects, %s", grouped(want), Bytes.Format(float64(size)))
	if !s.Thorough {
		return nil
	}
	list, err := gunzip(compressed, l.format.read)
	if err != nil {
		return fmt.Errorf("LIST %s: %w", path, err)
	}
	if list.Objects != want || uint32(list.Bytes) != size {
		return fmt.Errorf("LIST %s has %d objects in %d bytes, want %d in %d", path, list.Objects, list.Bytes, want, size)
	}
	return nil
}

// gzipSize is the size before compression, modulo 4 GiB, that the end of a gzip file claims.
func gzipSize(compressed []byte) (uint32, error) {
	const magic, shortest = "\x1f\x8b\x08", 18
	if len(compressed) < shortest || string(compressed[:len(magic)]) != magic {
		return 0, errors.New("the body is not gzip")
	}
	return binary.LittleEndian.Uint32(compressed[len(compressed)-4:]), nil
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
	path     string // without a query
	selector string // as a query; "" means none
	want     count
	format   format
	past     bool // at markedRevision; otherwise as it is
	repeat   bool // for Sizes.Loop, one after the other; otherwise once
}

func (l pagesLoad) run(ctx context.Context, s *Sample) error {
	want, err := l.want(ctx, s)
	if err != nil {
		return err
	}
	query := ""
	if l.selector != "" {
		query = "&" + l.selector
	}
	if l.past {
		revision, err := s.markedRevision(ctx)
		if err != nil {
			return err
		}
		query += fmt.Sprintf("&resourceVersion=%d&resourceVersionMatch=Exact", revision)
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}
	var pages []time.Duration
	err = s.Measure(ctx, func(ctx context.Context) error {
		for deadline := time.Now().Add(s.Sizes.Loop); ; {
			began, before := time.Now(), len(pages)
			objects, err := l.pages(ctx, s, conn, query, func(took time.Duration) { pages = append(pages, took) })
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
	if l.path == allConfigMaps && !s.Engine.IsLimit() {
		s.Report(objectReads, Count, s.observed.ObjectReads)
	}
	return nil
}

// pages reads one page after the other, the first with a further query, and calls each, if not nil,
// with the time of each page.
func (l pagesLoad) pages(ctx context.Context, s *Sample, conn *target.Conn, query string, each func(time.Duration)) (objects int, err error) {
	limited := fmt.Sprintf("%s?limit=%d", l.path, s.Sizes.Page)
	for path := limited + query; path != ""; {
		began := time.Now()
		if err := conn.Read(ctx, target.Request{Path: path, Accept: l.format.accept}, s.Body); err != nil {
			return objects, err
		}
		if each != nil {
			each(time.Since(began))
		}
		page := s.Body.Bytes()
		next := wire.Continue(page)
		list, err := l.format.read(bytes.NewReader(page))
		if err != nil {
			return objects, fmt.Errorf("LIST %s: %w", path, err)
		}
		objects += list.Objects
		if path = ""; next != "" {
			path = limited + "&continue=" + next
			if l.selector != "" {
				path += "&" + l.selector
			}
		}
	}
	return objects, nil
}

// atOnce measures n clients, each with a connection of its own, that do one operation each at the
// same moment.
func atOnce(ctx context.Context, s *Sample, n int, operation func(ctx context.Context, conn *target.Conn) error) error {
	conns := s.Engine.DialAll(n)
	defer target.CloseAll(conns)
	for _, conn := range conns {
		if err := conn.Open(ctx); err != nil {
			return err
		}
	}
	err := s.Measure(ctx, func(ctx context.Context) error {
		clients, ctx := errgroup.WithContext(ctx)
		for _, conn := range conns {
			clients.Go(func() error {
				began := time.Now()
				if err := operation(ctx, conn); err != nil {
					return err
				}
				s.Observe(time.Since(began))
				return nil
			})
		}
		return clients.Wait()
	})
	if err != nil {
		return err
	}
	s.Report("until all are done", Seconds, s.observed.Elapsed.Seconds())
	s.Detail("%d at once", n)
	return nil
}
