package etcdsource

import (
	"bytes"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// rangeResponses are responses as etcd encodes them.
func rangeResponses(t testing.TB) (all [][]byte) {
	t.Helper()
	for _, response := range []*pb.RangeResponse{
		{},
		{Header: &pb.ResponseHeader{ClusterId: 1 << 63, MemberId: 2, Revision: 1<<63 - 1, RaftTerm: 4}, More: true, Count: 300_000},
		{Header: &pb.ResponseHeader{Revision: 7}, Count: 2, Kvs: []*mvccpb.KeyValue{
			{Key: []byte("/registry/a"), CreateRevision: 1, ModRevision: 7, Version: 3, Lease: -1},
			{Key: []byte("/registry/b"), Value: []byte("value"), CreateRevision: 5, ModRevision: 5, Version: 1},
		}},
	} {
		data, err := proto.Marshal(response)
		testcheck.NoError(t, err)
		all = append(all, data)
	}
	return all
}

// requireSameRange fails unless the codec and protobuf decode data to the same response, or both
// refuse it.
func requireSameRange(t *testing.T, codec *rangeCodec, data []byte) {
	t.Helper()
	// of an earlier attempt
	want, got := &pb.RangeResponse{}, &pb.RangeResponse{More: true, Count: 9}
	wantErr := proto.Unmarshal(data, want)
	half := len(data) / 2 // gRPC receives a message in parts
	gotErr := codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data[:half]), mem.SliceBuffer(data[half:])}, got)
	if gotErr != nil && wantErr == nil {
		t.Fatalf("%x: %v", data, gotErr)
	}
	if gotErr != nil || wantErr != nil {
		return // protobuf also verifies fields that the codec skips
	}
	requireSameResponse(t, data, got, want)

	message, err := proto.Marshal(&pb.RangeStreamResponse{RangeResponse: want})
	part := &pb.RangeStreamResponse{}
	if err == nil {
		err = codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, part)
	}
	if err != nil || part.RangeResponse == nil {
		t.Fatalf("%x in a stream: %v, %v", data, part, err)
	}
	requireSameResponse(t, data, part.RangeResponse, want)
}

func requireSameResponse(t *testing.T, data []byte, got, want *pb.RangeResponse) {
	t.Helper()
	if want.Header == nil != (got.Header == nil) || want.Header.GetClusterId() != got.Header.GetClusterId() || want.Header.GetMemberId() != got.Header.GetMemberId() ||
		want.Header.GetRevision() != got.Header.GetRevision() || want.Header.GetRaftTerm() != got.Header.GetRaftTerm() ||
		want.More != got.More || want.Count != got.Count || len(want.Kvs) != len(got.Kvs) {
		t.Fatalf("%x: %v, want %v", data, got, want)
	}
	for i, w := range want.Kvs {
		if g := got.Kvs[i]; !bytes.Equal(g.Key, w.Key) || !bytes.Equal(g.Value, w.Value) || g.CreateRevision != w.CreateRevision ||
			g.ModRevision != w.ModRevision || g.Version != w.Version || g.Lease != w.Lease {
			t.Fatalf("%x: key %d is %v, want %v", data, i, g, w)
		}
	}
}

func newRangeCodec() *rangeCodec {
	return &rangeCodec{CodecV2: encoding.GetCodecV2(grpcproto.Name), responses: make([]rangeMemory, 2)}
}

func TestRangeCodec_Responses_EqualProtobuf(t *testing.T) {
	codec := newRangeCodec()
	for range 3 { // the later times in memory of the first
		for _, data := range rangeResponses(t) {
			requireSameRange(t, codec, data)
		}
	}
	for _, data := range [][]byte{{0x0a}, {0x12, 0x05, 0x0a}, {0x12, 0x02, 0x0a, 0x05}, {0xff}} {
		if err := codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, &pb.RangeResponse{}); err == nil {
			t.Errorf("%x is decoded", data)
		}
	}
}

// TestRangeCodec_OtherMessages_AreProtobuf: the requests, and responses of other methods.
func TestRangeCodec_OtherMessages_AreProtobuf(t *testing.T) {
	codec := newRangeCodec()
	want := &pb.RangeRequest{Key: []byte("a"), KeysOnly: true, Limit: 3}
	data, err := codec.Marshal(want)
	testcheck.NoError(t, err)
	got := &pb.RangeRequest{}
	if err := codec.Unmarshal(data, got); err != nil || !proto.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
}

// TestRangeCodec_EarlierResponse_StaysValid: until its memory is next.
func TestRangeCodec_EarlierResponse_StaysValid(t *testing.T) {
	codec := newRangeCodec()
	encode := func(key string) mem.BufferSlice {
		data, err := proto.Marshal(&pb.RangeResponse{Kvs: []*mvccpb.KeyValue{{Key: []byte(key)}}})
		testcheck.NoError(t, err)
		return mem.BufferSlice{mem.SliceBuffer(data)}
	}
	var responses [3]pb.RangeResponse
	for i, key := range []string{"a", "b", "c"} {
		testcheck.NoError(t, codec.Unmarshal(encode(key), &responses[i]))
		if i > 0 {
			if earlier := string(responses[i-1].Kvs[0].Key); earlier != string(rune('a'+i-1)) {
				t.Errorf("response %d became %q", i-1, earlier)
			}
		}
	}
}

// TestRangeCodec_LaterPages_AllocateNothingPerKey: a check of a large range leaves no garbage for
// each key.
func TestRangeCodec_LaterPages_AllocateNothingPerKey(t *testing.T) {
	response := &pb.RangeResponse{Header: &pb.ResponseHeader{}}
	for range 1000 {
		response.Kvs = append(response.Kvs, &mvccpb.KeyValue{Key: []byte("/registry/configmaps/default/name"), ModRevision: 1 << 40})
	}
	data, err := proto.Marshal(response)
	testcheck.NoError(t, err)
	codec, decoded := newRangeCodec(), &pb.RangeResponse{}
	allocations := testing.AllocsPerRun(10, func() {
		if err := codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(data)}, decoded); err != nil || len(decoded.Kvs) != 1000 {
			t.Fatalf("%d keys, %v", len(decoded.Kvs), err)
		}
	})
	if allocations > 10 {
		t.Errorf("%.0f allocations for a page of 1,000 keys", allocations)
	}
}

func FuzzRangeCodec(f *testing.F) {
	for _, data := range rangeResponses(f) {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		codec := newRangeCodec()
		requireSameRange(t, codec, data)
		requireSameRange(t, codec, data)
	})
}
