package etcdfeed

import (
	"testing"
	"testing/synctest"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// stalledStream is the stream of a client that does not read.
type stalledStream struct {
	grpc.ServerStreamingServer[pb.RangeStreamResponse]
	ended chan struct{} // closed at the end of the call
}

func (s stalledStream) Send(*pb.RangeStreamResponse) error {
	<-s.ended
	return nil
}

// TestSendWithin_ClientDoesNotRead_ReturnsDeadlineExceeded: a part that the client does not take
// ends the call.
func TestSendWithin_ClientDoesNotRead_ReturnsDeadlineExceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		stream := stalledStream{ended: make(chan struct{})}
		err := sendWithin(sendTimeout, stream, &pb.RangeStreamResponse{})
		if status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%v, want DeadlineExceeded", err)
		}
		close(stream.ended)
		if err := sendWithin(sendTimeout, stream, &pb.RangeStreamResponse{}); err != nil {
			t.Errorf("%v for a client that reads", err)
		}
	})
}
