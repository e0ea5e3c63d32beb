package readclients

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/stratakube/strata/test/harness"
)

// TestAudit_EveryLevel_EqualsUpstream: at every audit level, equal requests leave equal events in
// both engines' audit logs: stages, user, verb, object, code, annotations, and the objects that the
// level includes.
func TestAudit_EveryLevel_EqualsUpstream(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	api := both.strata.API()
	createGizmos(t, ctx, api, both.upstream.API())
	levels := map[string]int{ // number of events of one GET
		"audit-response": 2, "audit-request": 2, "audit-metadata": 2, "audit-stages": 1, "audit-other": 0,
	}
	for namespace := range levels {
		_, err := api.Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": namespace}})
		harness.Check(t, err)
		for path, o := range map[string]object{
			maps(namespace): configMap("one", "data"), gizmos(namespace): gizmo("one", "more"),
			"/api/v1/namespaces/" + namespace + "/endpoints": {"metadata": object{"name": "one"}},
		} {
			created, err := api.Create(ctx, path, o)
			harness.Check(t, err)
			harness.Check(t, both.awaitRevision(ctx, path, created.Metadata.ResourceVersion))
		}
	}

	const watch = "?watch=true&timeoutSeconds=1&resourceVersion=0"
	requests := []struct {
		token, path string
		header      http.Header
	}{
		{adminToken, "MAPS/one", nil},
		{adminToken, "MAPS/two", nil},
		{adminToken, "MAPS", nil},
		{adminToken, "MAPS?limit=x", nil},
		{adminToken, "MAPS?resourceVersion=x", nil},
		{adminToken, "MAPS?fieldSelector=metadata.name%3Done", nil},
		{adminToken, "MAPS" + watch, nil},
		{adminToken, "MAPS/one", http.Header{"Accept": {"application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"}}},
		{adminToken, "MAPS/one", http.Header{"Accept": {"text/html"}}},
		{adminToken, "MAPS", http.Header{"Accept": {"application/vnd.kubernetes.protobuf"}}},
		{adminToken, "MAPS/one", http.Header{"Impersonate-User": {"somebody"}, "Impersonate-Group": {"system:masters"}}},
		{noRightsToken, "MAPS/one", nil},
		{noRightsToken, "MAPS" + watch, nil},
		{"no such token", "MAPS/one", nil},
		{adminToken, "GIZMOS/one", nil},
		{adminToken, "GIZMOS/two", nil},
		{adminToken, "GIZMOS", nil},
		{adminToken, "GIZMOS" + watch, nil},
		{adminToken, "ENDPOINTS/one", nil},
		{adminToken, "ENDPOINTS", nil},
		{adminToken, "ENDPOINTS" + watch, nil},
	}
	for namespace, perGet := range levels {
		t.Run(namespace, func(t *testing.T) {
			t.Parallel()
			for i, r := range requests {
				path := strings.NewReplacer("MAPS", maps(namespace), "GIZMOS", gizmos(namespace), "ENDPOINTS", "/api/v1/namespaces/"+namespace+"/endpoints").Replace(r.path)
				header := r.header.Clone()
				if header == nil {
					header = http.Header{}
				}
				seen := map[string]string{}
				for _, engine := range both.each() {
					var id string
					var answer *harness.Response
					// as often as a busy server refuses it
					for round := 0; round == 0 || answer.Refused() && round < 5; round++ {
						if round > 0 {
							harness.Pause(ctx, time.Second)
						}
						// The client sets the request's audit ID, to find its events.
						id = fmt.Sprintf("%s-%d-%d", namespace, i, round)
						header.Set("Audit-Id", id)
						answer = harness.Must[*harness.Response](t)(engine.raw(ctx, r.token, http.MethodGet, path, header))
					}
					if got := answer.Header.Get("Audit-Id"); got != id {
						t.Errorf("%s: GET %s: the answer's Audit-Id is %q, want %q", engine.name, path, got, id)
					}
					// a 401 has one event, of an omitted stage
					due := perGet > 1 || perGet == 1 && answer.Code != http.StatusUnauthorized
					events := harness.Must[[]auditv1.Event](t)(engine.audited(ctx, id, due))
					if n := len(events); i == 0 && n != perGet {
						t.Errorf("%s: GET %s left %d audit events, want %d", engine.name, path, n, perGet)
					}
					seen[engine.name] = harness.Must[string](t)(eventsText(events))
				}
				if got, want := seen[harness.Strata], seen[harness.Upstream]; got != want {
					t.Errorf("GET %s as %q (%v): got the events\n%s\nwant\n%s", path, r.token, r.header, got, want)
				}
			}
		})
	}
}

// audited returns the events of an answered request; if due is set it waits until they are
// complete.
func (e *engine) audited(ctx context.Context, id string, due bool) (events []auditv1.Event, err error) {
	err = harness.Poll(ctx, func(context.Context) (bool, error) {
		events = nil
		file, err := os.Open(e.auditLog)
		if err != nil {
			return false, err
		}
		defer file.Close()
		lines := bufio.NewReader(file)
		for {
			line, err := lines.ReadString('\n')
			if err != nil {
				break // the line is not complete yet
			}
			if !strings.Contains(line, `"auditID":"`+id+`"`) {
				continue
			}
			var event auditv1.Event
			if err := json.Unmarshal([]byte(line), &event); err != nil {
				return false, fmt.Errorf("%s: %w", line, err)
			}
			events = append(events, event)
		}
		complete := slices.ContainsFunc(events, func(event auditv1.Event) bool {
			// its only event
			unauthorized := event.ResponseStatus != nil && event.ResponseStatus.Code == http.StatusUnauthorized
			return event.Stage == auditv1.StageResponseComplete || unauthorized
		})
		if due && !complete {
			return false, fmt.Errorf("no complete event of %s among %d events", id, len(events))
		}
		return true, nil
	})
	return events, err
}

// eventsText returns events without the fields that differ between two requests.
func eventsText(events []auditv1.Event) (string, error) {
	var text strings.Builder
	for _, event := range events {
		event.AuditID = "" // that of a repeated request differs
		event.RequestReceivedTimestamp.Reset()
		event.StageTimestamp.Reset()
		// The set of recorded latencies depends on the duration of the request.
		for key := range event.Annotations {
			if strings.HasPrefix(key, "apiserver.latency.k8s.io/") {
				delete(event.Annotations, key)
			}
		}
		line, err := json.MarshalIndent(event, "", " ")
		if err != nil {
			return "", err
		}
		text.Write(listRevision.ReplaceAll(line, []byte(`${1}0"`)))
		text.WriteByte('\n')
	}
	return text.String(), nil
}
