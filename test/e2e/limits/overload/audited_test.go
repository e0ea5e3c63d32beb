package overload

import (
	"context"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const initialEvents = "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=86400"

// readSlowly reads an answer in pieces, to its end.
func (s *scene) readSlowly(ctx context.Context, o options, path, query, accept string, piece int64, every time.Duration) {
	c, err := s.client(o)
	if err != nil {
		return
	}
	defer c.close()
	response, err := c.get(ctx, path, query, accept, "")
	if err != nil {
		return
	}
	defer response.Body.Close()
	ticker := time.NewTicker(every) // after a refusal it waits, too
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if _, err := io.CopyN(io.Discard, response.Body, piece); err != nil {
				return
			}
		}
	}
}

// serveAudited: an informer can list a collection whose audit events contain the response, however
// small the memory limit of lists is.
func (s *scene) serveAudited(t *testing.T, ctx context.Context) {
	reader := s.server.APIFor(s.server.ConfigFor(readerToken))
	for _, accept := range []string{jsonType, protobufType} {
		r, err := reader.DoAs(ctx, http.MethodGet, mapsPath, "resourceVersion=0&limit=500", "", accept, nil)
		harness.Check(t, err)
		if r.Code != http.StatusOK || len(r.Body) < 20_000_000 {
			t.Errorf("a list in %s is answered with %d and %d bytes", accept, r.Code, len(r.Body))
		}
	}
}

// auditLists returns the flags with which audit events contain lists.
func auditLists(t *testing.T) []string {
	policy := harness.New(t).WriteFile("policy.yaml", []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n"+
		"- level: RequestResponse\n  verbs: [list]\n  resources: [{group: \"\", resources: [configmaps]}]\n- level: None\n"))
	return []string{"--audit-policy-file=" + policy, "--audit-log-path=/dev/null"}
}
