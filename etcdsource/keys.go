package etcdsource

import (
	"context"
	"errors"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/stratakube/strata/mirror"
)

// newKeysPager returns a pager that reads no values. The caller of Next determines the number of
// keys of a page, up to maxPageKeys. A page is valid until the next call of Next: all pages share
// their memory, so that a check of a large range leaves no garbage for each key.
func newKeysPager(client *clientv3.Client, start, end string, at mirror.Revision) *Pager {
	codec := &keysCodec{CodecV2: encoding.GetCodecV2(proto.Name)}
	kv := clientv3.NewKVFromKVClient(withCodec{clientv3.RetryKVClient(client), codec}, client)
	p := NewPager(kv, start, end, at)
	p.limit, p.opts, p.shared = maxPageKeys, []clientv3.OpOption{clientv3.WithKeysOnly()}, true
	return p
}

// withCodec decodes the responses of Range with the codec.
type withCodec struct {
	pb.KVClient
	codec encoding.CodecV2
}

func (c withCodec) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	return c.KVClient.Range(ctx, in, append(slices.Clip(opts), grpc.ForceCodecV2(c.codec))...)
}

// keysCodec decodes a RangeResponse into memory that it reuses for the next one; everything else is
// left to gRPC's codec of protobuf. It is for one request at a time.
type keysCodec struct {
	encoding.CodecV2
	data []byte // of the last response; its keys are parts of it
	kvs  []mvccpb.KeyValue
	list []*mvccpb.KeyValue
}

// errMalformed: a response is not a RangeResponse.
var errMalformed = errors.New("etcd sent a malformed response")

// Unmarshal implements encoding.CodecV2.
func (c *keysCodec) Unmarshal(data mem.BufferSlice, v any) error {
	response, ok := v.(*pb.RangeResponse)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	c.data = slices.Grow(c.data[:0], data.Len())[:data.Len()]
	data.CopyTo(c.data)
	n, err := countFields(c.data, rangeKvs)
	if err != nil {
		return err
	}
	if n > cap(c.kvs) {
		c.kvs, c.list = make([]mvccpb.KeyValue, n), make([]*mvccpb.KeyValue, 0, n)
		for i := range c.kvs {
			c.list = append(c.list, &c.kvs[i])
		}
	}
	response.Reset()
	response.Kvs = c.list[:0]
	return eachField(c.data, func(field protowire.Number, number uint64, bytes []byte) error {
		switch isBytes := bytes != nil; {
		case field == rangeHeader && isBytes:
			if response.Header == nil {
				response.Header = &pb.ResponseHeader{}
			}
			return decodeHeader(bytes, response.Header)
		case field == rangeKvs && isBytes:
			response.Kvs = response.Kvs[:len(response.Kvs)+1]
			return decodeKey(bytes, response.Kvs[len(response.Kvs)-1])
		case field == rangeMore && !isBytes:
			response.More = number != 0
		case field == rangeCount && !isBytes:
			response.Count = int64(number)
		}
		return nil
	})
}

// Numbers of the fields of etcd's messages that are read here, as in its rpc.proto and kv.proto.
const (
	rangeHeader, rangeKvs, rangeMore, rangeCount                        = 1, 2, 3, 4
	headerClusterID, headerMemberID, headerRevision, headerRaftTerm     = 1, 2, 3, 4
	kvKey, kvCreateRevision, kvModRevision, kvVersion, kvValue, kvLease = 1, 2, 3, 4, 5, 6
)

func decodeHeader(data []byte, header *pb.ResponseHeader) error {
	return eachField(data, func(field protowire.Number, number uint64, bytes []byte) error {
		switch isBytes := bytes != nil; {
		case isBytes:
		case field == headerClusterID:
			header.ClusterId = number
		case field == headerMemberID:
			header.MemberId = number
		case field == headerRevision:
			header.Revision = int64(number)
		case field == headerRaftTerm:
			header.RaftTerm = number
		}
		return nil
	})
}

// decodeKey sets all fields of kv, which shares the memory of data.
func decodeKey(data []byte, kv *mvccpb.KeyValue) error {
	kv.Key, kv.Value = nil, nil
	kv.CreateRevision, kv.ModRevision, kv.Version, kv.Lease = 0, 0, 0, 0
	return eachField(data, func(field protowire.Number, number uint64, bytes []byte) error {
		switch isBytes := bytes != nil; {
		case field == kvKey && isBytes:
			kv.Key = bytes
		case field == kvValue && isBytes:
			kv.Value = bytes
		case isBytes:
		case field == kvCreateRevision:
			kv.CreateRevision = int64(number)
		case field == kvModRevision:
			kv.ModRevision = int64(number)
		case field == kvVersion:
			kv.Version = int64(number)
		case field == kvLease:
			kv.Lease = int64(number)
		}
		return nil
	})
}

// eachField calls f for each field of a message that is a varint or bytes, with its number and its
// value; bytes is nil for a varint. Fields of other types, which none of the messages has, are skipped.
func eachField(message []byte, f func(field protowire.Number, number uint64, bytes []byte) error) error {
	for len(message) > 0 {
		field, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return errMalformed
		}
		message = message[n:]
		var number uint64
		var bytes []byte
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			bytes, n = protowire.ConsumeBytes(message)
		default:
			n = protowire.ConsumeFieldValue(field, kind, message)
		}
		if n < 0 {
			return errMalformed
		}
		message = message[n:]
		if kind != protowire.VarintType && kind != protowire.BytesType {
			continue
		}
		if err := f(field, number, bytes); err != nil {
			return err
		}
	}
	return nil
}

// countFields returns how often a message has a field of bytes.
func countFields(message []byte, wanted protowire.Number) (n int, err error) {
	err = eachField(message, func(field protowire.Number, _ uint64, bytes []byte) error {
		if field == wanted && bytes != nil {
			n++
		}
		return nil
	})
	return n, err
}
