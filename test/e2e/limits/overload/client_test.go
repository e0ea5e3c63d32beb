package overload

import (
	"context"
	"net/http"
)

// options of a client.
type options struct {
	token string
	http1 bool
}

// client has a harness.Server.SlowClient.
type client struct {
	options
	s    *scene
	http *http.Client
}

func (s *scene) client(o options) (*client, error) {
	slow, err := s.server.SlowClient(o.http1)
	return &client{o, s, slow}, err
}

func (c *client) close() { c.http.CloseIdleConnections() }

// get sends a GET and returns the response with its body unread.
func (c *client) get(ctx context.Context, path, query, accept, encoding string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.s.server.URL+path+"?"+query, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+c.token)
	if accept != "" {
		request.Header.Set("Accept", accept)
	}
	if encoding != "" {
		request.Header.Set("Accept-Encoding", encoding)
	}
	request.Header.Set("User-Agent", "overload")
	return c.http.Do(request)
}
