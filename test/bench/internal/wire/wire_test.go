package wire

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// encodeList returns a list of n ConfigMaps as an API server sends it.
func encodeList(t *testing.T, n int, mediaType string) []byte {
	t.Helper()
	list := &corev1.ConfigMapList{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMapList"},
		ListMeta: metav1.ListMeta{ResourceVersion: "123"},
	}
	for i := range n {
		list.Items = append(list.Items, corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("cm-", i), UID: types.UID(fmt.Sprint("uid-", i)), ResourceVersion: fmt.Sprint(i + 1)},
			// Data that looks like the counted marker, and that makes lengths of one, two and three
			// bytes.
			Data: map[string]string{"data": `"uid":"` + strings.Repeat("x", i*i)},
		})
	}
	info, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), mediaType)
	if !ok {
		t.Fatalf("no serializer for %s", mediaType)
	}
	data, err := runtime.Encode(info.Serializer, list)
	testcheck.NoError(t, err)
	return data
}

var formats = map[string]struct {
	mediaType string
	count     func([]byte) (int, error)
}{
	"JSON":     {runtime.ContentTypeJSON, CountJSON},
	"protobuf": {runtime.ContentTypeProtobuf, CountProtobuf},
}

func TestCount_WholeList_ReturnsObjects(t *testing.T) {
	for format, f := range formats {
		for _, n := range []int{0, 1, 200} {
			if got, err := f.count(encodeList(t, n, f.mediaType)); got != n || err != nil {
				t.Errorf("%s: got %d, %v, want %d", format, got, err, n)
			}
		}
	}
}

func TestCount_Truncated_ReturnsError(t *testing.T) {
	for format, f := range formats {
		body := encodeList(t, 20, f.mediaType)
		for _, length := range []int{0, 1, 3, 4, 5, len(body) / 2, len(body) - 10} {
			if n, err := f.count(body[:length]); err == nil {
				t.Errorf("%s: %d of %d bytes count as %d", format, length, len(body), n)
			}
		}
	}
}

func TestCountJSON_MetadataLast_IsWhole(t *testing.T) {
	const whole = `{"apiVersion":"v1","items":[{"metadata":{"uid":"1"}},{"metadata":{"uid":"2"}}],"kind":"ThingList","metadata":{"resourceVersion":"7"}}` + "\n"
	if n, err := CountJSON([]byte(whole)); n != 2 || err != nil {
		t.Errorf("got %d, %v", n, err)
	}
	for _, cut := range []int{2, 3, 20, 70} {
		if _, err := CountJSON([]byte(whole[:len(whole)-cut])); err == nil {
			t.Errorf("no error without the last %d bytes", cut)
		}
	}
}

func TestCountProtobuf_InvalidBody_ReturnsError(t *testing.T) {
	for name, body := range map[string]string{
		"JSON":             `{"kind":"ConfigMapList"}`,
		"no list":          "k8s\x00",
		"absurd length":    "k8s\x00\x12\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
		"field over end":   "k8s\x00\x12\x02\x12\x7f",
		"foreign wire tag": "k8s\x00\x11\x00",
	} {
		if n, err := CountProtobuf([]byte(body)); err == nil {
			t.Errorf("%s counts as %d", name, n)
		}
	}
}

const (
	modified = `{"type":"MODIFIED","object":{"kind":"ConfigMap","metadata":{"name":"a","resourceVersion":"41"},"data":{"data":"\"sent\":\"7\"","sent":"1500"}}}` + "\n"
	bookmark = `{"type":"BOOKMARK","object":{"kind":"ConfigMap","metadata":{"resourceVersion":"42","creationTimestamp":null}}}` + "\n"
	failed   = `{"type":"ERROR","object":{"kind":"Status","status":"Failure","code":410}}` + "\n"
)

func TestReadJSONEvents_ReturnsEventsInOrder(t *testing.T) {
	for name, reader := range map[string]io.Reader{
		"whole":    strings.NewReader(modified + bookmark),
		"bytewise": iotest.OneByteReader(strings.NewReader(modified + bookmark)),
	} {
		var got []Event
		err := ReadJSONEvents(reader, "sent", func(e Event) error { got = append(got, e); return nil })
		testcheck.NoError(t, err)
		if len(got) != 2 || got[0] != (Event{"MODIFIED", 41, time.Unix(0, 1500)}) || got[1] != (Event{Type: "BOOKMARK", Revision: 42}) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}

func TestReadJSONEvents_BrokenStream_ReturnsError(t *testing.T) {
	lost := errors.New("connection lost")
	for name, c := range map[string]struct {
		body   io.Reader
		events int
	}{
		"error event":     {strings.NewReader(modified + failed), 1},
		"cut frame":       {strings.NewReader(modified + bookmark[:30]), 1},
		"connection lost": {io.MultiReader(strings.NewReader(modified), iotest.ErrReader(lost)), 1},
		"no type":         {strings.NewReader(`{"kind":"Status"}` + "\n"), 0},
		"no revision":     {strings.NewReader(`{"type":"ADDED","object":{}}` + "\n"), 0},
		"endless frame":   {strings.NewReader(strings.Repeat("x", maxFrameBytes+1)), 0},
	} {
		events := 0
		err := ReadJSONEvents(c.body, "sent", func(Event) error { events++; return nil })
		if err == nil || events != c.events {
			t.Errorf("%s: error %v after %d events, want one after %d", name, err, events, c.events)
		}
	}
}

func TestReadJSONEvents_CallbackError_Stops(t *testing.T) {
	enough := errors.New("enough")
	events := 0
	err := ReadJSONEvents(strings.NewReader(modified+modified), "sent", func(Event) error { events++; return enough })
	if !errors.Is(err, enough) || events != 1 {
		t.Fatalf("error %v after %d events", err, events)
	}
}

func TestContinue_ReturnsTokenOfListMetadata(t *testing.T) {
	long := strings.Repeat("x", 2*continueWithin)
	for page, want := range map[string]string{
		"": "",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5"},"items":[]}`:                                                 "",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5","continue":"eyJ2_-","remainingItemCount":3},"items":[]}`:      "eyJ2_-",
		`{"kind":"ConfigMapList","metadata":{"resourceVersion":"5","continue":"abc"},"items":[{"data":{"d":"` + long + `"}}]}`:   "abc",
		`{"kind":"ConfigMapList","metadata":{},"items":[{"data":{"d":"` + long + `","continue":"not a token"}}]}`:                "",
		`{"kind":"ConfigMapList","metadata":{},"items":[{"data":{"d":"a string with \"continue\":\"quotes\" does not match"}}]}`: "",
	} {
		if got := Continue([]byte(page)); got != want {
			t.Errorf("%.100s: got %q, want %q", page, got, want)
		}
	}
}
