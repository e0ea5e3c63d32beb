package chunks

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// form is a form of lists that clients request.
type form struct {
	name, accept string
	gzip         bool
	builtIn      bool // not for custom resources
	// read returns the list's metadata and each item in encoded form.
	read func(body []byte) (metav1.ListMeta, []string, error)
}

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	asMetadata   = ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	asTable      = ";as=Table;g=meta.k8s.io;v=v1"
)

var forms = []form{
	{name: "JSON", accept: jsonType, read: readJSON},
	{name: "JSON, compressed", accept: jsonType, gzip: true, read: readJSON},
	{name: "metadata in JSON", accept: jsonType + asMetadata, read: readJSON},
	{name: "table", accept: jsonType + asTable, read: readTable},
	{name: "table, compressed", accept: jsonType + asTable, gzip: true, read: readTable},
	{name: "protobuf", accept: protobufType, builtIn: true, read: readProtobuf},
	{name: "protobuf, compressed", accept: protobufType, builtIn: true, gzip: true, read: readProtobuf},
	{name: "metadata in protobuf", accept: protobufType + asMetadata, read: readProtobuf},
}

func readJSON(body []byte) (metav1.ListMeta, []string, error) {
	var list struct {
		Metadata metav1.ListMeta
		Items    []json.RawMessage
	}
	if err := json.Unmarshal(body, &list); err != nil {
		return list.Metadata, nil, err
	}
	var items []string
	for _, item := range list.Items {
		items = append(items, string(item))
	}
	return list.Metadata, items, nil
}

// readTable omits the last column, which is an age.
func readTable(body []byte) (metav1.ListMeta, []string, error) {
	var table struct {
		Metadata metav1.ListMeta
		Rows     []struct{ Cells, Object json.RawMessage }
	}
	if err := json.Unmarshal(body, &table); err != nil {
		return table.Metadata, nil, err
	}
	var items []string
	for _, row := range table.Rows {
		cells := string(row.Cells)
		items = append(items, cells[:max(0, strings.LastIndexByte(cells, ','))]+string(row.Object))
	}
	return table.Metadata, items, nil
}

// metadataCodecs decode lists of PartialObjectMetadata.
var metadataCodecs = func() serializer.CodecFactory {
	s := runtime.NewScheme()
	if err := metav1.AddMetaToScheme(s); err != nil {
		panic(err)
	}
	return serializer.NewCodecFactory(s)
}()

func readProtobuf(body []byte) (metav1.ListMeta, []string, error) {
	list, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, nil)
	if runtime.IsNotRegisteredError(err) {
		list, _, err = metadataCodecs.UniversalDeserializer().Decode(body, nil, nil)
	}
	if err != nil {
		return metav1.ListMeta{}, nil, err
	}
	accessor, err := meta.ListAccessor(list)
	if err != nil {
		return metav1.ListMeta{}, nil, err
	}
	all, err := meta.ExtractList(list)
	if err != nil {
		return metav1.ListMeta{}, nil, err
	}
	var items []string
	for _, o := range all {
		item, err := json.Marshal(o)
		if err != nil {
			return metav1.ListMeta{}, nil, err
		}
		items = append(items, string(item))
	}
	return metav1.ListMeta{ResourceVersion: accessor.GetResourceVersion(), Continue: accessor.GetContinue(), RemainingItemCount: accessor.GetRemainingItemCount()}, items, nil
}

// page is a list in any form.
type page struct {
	metav1.ListMeta
	items      []string
	bytes      int // of the uncompressed body
	compressed bool
}

// fetch lists in a form.
func (r *replica) fetch(ctx context.Context, f form, path, query string) (*page, error) {
	client, err := rest.HTTPClientFor(r.Config)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.URL+path+"?"+query, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", f.accept)
	// otherwise the client would request gzip by itself
	req.Header.Set("Accept-Encoding", "identity")
	if f.gzip {
		req.Header.Set("Accept-Encoding", "gzip")
	}
	resp, body, err := send(client, req)
	// as clients do, while the server cannot catch up with etcd in time
	for err == nil && resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") != "" {
		harness.Pause(ctx, time.Second)
		resp, body, err = send(client, req)
	}
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s?%s: %d %s", path, query, resp.StatusCode, body)
	}
	p := &page{compressed: resp.Header.Get("Content-Encoding") == "gzip"}
	if p.compressed {
		reader, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		reader.Multistream(false) // clients that read one member read all
		if body, err = io.ReadAll(reader); err != nil {
			return nil, err
		}
	}
	p.bytes = len(body)
	p.ListMeta, p.items, err = f.read(body)
	return p, err
}

// send sends a request without a body, and reads the answer.
func send(client *http.Client, req *http.Request) (*http.Response, []byte, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp, body, err
}

// walk lists in pages, each from the server that next returns, and checks the properties of all
// pages: the same revision, at most limit items, and the number of remaining items.
func walk(ctx context.Context, f form, path, query string, limit int, next func(i int) *replica) (items []string, revision string, err error) {
	var before *page
	left := int64(-1)
	for i := 0; ; i++ {
		values, err := url.ParseQuery(query)
		if err != nil {
			return nil, "", err
		}
		values.Set("limit", fmt.Sprint(limit))
		if before != nil {
			values.Set("continue", before.Continue)
			values.Del("resourceVersion")
			values.Del("resourceVersionMatch")
		}
		p, err := next(i).fetch(ctx, f, path, values.Encode())
		if err != nil {
			return nil, "", fmt.Errorf("page %d: %w", i+1, err)
		}
		fail := func(format string, args ...any) error {
			return fmt.Errorf("page %d of %s: %s", i+1, path, fmt.Sprintf(format, args...))
		}
		switch {
		case before != nil && p.ResourceVersion != before.ResourceVersion:
			return nil, "", fail("revision %s, before it was %s", p.ResourceVersion, before.ResourceVersion)
		case len(p.items) > limit:
			return nil, "", fail("%d items, the limit is %d", len(p.items), limit)
		case (p.RemainingItemCount != nil) != (p.Continue != "" && values.Get("labelSelector")+values.Get("fieldSelector") == ""):
			return nil, "", fail("remainingItemCount is there: %t, with the token %q", p.RemainingItemCount != nil, p.Continue)
		case p.compressed != (f.gzip && p.bytes >= 128<<10): // the threshold of kube-apiserver
			return nil, "", fail("%d bytes, compressed: %t", p.bytes, p.compressed)
		}
		if p.RemainingItemCount != nil {
			if left >= 0 && left-int64(len(p.items)) != *p.RemainingItemCount {
				return nil, "", fail("%d remain, then %d items, then %d remain", left, len(p.items), *p.RemainingItemCount)
			}
			left = *p.RemainingItemCount
		} else if left >= 0 && int64(len(p.items)) != left {
			return nil, "", fail("%d items, %d were to come", len(p.items), left)
		}
		if items = append(items, p.items...); p.Continue == "" {
			return items, p.ResourceVersion, nil
		}
		if i > 10_000 {
			return nil, "", errors.New("the walk has no end")
		}
		before = p
	}
}

// always returns the same server.
func always(r *replica) func(int) *replica { return func(int) *replica { return r } }

// inTurn returns one server after the other.
func (s *scene) inTurn(i int) *replica { return s.replicas[i%len(s.replicas)] }

// TestPagedList_EveryMediaType_IsOneSnapshot lists built-in and custom resources in pages in every
// form, each page from another server, under writes. The pages have the objects as of their
// revision.
func TestPagedList_EveryMediaType_IsOneSnapshot(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	for _, k := range []kind{maps, things} {
		namespace, other := harness.NewName("ns"), harness.NewName("ns")
		value := string(bytes.Repeat([]byte("v"), 1000))
		s.fill(t, ctx, k, other, value, 100)
		names := s.fill(t, ctx, k, namespace, value, 600)
		for _, f := range forms {
			if f.builtIn && k == things {
				continue
			}
			t.Run(k.plural+" "+f.name, func(t *testing.T) {
				for _, path := range []string{k.path(namespace), k.path("")} {
					next := func(i int) *replica {
						// No page contains the concurrent writes.
						name := names[(i*7)%len(names)]
						s.commit(t, ctx, k.put(namespace, name, f.name+fmt.Sprint(i)), k.delete(namespace, fmt.Sprintf("new-%d", i-1)), k.put(namespace, fmt.Sprintf("new-%d", i), value))
						return s.inTurn(i)
					}
					got, revision, err := walk(ctx, f, path, "", 200, next)
					harness.Check(t, err)
					exact := "resourceVersionMatch=Exact&resourceVersion=" + revision
					for _, r := range s.replicas {
						whole, err := r.fetch(ctx, f, path, exact)
						harness.Check(t, err)
						if whole.ResourceVersion != revision || whole.Continue != "" {
							t.Errorf("at %s: revision %s, token %q", revision, whole.ResourceVersion, whole.Continue)
						}
						harness.RequireEqual(t, "pages and the whole list of "+path, got, whole.items)
					}
					if len(got) < 600 {
						t.Errorf("%d items", len(got))
					}
				}
			})
		}
	}
}
