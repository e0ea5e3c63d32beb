package target

import (
	"maps"
	"strings"
	"testing"
)

const exposition = `# HELP grpc_server_handled_total Total number of RPCs completed on the server, regardless of success or failure.
# TYPE grpc_server_handled_total counter
grpc_server_handled_total{grpc_code="OK",grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 10
grpc_server_handled_total{grpc_code="Unavailable",grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 2
grpc_server_handled_total{grpc_code="OK",grpc_method="Txn",grpc_service="etcdserverpb.KV",grpc_type="unary"} 5
grpc_server_handled_total{grpc_code="OK",grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"} 1
# HELP grpc_server_msg_received_total Total number of RPC stream messages received on the server.
# TYPE grpc_server_msg_received_total counter
grpc_server_msg_received_total{grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 12
grpc_server_msg_received_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"} 7
# HELP etcd_network_client_grpc_sent_bytes_total The total number of bytes sent to grpc clients.
# TYPE etcd_network_client_grpc_sent_bytes_total counter
etcd_network_client_grpc_sent_bytes_total 1.5e+06
`

func TestParseUsage_CountsRequestsByMethod(t *testing.T) {
	usage, err := parseUsage(strings.NewReader(exposition))
	if err != nil {
		t.Fatal(err)
	}
	if usage.Sent != 1.5e6 {
		t.Errorf("%v bytes sent, want 1.5e6", usage.Sent)
	}
	got := usage.Requests
	if want := (Requests{"Range": 12, "Txn": 5, "Watch": 7}); !maps.Equal(got, want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	if got.Total() != 24 {
		t.Errorf("total %v, want 24", got.Total())
	}
	since := got.Since(Requests{"Range": 12, "Txn": 1})
	if want := (Requests{"Txn": 4, "Watch": 7}); !maps.Equal(since, want) {
		t.Errorf("since: %v, want %v", since, want)
	}
}

func TestParseUsage_ForeignMetrics_ReturnsError(t *testing.T) {
	for _, body := range []string{"", "<html>", "# TYPE up gauge\nup 1\n"} {
		if got, err := parseUsage(strings.NewReader(body)); err == nil {
			t.Errorf("%q counts as %v", body, got)
		}
	}
}
