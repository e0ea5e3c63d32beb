package apiserver

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	genericoptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/test/testcheck"
)

func etcdOptions(servers ...string) *genericoptions.EtcdOptions {
	o := genericoptions.NewEtcdOptions(&storagebackend.Config{})
	o.StorageConfig.Transport.ServerList = servers
	return o
}

// awaitOptions is awaitEtcd with options.
func awaitOptions(t *testing.T, ctx context.Context, o *genericoptions.EtcdOptions) error {
	t.Helper()
	overrides, err := parseOverrides(o)
	testcheck.NoError(t, err)
	return awaitEtcd(ctx, o.StorageConfig.Transport, overrides)
}

// deadURL returns a URL whose port refuses connections.
func deadURL(t *testing.T) string { return "http://" + reservePort(t).Address() }

func TestAwaitEtcd_OneLiveEndpoint_Succeeds(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	live := startEtcd(t)
	if err := awaitOptions(t, ctx, etcdOptions(live)); err != nil {
		t.Errorf("one live server: %v", err)
	}
	if err := awaitOptions(t, ctx, etcdOptions(deadURL(t), live)); err != nil {
		t.Errorf("one dead and one live server: %v", err)
	}
}

func TestAwaitEtcd_Unreachable_NamesEndpointAndReason(t *testing.T) {
	dead := deadURL(t)
	withOverride := etcdOptions(startEtcd(t))
	withOverride.EtcdServersOverrides = []string{"/events#" + dead}
	for name, options := range map[string]*genericoptions.EtcdOptions{
		"all resources": etcdOptions(dead),
		"an override":   withOverride,
	} {
		t.Run(name, func(t *testing.T) {
			var missing []string
			var err error
			// On a busy machine a connection to the live etcd may take longer than the first limit.
			for _, limit := range []time.Duration{2 * time.Second, 30 * time.Second} {
				ctx, cancel := context.WithTimeout(context.Background(), limit)
				err = awaitOptions(t, ctx, options)
				cancel()
				if err == nil {
					t.Fatal("no error")
				}
				missing = slices.DeleteFunc([]string{dead + " cannot be reached", "connection refused", "; check that etcd is running, and --etcd-servers"},
					func(want string) bool { return strings.Contains(err.Error(), want) })
				if len(missing) == 0 {
					return
				}
			}
			t.Errorf("error %q does not contain %q", err, missing)
		})
	}
}

func TestDialFailure_MessagesOfGRPC_HaveCauseAndNextStep(t *testing.T) {
	for message, want := range map[string]string{
		`connection error: desc = "transport: Error while dialing: dial tcp 127.0.0.1:1: connect: connection refused"`:                                            "dial tcp 127.0.0.1:1: connect: connection refused; check that etcd is running",
		`connection error: desc = "transport: authentication handshake failed: tls: failed to verify certificate: x509: certificate signed by unknown authority"`: "tls: failed to verify certificate: x509: certificate signed by unknown authority; check --etcd-cafile",
		`connection error: desc = "error reading server preface: remote error: tls: certificate required"`:                                                        "error reading server preface: remote error: tls: certificate required; check --etcd-cafile",
		`connection error: desc = "error reading server preface: EOF"`:                                                                                            "error reading server preface: EOF; check that etcd is running",
		"no children to pick from": "no children to pick from; check that etcd is running",
	} {
		cause := dialFailure(message)
		if got := cause + "; " + nextStep(cause, []string{"http://127.0.0.1:1"}); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", message, got, want)
		}
	}
}

func TestNextStep_ClosedTLSConnection_NamesCertificates(t *testing.T) {
	servers := []string{"http://127.0.0.1:1", "https://127.0.0.1:2"}
	for reason, want := range map[string]bool{"write: broken pipe": true, "connect: connection refused": false} {
		if got := nextStep(reason, servers); strings.Contains(got, "--etcd-certfile") != want || !strings.Contains(got, "--etcd-servers") {
			t.Errorf("%s: %q, certificates %t", reason, got, want)
		}
	}
}

func TestAwaitEtcd_UnreadableCertificate_ReturnsError(t *testing.T) {
	options := etcdOptions("https://127.0.0.1:1")
	options.StorageConfig.Transport.TrustedCAFile = "testdata/there-is-no-such-file"
	if err := awaitOptions(t, context.Background(), options); err == nil || !strings.Contains(err.Error(), "there-is-no-such-file") {
		t.Errorf("error %v does not name the file", err)
	}
}

// TestServer_PortInUse_ExitsWithOneLine: if the port is in use, the process ends with one line
// before any write to etcd.
func TestServer_PortInUse_ExitsWithOneLine(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	defer taken.Close()
	dir := t.TempDir()
	flags := append(minimalFlags(t, dir, startEtcd(t)), fmt.Sprintf("--secure-port=%d", taken.Addr().(*net.TCPAddr).Port))
	p := startProcess(t, dir, flags...)
	ctx, cancel := context.WithTimeout(t.Context(), readyTimeout)
	defer cancel()
	if code, err := p.Wait(ctx); err != nil {
		t.Fatalf("%v\n%s", err, p.Tail())
	} else if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	lines := strings.Split(p.Tail(), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "strata: ") || !strings.Contains(last, taken.Addr().String()+": address already in use; choose another address with --bind-address and --secure-port") {
		t.Errorf("last line %q, want strata: ... address already in use", last)
	}
}
