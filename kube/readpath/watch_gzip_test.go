package readpath

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/representation"
)

const watchListQuery = "sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan"

// openRaw starts a watch in ns and does not decompress its body.
func (w *watched) openRaw(t testing.TB, engine, query, accept, encoding string) *http.Response {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableCompression: true}
	return w.send(t, transport, engine, query, accept, encoding)
}

// members reads gzip members one by one.
type members struct {
	body *bufio.Reader
	z    *gzip.Reader
}

// next returns the content of the next member.
func (m *members) next(t testing.TB) []byte {
	t.Helper()
	var err error
	if m.z == nil {
		m.z, err = gzip.NewReader(m.body)
	} else {
		err = m.z.Reset(m.body)
	}
	testcheck.NoError(t, err)
	m.z.Multistream(false)
	content, err := io.ReadAll(m.z)
	testcheck.NoError(t, err)
	return content
}

// compresses skips the test if this release of k8s.io/apiserver does not compress watches.
func compresses(t testing.TB) {
	if !knowsWatchListCompression() {
		t.Skip("k8s.io/apiserver does not know the gate WatchListCompression")
	}
}

// TestCompressedWatch_EndsMemberAtEachFlush: the initial events and their bookmark are complete
// members, and so is each later event, which arrives without anything after it.
func TestCompressedWatch_EndsMemberAtEachFlush(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	compresses(t)
	for _, accept := range []string{jsonType, protobufType, jsonType + metadataV1, protobufType + metadataV1} {
		t.Run(accept, func(t *testing.T) {
			t.Parallel()
			w := watchedPods(t)
			for i := range 300 {
				w.put(t, w.object(fmt.Sprintf("at-%03d", i), map[string]string{"i": fmt.Sprint(i), "filler": strings.Repeat("0123456789", 60)}))
			}
			w.catchUp(t)
			plain := w.openRaw(t, "", watchListQuery, accept, "")
			want := bytes.Join(readFrames(plain).until(t, "initial-events-end"), nil)
			for range 2 { // the second time from cached bytes
				resp := w.openRaw(t, "", watchListQuery, accept, "gzip")
				if resp.Header.Get("Content-Encoding") != "gzip" || resp.Header.Get("Vary") != "Accept-Encoding" {
					t.Fatalf("headers %v", resp.Header)
				}
				m := &members{body: bufio.NewReader(resp.Body)}
				var initial []byte
				for len(initial) < len(want) {
					initial = append(initial, m.next(t)...)
				}
				if !bytes.Equal(initial, want) {
					t.Fatalf("%d bytes of initial events differ from the %d that are not compressed", len(initial), len(want))
				}
				live := readFrames(plain)
				for _, name := range []string{"one", "two"} {
					w.put(t, w.object(name, nil))
					frame, err := live.next()
					testcheck.NoError(t, err)
					if got := m.next(t); !bytes.Equal(got, frame) {
						t.Fatalf("the member of one event is %q, want %q", got, frame)
					}
					w.delete(t, name)
					if frame, err = live.next(); err != nil {
						t.Fatal(err)
					}
					if got := m.next(t); !bytes.Equal(got, frame) {
						t.Fatalf("the member of a deletion is %q, want %q", got, frame)
					}
				}
				resp.Body.Close()
				plain.Body.Close()
				plain = w.openRaw(t, "", watchListQuery, accept, "")
				want = bytes.Join(readFrames(plain).until(t, "initial-events-end"), nil)
			}
		})
	}
}

// dueSoon is the context of a request whose deadline is always half a second away: the request
// waits for a revision for a part of that, and never reaches the deadline, also on a busy machine.
type dueSoon struct{ context.Context }

func (dueSoon) Deadline() (time.Time, bool) { return time.Now().Add(time.Second / 2), true }

// TestCompressedWatch_Conditions_EqualUpstream checks that the same watches are compressed as
// upstream's.
func TestCompressedWatch_Conditions_EqualUpstream(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	compresses(t)
	w := watchedPods(t)
	w.put(t, w.labelled("a", nil))
	w.catchUp(t)
	const tooLarge = watchListQuery + "&resourceVersion=99999999999" // an error event
	var soon atomic.Bool
	w.context = func(ctx context.Context) context.Context {
		if soon.Load() {
			return dueSoon{ctx}
		}
		return ctx
	}
	compare := func(t *testing.T, query, encoding string) {
		want := w.openRaw(t, "upstream", query, jsonType, encoding)
		got := w.openRaw(t, "", query, jsonType, encoding)
		for _, name := range []string{"Content-Type", "Content-Encoding", "Vary"} {
			if g, u := got.Header.Values(name), want.Header.Values(name); fmt.Sprint(g) != fmt.Sprint(u) {
				t.Errorf("%s: %q, upstream %q", name, g, u)
			}
		}
		if got.StatusCode != want.StatusCode {
			t.Errorf("%d, upstream %d", got.StatusCode, want.StatusCode)
		}
	}
	for _, enabled := range []bool{true, false} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, watchListCompression, enabled)
		t.Run(fmt.Sprintf("gate=%v", enabled), func(t *testing.T) {
			// ends after all parallel subtests
			for _, query := range []string{
				watchListQuery,
				watchListQuery + "&labelSelector=app%3Dyes",
				"resourceVersion=0",
				"allowWatchBookmarks=true",
				"sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
				"sendInitialEvents=false&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan",
				tooLarge,
				watchListQuery + "&resourceVersion=x", // 400
			} {
				soon.Store(query == tooLarge) // other watches must not end
				t.Run(query, func(t *testing.T) {
					for _, encoding := range []string{"", "gzip", "deflate, gzip", "gzip;q=1", "identity", "br"} {
						t.Run(encoding, func(t *testing.T) {
							t.Parallel()
							compare(t, query, encoding)
						})
					}
				})
			}
		})
	}
}

// TestCompressedWatch_CountsEventsAndSizes: events and sizes are counted as for an uncompressed
// watch.
func TestCompressedWatch_CountsEventsAndSizes(t *testing.T) {
	compresses(t)
	endpointmetrics.Register()
	w := watchedPods(t)
	for i := range 200 {
		w.put(t, w.object(fmt.Sprintf("at-%03d", i), map[string]string{"filler": strings.Repeat("0123456789", i)}))
	}
	w.catchUp(t)
	gvr := w.resource.GVR
	var sums [2]string
	for i, encoding := range []string{"", "gzip"} {
		endpointmetrics.WatchEvents.Reset()
		endpointmetrics.WatchEventsSizes.Reset()
		resp := w.openRaw(t, "", watchListQuery, jsonType, encoding)
		body := io.Reader(resp.Body)
		if encoding != "" {
			z, err := gzip.NewReader(resp.Body)
			testcheck.NoError(t, err)
			body = z
		}
		(&frameReader{r: bufio.NewReader(body)}).until(t, "initial-events-end")
		eventually(t, "the bookmark is counted", func() bool {
			n, err := testutil.GetCounterMetricValue(endpointmetrics.WatchEvents.WithLabelValues(gvr.Group, gvr.Version, gvr.Resource))
			return err == nil && n == 201
		})
		h, err := testutil.GetHistogramVecFromGatherer(legacyregistry.DefaultGatherer, "apiserver_watch_events_sizes", nil)
		testcheck.NoError(t, err)
		sums[i] = fmt.Sprintf("%d events of %.0f bytes", h.GetAggregatedSampleCount(), h.GetAggregatedSampleSum())
		resp.Body.Close()
	}
	if sums[0] != sums[1] {
		t.Errorf("counted %s, want %s", sums[1], sums[0])
	}
}

// TestCompressedWatch_Idle_HoldsNoBuffer: an idle watch references neither a buffer nor a gzip
// member, independent of earlier writes.
func TestCompressedWatch_Idle_HoldsNoBuffer(t *testing.T) {
	t.Parallel()
	var got bytes.Buffer
	sink := &countingSink{Buffer: &got, header: http.Header{}}
	w := &watchWriter{w: sink, flusher: sink, count: nopMetric{}, sizes: nopMetric{}, gzip: true}
	var want bytes.Buffer
	rnd := rand.New(rand.NewPCG(1, 2))
	flushes := 0
	for i := range 200 {
		size := []int{2, 100, smallWrite, 10_000, largePiece, 3 * writeAtOnce}[rnd.IntN(6)]
		item := append(append([]byte(`{"n":"`), bytes.Repeat([]byte{'a' + byte(i%26)}, size)...), `"},`...)
		framed, n := w.Frame(nil, watch.Added, item)
		var err error
		switch rnd.IntN(3) {
		case 0:
			err = w.item(watch.Added, item)
		case 1:
			err = w.event(watchEvent{t: watch.Added, frame: &representation.Frame{Segment: gzipjoin.Compress(nil, framed), Size: n}})
		default:
			err = w.frames(representation.Frames{Segment: gzipjoin.Compress(nil, framed, framed), Sizes: []uint32{uint32(n), uint32(n)}})
			want.Write(framed)
		}
		if want.Write(framed); err != nil {
			t.Fatal(err)
		}
		if rnd.IntN(4) == 0 {
			flushes++
			if err := w.flush(); err != nil || w.buf != nil || w.member != nil || w.out.buf != nil || w.written {
				t.Fatalf("after a flush: %v, %+v", err, w)
			}
			_ = w.flush() // no events: no member
		}
	}
	testcheck.NoError(t, w.flush())
	body := &members{body: bufio.NewReader(&got)}
	var content []byte
	n := 0
	for ; got.Len() > 0 || body.body.Buffered() > 0; n++ {
		content = append(content, body.next(t)...)
	}
	if !bytes.Equal(content, want.Bytes()) {
		t.Fatalf("the members have %d bytes, want %d", len(content), want.Len())
	}
	if n != flushes && n != flushes+1 {
		t.Errorf("%d members for %d flushes", n, flushes)
	}
}
