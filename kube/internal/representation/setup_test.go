package representation

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"io"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// podItem is an ItemEncoder.
func podItem(dst []byte, obj runtime.Object) ([]byte, error) {
	buf := bytes.NewBuffer(dst)
	err := podtest.Codec().Encode(obj, buf)
	return buf.Bytes(), err
}

// newRep returns a representation of the pods that ends with the test.
func newRep(t testing.TB, c *podtest.Cluster, f Format) *Representation {
	t.Helper()
	if f.Encode == nil {
		f.Encode = podItem
	}
	rep := newRepresentation(c.View.CurrentGeneration(), f)
	t.Cleanup(rep.Close)
	return rep
}

// runs returns the leaves of all pods.
func runs(t testing.TB, c *podtest.Cluster) (all []mirror.Run) {
	t.Helper()
	for run := range c.Latest(t).Runs("", "") {
		all = append(all, run)
	}
	return all
}

// list returns the bytes of all pods, as a list writes them.
func list(t testing.TB, c *podtest.Cluster, rep *Representation) (all []byte) {
	t.Helper()
	var spans Spans
	for _, run := range runs(t, c) {
		spans.Reset()
		testcheck.NoError(t, rep.appendRun(podtest.Context(t), &spans, run))
		all = append(all, bytes.Join(spans.All, nil)...)
	}
	return all
}

// encodedOneByOne returns the bytes of all pods, each decoded and encoded for this call.
func encodedOneByOne(t testing.TB, c *podtest.Cluster) (all []byte) {
	t.Helper()
	for e := range c.Latest(t).All("", "") {
		obj, err := c.View.CurrentGeneration().Decode(context.Background(), e, e.ModRevision())
		if err == nil {
			all, err = podItem(all, obj)
		}
		testcheck.NoError(t, err)
	}
	return all
}

// podFrame frames each item as a line that begins with the type.
func podFrame(dst []byte, t watch.EventType, item []byte) (framed []byte, size int) {
	n := len(dst)
	dst = append(append(append(append(dst, t...), ' '), item...), '\n')
	return dst, len(dst) - n
}

// inflate returns the uncompressed bytes of a run.
func inflate(t testing.TB, run gzipjoin.Segment) []byte {
	t.Helper()
	var body bytes.Buffer
	z := gzipjoin.NewWriter(&body)
	testcheck.NoError(t, errors.Join(z.WriteRun(run), z.Close()))
	r, err := gzip.NewReader(&body)
	testcheck.NoError(t, err)
	content, err := io.ReadAll(r)
	testcheck.NoError(t, err)
	return content
}

// isLarge reports whether a list makes the items of the run one by one.
func isLarge(rep *Representation, r mirror.Run) bool {
	return (&List{Rep: rep}).decide(r)&large != 0
}
