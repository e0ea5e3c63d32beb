package gzipjoin

import (
	"bytes"
	stdgzip "compress/gzip"
	"io"
	"testing"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// noFurther is a source that fails the test when it is read beyond its end, where an idle
// connection would block.
type noFurther struct {
	t    *rapid.T
	data []byte
	want func() bool // all content has been returned
}

func (n *noFurther) Read(p []byte) (int, error) {
	if len(n.data) == 0 {
		if !n.want() {
			n.t.Fatal("the reader wants more before it has returned all that it has")
		}
		return 0, io.EOF
	}
	m := copy(p, n.data)
	n.data = n.data[m:]
	return m, nil
}

func (n *noFurther) ReadByte() (byte, error) {
	var b [1]byte
	_, err := n.Read(b[:])
	return b[0], err
}

// TestMember_IsReturnedBeforeNextBegins: a reader of several members returns all of a member
// before it waits for the header of the next one, as it must for the body of a watch.
func TestMember_IsReturnedBeforeNextBegins(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var body bytes.Buffer
		z := NewWriter(&body)
		var want []byte
		for range rapid.IntRange(1, 4).Draw(t, "writes") {
			content := drawBytes(t, "content")
			want = append(want, content...)
			if rapid.Bool().Draw(t, "loose") {
				write(t, z, content)
			} else if err := z.WriteRun(Compress(nil, content)); err != nil {
				t.Fatal(err)
			}
		}
		testcheck.NoError(t, z.Close())
		var got []byte
		source := &noFurther{t: t, data: body.Bytes(), want: func() bool { return len(got) == len(want) }}
		reader, err := stdgzip.NewReader(source)
		testcheck.NoError(t, err)
		for buf := make([]byte, 512); ; {
			n, err := reader.Read(buf)
			got = append(got, buf[:n]...)
			if err == io.EOF {
				break
			}
			testcheck.NoError(t, err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("%d bytes, want %d", len(got), len(want))
		}
	})
}
