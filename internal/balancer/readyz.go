package balancer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
)

// Readyz returns a check of an API server by GET on url, its /readyz. The check keeps one
// connection if client has a transport of its own.
func Readyz(client *http.Client, url string) func(context.Context) error {
	return func(ctx context.Context) error { return readyz(ctx, client, url) }
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
