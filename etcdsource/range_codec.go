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
)

// rangesOf returns a KV of the client that decodes the responses to ranges into memory that it
// reuses: a response is valid until the n-th one after it is received. It is for one reader. The KV
// of a client without a connection, such as one of an embedded etcd, is used as it is.
func rangesOf(client *clientv3.Client, n int) clientv3.KV {
	if client.ActiveConnection() == nil {
		return client
	}
	codec := &rangeCodec{CodecV2: encoding.GetCodecV2(proto.Name), responses: make([]rangeMemory, n)}
	return clientv3.NewKVFromKVClient(withCodec{clientv3.RetryKVClient(client), codec}, client)
}

// withCodec decodes the responses to ranges with the codec.
type withCodec struct {
	pb.KVClient
	codec encoding.CodecV2
}

func (c withCodec) Range(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (*pb.RangeResponse, error) {
	return c.KVClient.Range(ctx, in, append(slices.Clip(opts), grpc.ForceCodecV2(c.codec))...)
}

func (c withCodec) RangeStream(ctx context.Context, in *pb.RangeRequest, opts ...grpc.CallOption) (pb.KV_RangeStreamClient, error) {
	return c.KVClient.RangeStream(ctx, in, append(slices.Clip(opts), grpc.ForceCodecV2(c.codec))...)
}

// rangeCodec decodes responses to ranges without an allocation for each key, into the memory of
// earlier ones; everything else is left to gRPC's codec of protobuf. It is for one request at a
// time.
type rangeCodec struct {
	encoding.CodecV2
	responses []rangeMemory // used in turns
	next      int
}

// rangeMemory is the memory of one response.
type rangeMemory struct {
	data []byte // the encoded response; keys and values are parts of it
	kvs  []mvccpb.KeyValue
	list []*mvccpb.KeyValue // of kvs
}

// errMalformed: a response is not a RangeResponse.
var errMalformed = errors.New("etcd sent a malformed response")

// Unmarshal implements encoding.CodecV2.
func (c *rangeCodec) Unmarshal(data mem.BufferSlice, v any) error {
	switch v.(type) {
	case *pb.RangeResponse, *pb.RangeStreamResponse:
	default:
		return c.CodecV2.Unmarshal(data, v)
	}
	m := &c.responses[c.next]
	c.next = (c.next + 1) % len(c.responses)
	m.data = slices.Grow(m.data[:0], data.Len())[:data.Len()]
	data.CopyTo(m.data)
	if response, ok := v.(*pb.RangeResponse); ok {
		response.Reset()
		return m.decode(m.data, response)
	}
	response := v.(*pb.RangeStreamResponse)
	response.Reset()
	return eachField(m.data, func(field protowire.Number, _ uint64, bytes []byte) error {
		if field != streamResponse || bytes == nil {
			return nil
		}
		response.RangeResponse = &pb.RangeResponse{}
		return m.decode(bytes, response.RangeResponse)
	})
}

// decode sets the fields of an empty response, which shares the memory of data.
func (m *rangeMemory) decode(data []byte, response *pb.RangeResponse) error {
	n, err := countFields(data, rangeKvs)
	if err != nil {
		return err
	}
	if n > len(m.kvs) {
		m.kvs, m.list = make([]mvccpb.KeyValue, n), make([]*mvccpb.KeyValue, n)
		for i := range m.kvs {
			m.list[i] = &m.kvs[i]
		}
	}
	response.Kvs = m.list[:0:n]
	return eachField(data, func(field protowire.Number, number uint64, bytes []byte) error {
		switch isBytes := bytes != nil; {
		case field == rangeHeader && isBytes:
			if response.Header == nil {
				response.Header = &pb.ResponseHeader{}
			}
			return decodeHeader(bytes, response.Header)
		case field == rangeKvs && isBytes:
			response.Kvs = response.Kvs[:len(response.Kvs)+1]
			return decodeKV(bytes, response.Kvs[len(response.Kvs)-1])
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
	streamResponse                                                      = 1
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

// decodeKV sets all fields of kv, which shares the memory of data.
func decodeKV(data []byte, kv *mvccpb.KeyValue) error {
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
// value; bytes is nil for a varint. Fields of other types, which none of the messages has, are
// skipped.
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
