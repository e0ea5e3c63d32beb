package inprocess

import (
	"crypto/tls"
	"net/http"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport/spdy"
)

// upgrading is a transport that is none of net/http, as those of SPDY and websockets.
type upgrading struct{ http.RoundTripper }

// TestWrap_OtherTransports_AreReturned: a transport that upgrades, or sends a client certificate,
// is not replaced.
func TestWrap_OtherTransports_AreReturned(t *testing.T) {
	transport, err := New(&rest.Config{Host: testURL})
	if err != nil {
		t.Fatal(err)
	}
	certificate := &http.Transport{TLSClientConfig: &tls.Config{Certificates: make([]tls.Certificate, 1)}}
	callback := &http.Transport{TLSClientConfig: &tls.Config{GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return nil, nil }}}
	for name, next := range map[string]http.RoundTripper{"upgrade": upgrading{}, "certificate": certificate, "callback": callback} {
		if got := transport.wrap(next); got != next {
			t.Errorf("%s: %T", name, got)
		}
	}
	plain := &http.Transport{TLSClientConfig: &tls.Config{ServerName: "x"}}
	got, ok := transport.wrap(plain).(*roundTripper)
	if !ok || got.WrappedRoundTripper() != plain {
		t.Errorf("plain: %T", got)
	}
}

// TestInstall_Config_CallsHandlerBehindWrappers: a client of an installed configuration calls the
// handler with its token, after wrappers that the configuration had; a client of SPDY does not.
func TestInstall_Config_CallsHandlerBehindWrappers(t *testing.T) {
	config := &rest.Config{Host: testURL, BearerToken: "secret", TLSClientConfig: rest.TLSClientConfig{ServerName: "apiserver-loopback-client"}}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return tracing{next} })
	transport, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	transport.Install(config)
	defer stop(t, transport)
	transport.Serve(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for _, name := range []string{"Authorization", "Traceparent"} {
			w.Header().Set(name, req.Header.Get(name))
		}
		w.Header().Set("Name", req.TLS.ServerName)
	}))
	client, err := rest.HTTPClientFor(rest.CopyConfig(config))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Get(testURL + "/a")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	for name, want := range map[string]string{"Authorization": "Bearer secret", "Traceparent": "x", "Name": "apiserver-loopback-client"} {
		if got := resp.Header.Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}

	calls := 0
	config.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
		wrapped := transport.wrap(next)
		if wrapped != next {
			calls++
		}
		return wrapped
	}
	if _, _, err := spdy.RoundTripperFor(config); err != nil || calls != 0 {
		t.Errorf("%d transports of SPDY are replaced, %v", calls, err)
	}
}

// tracing sets a header, as the wrapper of a tracer does.
type tracing struct{ next http.RoundTripper }

func (t tracing) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Traceparent", "x")
	return t.next.RoundTrip(req)
}

// TestNew_UnsuitableHost_ReturnsError: the loopback URL must be of https.
func TestNew_UnsuitableHost_ReturnsError(t *testing.T) {
	for _, host := range []string{"http://127.0.0.1:1", "::"} {
		if _, err := New(&rest.Config{Host: host}); err == nil {
			t.Errorf("%s: no error", host)
		}
	}
}
