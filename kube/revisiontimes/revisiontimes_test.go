package revisiontimes

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

func after(seconds int) time.Time { return noon.Add(time.Duration(seconds) * time.Second) }

func observed() *RevisionTimes {
	return &RevisionTimes{Now: after(100), Oldest: 20, Latest: 60, WatchFrom: 15,
		Times: []RevisionTime{{10, after(0)}, {30, after(10)}, {50, after(20)}, {60, after(90)}}}
}

func TestAt_Time_IsItsRevisionOrAnError(t *testing.T) {
	for _, c := range []struct {
		seconds int
		want    int64
		err     string
	}{
		{10, 30, ""}, {19, 30, ""}, {20, 50, ""}, {89, 50, ""}, {90, 60, ""}, {100, 60, ""},
		{101, 0, "in the future"},
		{-1, 0, "observed times since 2026-01-01T12:00:00Z (revision 10)"},
		{5, 0, "revision of 2026-01-01T12:00:05Z, 10, is older than the server's history: the oldest revision is 20, of 2026-01-01T12:00:10Z"},
	} {
		got, err := observed().At(after(c.seconds))
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("at %d s: %d, %v; want %d, %q", c.seconds, got, err, c.want, c.err)
		}
	}
	if _, err := (&RevisionTimes{Now: after(0)}).At(after(0)); err == nil {
		t.Error("a time without observations has a revision")
	}
}

// TestAt_EqualTimes_IsTheNewestRevision: the server's clock was set back.
func TestAt_EqualTimes_IsTheNewestRevision(t *testing.T) {
	r := &RevisionTimes{Now: after(100), Oldest: 1, Latest: 60, Times: []RevisionTime{{10, after(0)}, {20, after(5)}, {30, after(5)}, {40, after(5)}}}
	if got, err := r.At(after(5)); got != 40 || err != nil {
		t.Errorf("at 5 s: %d, %v; want 40", got, err)
	}
}

func TestTimeOf_Revision_IsWhenItWasReached(t *testing.T) {
	for _, c := range []struct {
		revision int64
		seconds  int
		ok       bool
	}{{9, 0, false}, {10, 0, true}, {11, 10, true}, {30, 10, true}, {31, 20, true}, {60, 90, true}, {61, 0, false}} {
		got, ok := observed().TimeOf(c.revision)
		if ok != c.ok || ok && !got.Equal(after(c.seconds)) {
			t.Errorf("revision %d: %v, %v; want %v, %v", c.revision, got, ok, after(c.seconds), c.ok)
		}
	}
}

func TestCheck_RevisionOutsideOfTheWindow_IsRefused(t *testing.T) {
	for revision, want := range map[int64]string{19: "older than", 20: "", 60: "", 61: "in the future: the newest one is 60"} {
		err := observed().Check(revision)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("revision %d: %v, want %q", revision, err, want)
		}
	}
}

func TestRequested_AcceptHeaders(t *testing.T) {
	for accept, want := range map[string]bool{
		MediaType:                       true,
		MediaType + ",application/json": true,
		"application/json," + MediaType: false,
		"application/json":              false,
		"":                              false,
		"application/json;as=RevisionTimes;v=v2;g=stratakube.io":         false,
		"application/json;as=Table;v=v1;g=meta.k8s.io":                   false,
		"application/yaml;as=RevisionTimes;v=v1alpha1;g=stratakube.io":   false,
		"application/json; as=RevisionTimes; g=stratakube.io;v=v1alpha1": true,
	} {
		req := &http.Request{Header: http.Header{"Accept": {accept}}}
		if got := Requested(req); got != want {
			t.Errorf("%q: %v", accept, got)
		}
	}
}
