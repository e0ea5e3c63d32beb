package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// Names of measures that have bounds.
const (
	objectReads       = "reads of objects from etcd"
	exactSent         = "etcd sent for a LIST of the past, at most"
	exactOverJSON     = "past / present, JSON"
	exactOverProtobuf = "past / present, protobuf"
	exactAbove        = "peak above rest, past"
)

// exactWorkloads list all objects at a revision before a restart.
var exactWorkloads = []Workload{{
	Name: "list-exact", Title: "LIST all at a revision from before a restart, 5 % changed since", Op: "LIST", Dataset: configMaps,
	Alone: true, Session: "exact", Starts: true, Runs: 1,
	Run: measureExact,
	Wanted: []Bound{
		none(objectReads), absolute(exactSent, idleSent),
		absolute(exactOverJSON, 1.1), absolute(exactOverProtobuf, 1.1), absolute(exactAbove, 100e6),
	},
}}

const (
	// exactMemory is the resident memory at which an engine is killed, before the machine has no memory left: upstream takes 7 GB for a list
	// of 300,000 objects that it reads from etcd, and etcd some more.
	exactMemory = 12 << 30

	// exactLimit bounds one LIST.
	exactLimit = 2 * time.Minute

	// warmLists is the number of LISTs of a median; dearLists applies to an engine that reads them from etcd.
	warmLists, dearLists = 5, 1

	// idleSent is less than etcd sends for a single page of objects, and more than for background requests of servers.
	idleSent = 100e3
)

// exactLists are the LISTs of one form.
type exactLists struct {
	name    string
	format  format
	present []listCost // the first, and those after it
	past    []listCost
}

// listCost is the cost of one LIST, or of a check.
type listCost struct {
	took, cpu time.Duration
	etcdCPU   time.Duration
	above     float64 // peak of the server's resident memory above that at rest, bytes
	reads     float64 // of objects from etcd
	sent      float64 // by etcd, bytes
}

// measureExact lists all objects with a process that was started after a kill: first the latest state, then, once memory has settled, at a
// revision of the killed process, with Sizes.Past changes since.
func measureExact(ctx context.Context, s *Sample) error {
	revision, changed, err := s.killAfterChanges(ctx)
	if err != nil {
		return err
	}
	if s.Engine, err = s.Start(ctx); err != nil {
		return err
	}
	defer s.Engine.Stop()
	s.children = []*process.Child{s.Engine.Child, s.Etcd.Child}
	limited, unlimit := context.WithCancel(ctx)
	defer unlimit()
	go s.Engine.LimitMemory(limited, exactMemory)
	want, err := stored("configmaps")(ctx, s) // none was created or deleted since
	if err != nil {
		return err
	}
	conn := s.Engine.Dial()
	defer conn.Close()
	if err := conn.Open(ctx); err != nil {
		return err
	}

	s.Detail("%s objects, %s changed since", grouped(want), grouped(s.Sizes.Past))
	s.Report("until ready after the kill", Seconds, s.Engine.Startup.Ready.Seconds())
	if err := s.Etcd.ResetPeak(); err != nil {
		return err
	}
	all := []*exactLists{{name: "JSON", format: jsonFormat}, {name: "protobuf", format: protobufFormat}}
	for _, l := range all {
		// One form after the other: the cache of all forms is bounded, and they would evict each other.
		present := exactList{path: allConfigMaps, format: l.format, want: want}
		for range 1 + warmLists {
			cost, err := s.costOfList(ctx, conn, present, 0)
			if err != nil {
				return err
			}
			l.present = append(l.present, cost)
		}
		rest, err := s.holds(ctx)
		if err != nil {
			return err
		}
		again, err := s.costOfList(ctx, conn, present, rest.resident)
		if err != nil {
			return err
		}
		s.Report("resident at rest, "+l.name, Bytes, float64(rest.resident))
		s.Report("present, "+l.name+", first", Seconds, l.present[0].took.Seconds())
		s.Report("present, "+l.name, Seconds, medianCost(l.present[1:], listCost.seconds))
		s.Report("  server CPU, present, "+l.name, Seconds, medianCost(l.present[1:], listCost.cpuSeconds))
		s.Report("  peak above rest, present, "+l.name, Bytes, again.above)
		if err := s.listPast(ctx, conn, l, exactList{path: exactPath(allConfigMaps, revision), format: l.format, want: want, revision: revision}, rest.resident); err != nil {
			return s.gaveUp(ctx, err)
		}
		past := medianCost(l.past[1:], listCost.seconds)
		s.Report("past, "+l.name+", first", Seconds, l.past[0].took.Seconds())
		s.Report("  server CPU of the first, "+l.name, Seconds, l.past[0].cpu.Seconds())
		s.Report("  reads of the first from etcd, "+l.name, Count, l.past[0].reads)
		s.Report("past, "+l.name, Seconds, past)
		s.Report("  server CPU, past, "+l.name, Seconds, medianCost(l.past[1:], listCost.cpuSeconds))
		s.Report("past / present, "+l.name, Count, past/medianCost(l.present[1:], listCost.seconds))
		s.Report("  peak above rest, the first of "+l.name, Bytes, l.past[0].above)
	}
	var above, reads, sent float64
	for _, l := range all {
		for _, cost := range l.past {
			above, reads, sent = max(above, cost.above), reads+cost.reads, max(sent, cost.sent)
		}
	}
	etcd, err := s.Etcd.Memory()
	if err != nil {
		return err
	}
	s.Report(exactAbove, Bytes, above)
	s.Report(objectReads, Count, reads)
	s.Report(exactSent, Bytes, sent)
	s.Report("etcd peak memory", Bytes, float64(etcd.Peak))
	return s.verifyPast(ctx, conn, revision, changed)
}

// killAfterChanges starts an engine on a history without the changes of other workloads, changes Sizes.Past objects while it follows, and
// kills it. It returns the revision before the changes, and the name of the first changed object.
func (s *Sample) killAfterChanges(ctx context.Context) (revision int64, changed string, err error) {
	now, err := dataset.Revision(ctx, s.Etcd.Client)
	if err != nil {
		return 0, "", err
	}
	if err := dataset.Compact(ctx, s.Etcd.Client, now); err != nil {
		return 0, "", err
	}
	engine, err := s.Start(ctx)
	if err != nil {
		return 0, "", err
	}
	defer engine.Stop()
	if err := changeSome(ctx, &s.Surroundings); err != nil {
		return 0, "", err
	}
	if revision, err = dataset.Revision(ctx, s.Etcd.Client); err != nil {
		return 0, "", err
	}
	drawn := s.Rand.Perm(s.Data.ConfigMaps)
	err = putAll(ctx, &s.Surroundings, s.Sizes.Past, func(i int) (string, []byte, error) {
		cm := dataset.ConfigMap(drawn[i], 2+s.Number)
		value, err := dataset.Encode(cm)
		return dataset.ConfigMapKey(cm.Name), value, err
	})
	if err != nil {
		return 0, "", err
	}
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, engine.Child, s.Etcd.Child); err != nil {
		return 0, "", err
	}
	engine.Kill()
	return revision, dataset.ConfigMapName(drawn[0]), nil
}

// listPast lists an old revision as often as the engine can answer in reasonable time.
func (s *Sample) listPast(ctx context.Context, conn *target.Conn, l *exactLists, list exactList, rest uint64) error {
	n := 1 + warmLists
	for len(l.past) < n {
		cost, err := s.costOfList(ctx, conn, list, rest)
		if err != nil {
			return fmt.Errorf("the past, %s: %w", l.name, err)
		}
		l.past = append(l.past, cost)
		if cost.reads > 0 {
			n = 1 + dearLists
		}
	}
	return nil
}

// gaveUp records a list at an old revision that was too expensive for the machine as the engine's result; other failures are errors.
func (s *Sample) gaveUp(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case s.Engine.Ended() != nil:
		s.Broken("%v: the process exceeded its memory limit of %s and was killed", firstLine(err), Bytes.Format(exactMemory))
	case errors.Is(err, context.DeadlineExceeded):
		s.Broken("%v: not within %v", firstLine(err), exactLimit)
	default:
		return err
	}
	return nil
}

// exactList is a LIST and its expected answer.
type exactList struct {
	path     string
	format   format
	want     int   // objects
	revision int64 // of the list; 0 is any
}

// exactPath is the path of a LIST of a collection exactly at a revision.
func exactPath(collection string, revision int64) string {
	return fmt.Sprintf("%s?resourceVersion=%d&resourceVersionMatch=Exact", collection, revision)
}

// costOfList does one LIST. rest is the resident memory at rest.
func (s *Sample) costOfList(ctx context.Context, conn *target.Conn, list exactList, rest uint64) (listCost, error) {
	return s.costOf(ctx, rest, func() error { return list.do(ctx, conn) })
}

// costOf calls do once all processes are quiet. rest is the resident memory at rest; 0 stands for the resident memory just before.
func (s *Sample) costOf(ctx context.Context, rest uint64, do func() error) (cost listCost, err error) {
	if err := process.WaitQuiet(ctx, s.Sizes.Quieten, s.children...); err != nil {
		return cost, err
	}
	readsBefore, err := s.Engine.ObjectReads(ctx, measuredResource)
	if err != nil {
		return cost, err
	}
	before, err := s.Etcd.Usage(ctx)
	if err != nil {
		return cost, err
	}
	if err := s.Engine.ResetPeak(); err != nil {
		return cost, err
	}
	if rest == 0 {
		memory, err := s.Engine.Memory()
		if err != nil {
			return cost, err
		}
		rest = memory.Resident
	}
	cpu, err := cpuOf([]*process.Child{s.Engine.Child, s.Etcd.Child})
	if err != nil {
		return cost, err
	}
	began := time.Now()
	if err := do(); err != nil {
		return cost, err
	}
	cost.took = time.Since(began)
	cpuAfter, err := cpuOf([]*process.Child{s.Engine.Child, s.Etcd.Child})
	if err != nil {
		return cost, err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return cost, err
	}
	after, err := s.Etcd.Usage(ctx)
	if err != nil {
		return cost, err
	}
	readsAfter, err := s.Engine.ObjectReads(ctx, measuredResource)
	if err != nil {
		return cost, err
	}
	cost.cpu, cost.etcdCPU = cpuAfter[0]-cpu[0], cpuAfter[1]-cpu[1]
	cost.above = float64(memory.Peak - min(rest, memory.Peak))
	cost.reads = readsAfter - readsBefore
	cost.sent = after.Sent - before.Sent
	return cost, nil
}

func (c listCost) seconds() float64     { return c.took.Seconds() }
func (c listCost) cpuSeconds() float64  { return c.cpu.Seconds() }
func (c listCost) aboveRest() float64   { return c.above }
func (c listCost) sentBytes() float64   { return c.sent }
func (c listCost) etcdSeconds() float64 { return c.etcdCPU.Seconds() }

func medianCost(costs []listCost, of func(listCost) float64) float64 {
	values := make([]float64, len(costs))
	for i, cost := range costs {
		values[i] = of(cost)
	}
	return stats.Median(values)
}

// do reads the list and checks the number of its objects and its revision.
func (l exactList) do(ctx context.Context, conn *target.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, exactLimit)
	defer cancel()
	response, err := conn.Do(ctx, target.Request{Path: l.path, Accept: l.format.accept})
	if err != nil {
		return err
	}
	defer response.Body.Close()
	head := headReader{r: response.Body}
	list, err := l.format.read(&head)
	if err != nil {
		return fmt.Errorf("LIST %s: %w", l.path, err)
	}
	if list.Objects != l.want {
		return fmt.Errorf("LIST %s has %d objects, want %d", l.path, list.Objects, l.want)
	}
	if l.revision != 0 && !slices.ContainsFunc(revisionMarks(l.revision), func(mark string) bool { return bytes.Contains(head.head, []byte(mark)) }) {
		return fmt.Errorf("LIST %s does not have revision %d: it begins with %q", l.path, l.revision, head.head)
	}
	return nil
}

// revisionMarks are the encodings of the revision in the metadata of a list, in JSON and in protobuf, where it is the second field.
func revisionMarks(revision int64) []string {
	text := strconv.FormatInt(revision, 10)
	return []string{`"resourceVersion":"` + text + `"`, "\x12" + string(rune(len(text))) + text}
}

// headBytes is more than the size of the metadata of a list without a token, including the bytes before it.
const headBytes = 256

// headReader keeps the first bytes that are read through it.
type headReader struct {
	r    io.Reader
	head []byte
}

func (h *headReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	if room := headBytes - len(h.head); room > 0 {
		h.head = append(h.head, p[:min(n, room)]...)
	}
	return n, err
}

// verifyPast reads an object that has changed, and the first page, at a revision, and requires that they contain no newer object and
// all objects of etcd at that revision.
func (s *Sample) verifyPast(ctx context.Context, conn *target.Conn, revision int64, changed string) error {
	for path, name := range map[string]string{
		exactPath(configMapsPath, revision) + "&fieldSelector=metadata.name%3D" + changed: changed,
		exactPath(configMapsPath, revision) + fmt.Sprintf("&limit=%d", s.Sizes.Page):      dataset.ConfigMapName(0),
	} {
		page, err := readPast(ctx, conn, path, s.Body)
		if err != nil {
			return err
		}
		if page.Metadata.ResourceVersion != revision || len(page.Items) == 0 || page.Items[0].Metadata.Name != name {
			return fmt.Errorf("LIST %s: revision %d, %d objects, want %d and %s first", path, page.Metadata.ResourceVersion, len(page.Items), revision, name)
		}
		for _, item := range page.Items {
			if item.Metadata.ResourceVersion > revision {
				return fmt.Errorf("LIST %s: %s is of revision %d", path, item.Metadata.Name, item.Metadata.ResourceVersion)
			}
		}
		stored, err := s.Etcd.Client.Get(ctx, dataset.ConfigMapKey(name), clientv3.WithRev(revision))
		if err != nil {
			return fmt.Errorf("read %s at revision %d from etcd: %w", name, revision, err)
		}
		if len(stored.Kvs) != 1 || stored.Kvs[0].ModRevision != page.Items[0].Metadata.ResourceVersion {
			return fmt.Errorf("LIST %s: %s is of revision %d, etcd has %v", path, name, page.Items[0].Metadata.ResourceVersion, stored.Kvs)
		}
	}
	return nil
}

// pastPage contains the checked fields of a list at an old revision.
type pastPage struct {
	Metadata pastMetadata
	Items    []struct{ Metadata pastMetadata }
}

type pastMetadata struct {
	Name            string
	ResourceVersion int64 `json:",string"`
}

// readPast reads a LIST in JSON.
func readPast(ctx context.Context, conn *target.Conn, path string, body *bytes.Buffer) (pastPage, error) {
	if err := conn.Read(ctx, target.Request{Path: path}, body); err != nil {
		return pastPage{}, err
	}
	return parsePast(path, body.Bytes())
}

func parsePast(path string, body []byte) (page pastPage, err error) {
	if err := json.Unmarshal(body, &page); err != nil {
		return page, fmt.Errorf("LIST %s: %w", path, err)
	}
	return page, nil
}
