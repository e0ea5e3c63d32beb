package readpath

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// chunkEncoder encodes any object as the same bytes: a first piece, then the rest, as upstream's
// list encoders do, or all at once, as the encoders of single objects do.
type chunkEncoder [][]byte

func (e chunkEncoder) Encode(_ runtime.Object, w io.Writer) error {
	for _, piece := range e {
		if _, err := w.Write(piece); err != nil {
			return err
		}
	}
	return nil
}

func (e chunkEncoder) Identifier() runtime.Identifier { return "pieces" }

// TestGzip_HeadersAndContent_EqualUpstream compares the headers and the content of responses with
// those of upstream's writer.
func TestGzip_HeadersAndContent_EqualUpstream(t *testing.T) {
	accepts := [][]string{
		nil,
		{""},
		{"gzip"},
		{"GZIP"},
		{"Gzip"},
		{" gzip "},
		{"\tgzip"},
		{"gzip, deflate, br, zstd"},
		{"deflate,gzip"},
		{"deflate , gzip"},
		{"br;q=1.0, gzip;q=0.8, *;q=0.1"},
		{"gzip;q=1"},
		{"gzip;q=0"},
		{"gzip; q=0"},
		{"x-gzip"},
		{"gzipped"},
		{"identity"},
		{"identity, gzip"},
		{"identity;q=0"},
		{"deflate"},
		{"*"},
		{"*;q=0"},
		{","},
		{",,gzip,,"},
		{"gzip;q=0, gzip"},
		{"deflate", "gzip"}, // two headers
		{"gzip", "identity;q=1, gzip;q=0"},
	}
	content := bytes.Repeat([]byte("0123456789abcdef"), gzipThreshold/16+1)
	for _, enabled := range []bool{true, false} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.APIResponseCompression, enabled)
		for _, accept := range accepts {
			for _, size := range []int{0, 1000, gzipThreshold - 1, gzipThreshold, gzipThreshold + 1} {
				for _, first := range []int{min(1, size), size} {
					t.Run(fmt.Sprintf("gate=%v/accept=%q/size=%d/first=%d", enabled, accept, size, first), func(t *testing.T) {
						req := httptest.NewRequest(http.MethodGet, "/api/v1/configmaps", nil)
						if accept != nil {
							req.Header["Accept-Encoding"] = accept
						}
						want := httptest.NewRecorder()
						encoder := chunkEncoder{content[:first], content[first:size]}
						responsewriters.SerializeObject(string(mediaJSON), encoder, want, req, http.StatusOK, nil)

						got := httptest.NewRecorder()
						b := newBody(&readRequest{w: got, req: req, enc: &encoding{format: format{media: mediaJSON}}}, int64(size))
						defer b.free()
						b.write(content[:size])
						b.close()

						for _, name := range []string{"Content-Type", "Content-Encoding", "Vary"} {
							if g, w := got.Header().Values(name), want.Header().Values(name); fmt.Sprint(g) != fmt.Sprint(w) {
								t.Errorf("%s: %q, upstream %q", name, g, w)
							}
						}
						if !bytes.Equal(contentOf(t, got), content[:size]) || !bytes.Equal(contentOf(t, want), content[:size]) {
							t.Error("the content differs")
						}
						if length := got.Header().Get("Content-Length"); length != "" && length != fmt.Sprint(got.Body.Len()) {
							t.Errorf("%d bytes with Content-Length %s", got.Body.Len(), length)
						}
					})
				}
			}
		}
	}
}

// contentOf returns the content of a response, decompressed if its header says so.
func contentOf(t *testing.T, response *httptest.ResponseRecorder) []byte {
	t.Helper()
	if response.Header().Get("Content-Encoding") != "gzip" {
		return response.Body.Bytes()
	}
	z, err := gzip.NewReader(response.Body)
	testcheck.NoError(t, err)
	z.Multistream(false)
	content, err := io.ReadAll(z)
	testcheck.NoError(t, err)
	if response.Body.Len() > 0 {
		t.Fatalf("%d bytes after the member", response.Body.Len())
	}
	return content
}

// TestList_CompressedBlocks_HaveContentOfPlainList: a compressed list of cached blocks has the
// bytes of the list without compression, also at its end, where no comma follows the last item.
func TestList_CompressedBlocks_HaveContentOfPlainList(t *testing.T) {
	t.Parallel()
	w := watchedPods(t)
	const objects = 300
	for i := range objects {
		w.put(t, w.object(fmt.Sprintf("pod-%03d", i), map[string]string{"fill": strings.Repeat(fmt.Sprint(i), 500)}))
	}
	w.catchUp(t)
	list := func(accept media, encoding, query string) *httptest.ResponseRecorder {
		req := httptest.NewRequest(http.MethodGet, "/apis/example.apiserver.k8s.io/v1/pods?resourceVersion=0"+query, nil)
		req.Header.Set("Accept", string(accept))
		req.Header.Set("Accept-Encoding", encoding)
		rw := httptest.NewRecorder()
		w.ServeHTTP(rw, req)
		if got := rw.Header().Get("Content-Encoding"); rw.Code != http.StatusOK || got != encoding {
			t.Fatalf("%s, %q: code %d, Content-Encoding %q", accept, encoding, rw.Code, got)
		}
		return rw
	}
	for _, accept := range []media{mediaJSON, mediaProtobuf} {
		plain := list(accept, "", "")
		for i := range 3 { // later lists have cached blocks
			if got := contentOf(t, list(accept, "gzip", "")); !bytes.Equal(got, plain.Body.Bytes()) {
				t.Errorf("%s, list %d: %d bytes, which differ from the %d bytes without compression", accept, i, len(got), plain.Body.Len())
			}
		}
	}
}
