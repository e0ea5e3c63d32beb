package target

import (
	"strings"
	"testing"
)

const exposition = `# HELP grpc_server_handled_total Total number of RPCs completed on the server, regardless of success or failure.
# TYPE grpc_server_handled_total counter
grpc_server_handled_total{grpc_code="OK",grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 10
grpc_server_handled_total{grpc_code="Unavailable",grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 2
grpc_server_handled_total{grpc_code="OK",grpc_method="Txn",grpc_service="etcdserverpb.KV",grpc_type="unary"} 5
grpc_server_handled_total{grpc_code="OK",grpc_method="Put",grpc_service="etcdserverpb.KV",grpc_type="unary"} 1000
grpc_server_handled_total{grpc_code="OK",grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"} 1
# HELP grpc_server_msg_received_total Total number of RPC stream messages received on the server.
# TYPE grpc_server_msg_received_total counter
grpc_server_msg_received_total{grpc_method="Range",grpc_service="etcdserverpb.KV",grpc_type="unary"} 12
grpc_server_msg_received_total{grpc_method="Watch",grpc_service="etcdserverpb.Watch",grpc_type="bidi_stream"} 7
# HELP etcd_network_client_grpc_sent_bytes_total The total number of bytes sent to grpc clients.
# TYPE etcd_network_client_grpc_sent_bytes_total counter
etcd_network_client_grpc_sent_bytes_total 1.5e+06
`

func TestParseUsage_CountsRequestsButPut(t *testing.T) {
	usage, err := parseUsage(strings.NewReader(exposition))
	if err != nil {
		t.Fatal(err)
	}
	if usage.Sent != 1.5e6 {
		t.Errorf("%v bytes sent, want 1.5e6", usage.Sent)
	}
	if usage.Requests != 24 {
		t.Errorf("%v requests, want 12 of Range, 5 of Txn and 7 of Watch", usage.Requests)
	}
}

func TestParseUsage_ForeignMetrics_ReturnsError(t *testing.T) {
	for _, body := range []string{"", "<html>", "# TYPE up gauge\nup 1\n"} {
		if got, err := parseUsage(strings.NewReader(body)); err == nil {
			t.Errorf("%q counts as %v", body, got)
		}
	}
}
