package readpath

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apiserver/pkg/registry/rest"
)

// textRequests are lists in the forms that people read: their options and media type.
var textRequests = [][2]string{
	{"", "application/yaml"}, {"pretty=true", "application/json"},
	{"", "application/yaml;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}, {"pretty=true", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"},
	{"includeObject=Object", "application/yaml;as=Table;g=meta.k8s.io;v=v1"}, {"pretty=true", "application/json;as=Table;g=meta.k8s.io;v=v1"},
	{"includeObject=None", "application/yaml;as=Table;g=meta.k8s.io;v=v1beta1"},
}

// sameText fails unless the lists in all forms equal those of upstream's handlers byte by byte. It
// returns the statuses.
func sameText(t *testing.T, w *watched) (statuses map[int]int) {
	t.Helper()
	rev := w.catchUp(t)
	statuses = map[int]int{}
	for _, r := range textRequests {
		for _, query := range []string{
			"", "limit=2", "labelSelector=odd%3D1", "labelSelector=none%3D1", "labelSelector=odd%3D1&limit=1", "resourceVersionMatch=Exact&resourceVersion=" + rev,
		} {
			query = strings.Trim(r[0]+"&"+query, "&")
			for _, compressed := range []bool{false, true} {
				got, body := w.list(t, "", query, r[1], compressed)
				want, wantBody := w.list(t, "upstream", query, r[1], compressed)
				statuses[got.StatusCode]++
				if got.StatusCode != want.StatusCode || got.Header.Get("Content-Type") != want.Header.Get("Content-Type") || got.Uncompressed != want.Uncompressed {
					t.Errorf("%s %q: %s %v, upstream %s %v", r[1], query, got.Status, got.Header, want.Status, want.Header)
				}
				if body != wantBody {
					t.Errorf("%s %q:\n%.2000s\nupstream:\n%.2000s", r[1], query, body, wantBody)
				}
			}
		}
	}
	return statuses
}

// TestText_Lists_EqualUpstream compares YAML and indented JSON of objects, metadata and tables.
func TestText_Lists_EqualUpstream(t *testing.T) {
	pods, widgets := watchedPods(t), watchedWidgets(t)
	for name, w := range map[string]*watched{"pods": pods, "widgets": widgets} {
		t.Run(name, func(t *testing.T) {
			tablesOf(w, statusConvertor{rest.NewDefaultTableConvertor(w.resource.GVR.GroupResource())})
			sameText(t, w)
			for i, text := range []string{"<a> & \u2028 \"quoted\"", "a\nb: c\n", "12:30", " long " + strings.Repeat("word ", 40), "\u0085 é \ufeff"} {
				obj := w.object(fmt.Sprintf("object-%02d", i), map[string]string{"text": text, "a1": "", "a10": "null", "a2": "true"})
				m, err := meta.Accessor(obj)
				if err != nil {
					t.Fatal(err)
				}
				m.SetLabels(map[string]string{"odd": fmt.Sprint(i % 2)})
				w.put(t, obj)
			}
			sameText(t, w)
			for i := range 3 { // more than gzipThreshold
				w.put(t, w.object(fmt.Sprintf("z-large-%d", i), map[string]string{"text": strings.Repeat("x<", gzipThreshold/4)}))
			}
			if statuses := sameText(t, w); len(statuses) != 1 || statuses[http.StatusOK] == 0 {
				t.Errorf("answers by status: %v", statuses)
			}
		})
	}
}

// TestYAML_ControlCharacter_IsUpstreamsError: YAML refuses a character that JSON has.
func TestYAML_ControlCharacter_IsUpstreamsError(t *testing.T) {
	w := watchedPods(t)
	tablesOf(w, rest.NewDefaultTableConvertor(w.resource.GVR.GroupResource()))
	w.put(t, w.object("good", nil))
	w.put(t, w.object("object", map[string]string{"text": "\x7f"}))
	if statuses := sameText(t, w); statuses[http.StatusInternalServerError] == 0 || statuses[http.StatusOK] == 0 {
		t.Errorf("answers by status: %v", statuses)
	}
}
