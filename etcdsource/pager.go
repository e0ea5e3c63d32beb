package etcdsource

import (
	"context"
	"fmt"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Page sizes; the pages are of one revision (E14 of docs/etcd-contract.md). etcd counts the whole
// rest of the range for every page, so few large pages are cheap; pageBytes bounds the memory of
// one response on the server and the client. The number of keys adapts to the sizes of the values.
const (
	firstPageKeys = 500
	maxPageKeys   = 10_000
	pageBytes     = 8 << 20
)

// Pager reads a range of keys at one revision, in pages of about 8 MiB, or a single key. The number
// of keys of a page is estimated from the previous page; a larger response than estimated is
// accepted, unless the client is one of Bounded. A Pager is not safe for concurrent use; a copy
// continues independently.
type Pager struct {
	client clientv3.KV
	key    string // the next key to read
	end    string
	rev    mirror.Revision // 0: the revision of the first page
	limit  int64           // of the next page
	opts   []clientv3.OpOption
	done   bool
	shared bool        // a page is valid until the next one
	kvs    []driver.KV // of the last page, if shared

	cluster uint64 // that all pages are of, 0 if unknown
}

// Page is a part of a range.
type Page struct {
	KVs    []driver.KV
	Header driver.Header // Revision is the same for all pages
	Count  int64         // keys from the first of the page to the end of the range
}

// NewPager returns a pager of the keys with start <= key < end at a revision, or at the newest if
// at is 0.
func NewPager(client clientv3.KV, start, end string, at mirror.Revision) *Pager {
	return &Pager{client: client, key: start, end: end, rev: at, limit: firstPageKeys}
}

// newKeysPager returns a pager that reads no values. The caller of Next determines the number of
// keys of a page, up to maxPageKeys. A page is valid until the next call of Next: all pages share
// their memory, so that a check of a large range leaves no garbage for each key.
func newKeysPager(client *clientv3.Client, start, end string, at mirror.Revision) *Pager {
	p := NewPager(rangesOf(client, 1), start, end, at)
	p.limit, p.opts, p.shared = maxPageKeys, []clientv3.OpOption{clientv3.WithKeysOnly()}, true
	return p
}

// Done reports whether the range has been read to its end.
func (p *Pager) Done() bool { return p.done }

// HintValueBytes sets the number of keys of the first page from an estimate of the size of a value.
func (p *Pager) HintValueBytes(bytes int64) {
	p.limit = max(1, min(firstPageKeys, pageBytes/max(1, bytes)))
}

// Next reads the next page, of at most maxKeys keys if maxKeys is positive. It retries on another
// member if a member does not answer. Errors: mirror.ErrCompacted, and mirror.ErrRestored if etcd
// has not reached the revision, or is another cluster than that of the page before; other errors
// may be retried.
func (p *Pager) Next(ctx context.Context, maxKeys int64) (Page, error) {
	for {
		limit := p.limit
		if maxKeys > 0 {
			limit = min(limit, maxKeys)
		}
		resp, err := attempts(ctx, pageTimeout, pageAttempts, func(ctx context.Context) (*clientv3.GetResponse, error) {
			opts := append(slices.Clip(p.opts), clientv3.WithRev(p.rev))
			if p.end != p.key+"\x00" {
				// otherwise it is one key, and a store on a database may reject this end
				opts = append(opts, clientv3.WithRange(p.end), clientv3.WithLimit(limit))
			}
			return p.client.Get(ctx, p.key, opts...)
		})
		if status.Code(err) == codes.ResourceExhausted && limit > 1 {
			// The response is larger than the client's limit: the previous values were small.
			p.limit = max(1, limit/4)
			continue
		}
		if err != nil {
			return Page{}, translate(err)
		}
		if err := p.checkOrder(resp.Kvs); err != nil {
			return Page{}, err
		}
		if p.rev == 0 {
			p.rev = resp.Header.Revision // all pages are at the revision of the first one
		}
		if err := p.checkCluster(clusterOf(resp.Header)); err != nil {
			return Page{}, err
		}
		page := Page{
			KVs:    appendKVs(p.kvs[:0], resp.Kvs),
			Header: driver.Header{ClusterID: p.cluster, Revision: p.rev},
			Count:  resp.Count,
		}
		if p.shared {
			p.kvs = page.KVs
		}
		if p.done = !resp.More || len(resp.Kvs) == 0; !p.done {
			p.key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
			p.limit = nextLimit(max(p.limit, limit), resp.Kvs)
		}
		return page, nil
	}
}

// checkCluster returns ErrRestored unless the cluster is that of the pages before. Another etcd may
// have the revision too, with other keys.
func (p *Pager) checkCluster(id uint64) error {
	if p.cluster == 0 {
		p.cluster = id
	}
	if id != p.cluster {
		return fmt.Errorf("%w: cluster ID %x, was %x", mirror.ErrRestored, id, p.cluster)
	}
	return nil
}

// checkOrder returns an error unless the keys are in the requested range and ascend. Otherwise the
// next page could begin before this one, and the pager would not terminate.
func (p *Pager) checkOrder(kvs []*mvccpb.KeyValue) error {
	for i, kv := range kvs {
		if string(kv.Key) < p.key || i > 0 && string(kv.Key) <= string(kvs[i-1].Key) ||
			p.end != "" && p.end != "\x00" && string(kv.Key) >= p.end {
			return fmt.Errorf("etcd returned key %q out of order or outside the requested range [%q, %q)", kv.Key, p.key, p.end)
		}
	}
	return nil
}

// maxResponse is the response limit of a client of Bounded: twice a page, and room for the largest
// value that an etcd is likely to be configured to accept.
const maxResponse = 2*pageBytes + 10<<20

// Bounded returns a KV of the client that rejects a response of more than 26 MiB before it is in
// memory. A Pager then requests smaller pages.
func Bounded(client *clientv3.Client) clientv3.KV {
	return clientv3.NewKVFromKVClient(bounded{clientv3.RetryKVClient(client)}, client)
}

type bounded struct{ pb.KVClient }

func (b bounded) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	return b.KVClient.Range(ctx, in, append(slices.Clip(opts), grpc.MaxCallRecvMsgSize(maxResponse))...)
}

// nextLimit returns the number of keys for a page of about pageBytes, estimated from the last page;
// it is at most twice limit.
func nextLimit(limit int64, kvs []*mvccpb.KeyValue) int64 {
	bytes := 1
	for _, kv := range kvs {
		bytes += len(kv.Key) + len(kv.Value)
	}
	return max(1, min(2*limit, int64(pageBytes)*int64(len(kvs))/int64(bytes), maxPageKeys))
}

// appendKVs appends the keys to dst, which share their memory.
func appendKVs(dst []driver.KV, kvs []*mvccpb.KeyValue) []driver.KV {
	dst = slices.Grow(dst, len(kvs))
	for _, kv := range kvs {
		dst = append(dst, fromKV(kv))
	}
	return dst
}

func fromKV(kv *mvccpb.KeyValue) driver.KV {
	return driver.KV{Key: kv.Key, Value: kv.Value, CreateRevision: kv.CreateRevision, ModRevision: kv.ModRevision, Version: kv.Version}
}
