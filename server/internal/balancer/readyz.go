package balancer

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"
)

// Readyz returns a check of an API server by GET /readyz on its address, over TLS: the server's
// certificate is verified with the certificates in caFile, and the check has the client certificate
// and key in the file pair. Each check function keeps one connection. It is not for concurrent
// calls.
func Readyz(address, caFile, pair string) (func(context.Context) error, error) {
	pem, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("health check of %s: %w", address, err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("health check of %s: %s has no certificates", address, caFile)
	}
	own, err := tls.LoadX509KeyPair(pair, pair)
	if err != nil {
		return nil, fmt.Errorf("health check of %s: %w", address, err)
	}
	client := &http.Client{Transport: &http.Transport{
		DialContext:     (&net.Dialer{}).DialContext,
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}},
		MaxIdleConns:    1,
		IdleConnTimeout: time.Minute,
	}}
	target := "https://" + address + "/readyz"
	return func(ctx context.Context) error { return readyz(ctx, client, target) }, nil
}

// readyz returns nil if the server answers 200, and an error that wraps ErrUnready, with the failed
// checks, if it answers otherwise.
func readyz(ctx context.Context, client *http.Client, target string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target, nil)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return fmt.Errorf("no answer in time: %w", context.Cause(ctx))
		}
		if request, is := errors.AsType[*url.Error](err); is {
			err = request.Err // without the URL, which the name of the backend replaces
		}
		return err
	}
	defer resp.Body.Close()
	const limit = 16 << 10 // all checks of /readyz, one line each
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit))
	switch {
	case resp.StatusCode == http.StatusOK && err == nil:
		return nil
	case resp.StatusCode == http.StatusOK:
		return err
	}
	return fmt.Errorf("%w: %s%s", ErrUnready, resp.Status, failedChecks(body))
}

// failedChecks returns the names of failed checks in a body of /readyz.
func failedChecks(body []byte) string {
	text := ""
	for line := range bytes.Lines(body) {
		if name, is := bytes.CutPrefix(line, []byte("[-]")); is {
			name, _, _ = bytes.Cut(name, []byte(" "))
			text += " " + string(name)
		}
	}
	if text != "" {
		return ", failed:" + text
	}
	return ""
}
