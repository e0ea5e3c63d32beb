package gzipjoin

import (
	"bytes"
	stdgzip "compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os/exec"
	"sync"
	"testing"

	"github.com/klauspost/compress/gzip"
	"pgregory.net/rapid"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrequire"
)

// drawBytes draws up to three blocks of bytes of one kind: repetitive, few different bytes without
// repetitions, or incompressible.
func drawBytes(t *rapid.T, label string) []byte {
	n := rapid.OneOf(
		rapid.IntRange(0, 300),
		rapid.IntRange(0, 3*blockBytes),
		rapid.SampledFrom([]int{storeBelow - 1, storeBelow, denseBelow - 1, denseBelow, blockBytes - 1, blockBytes, blockBytes + 1, 2 * blockBytes}),
	).Draw(t, label+": length")
	seed := rapid.Uint64().Draw(t, label+": seed")
	switch kind := rapid.SampledFrom([]string{"zero", "random", "base64", "objects"}).Draw(t, label+": kind"); kind {
	case "zero":
		return make([]byte, n)
	case "random":
		return randomBytes(n, seed)
	case "base64":
		return base64.StdEncoding.AppendEncode(nil, randomBytes(n, seed))[:n]
	default:
		random := rand.New(rand.NewPCG(seed, 0))
		var b []byte
		for len(b) < n {
			b = fmt.Appendf(b, `{"metadata":{"name":"object-%d","uid":"%016x"}},`, random.IntN(1000), random.Uint64())
		}
		return b[:n]
	}
}

func randomBytes(n int, seed uint64) []byte {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	b := make([]byte, n)
	rand.NewChaCha8(key).Read(b) // never fails
	return b
}

// decode returns the content of body, which must be exactly one member.
func decode(body []byte) ([]byte, error) {
	r := bytes.NewReader(body)
	z, err := stdgzip.NewReader(r)
	if err != nil {
		return nil, err
	}
	z.Multistream(false)
	content, err := io.ReadAll(z)
	if err == nil && r.Len() > 0 {
		err = fmt.Errorf("%d bytes after the member", r.Len())
	}
	return content, err
}

func requireDecodesTo(t interface {
	Helper()
	Fatalf(string, ...any)
}, body, want []byte,
) {
	t.Helper()
	got, err := decode(body)
	if err != nil {
		t.Fatalf("compress/gzip: %v", err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("compress/gzip decodes %d bytes, other than the %d that were written", len(got), len(want))
	}
	z, err := gzip.NewReader(bytes.NewReader(body))
	if err != nil {
		t.Fatalf("klauspost/compress/gzip: %v", err)
	}
	if got, err = io.ReadAll(z); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("klauspost/compress/gzip: %d bytes of %d, %v", len(got), len(want), err)
	}
}

func write(t interface {
	Helper()
	Fatalf(string, ...any)
}, z *Writer, p []byte,
) {
	t.Helper()
	if n, err := z.Write(p); n != len(p) || err != nil {
		t.Fatalf("Write: %d of %d bytes, %v", n, len(p), err)
	}
}

func TestWriter_RunsAndBytes_MakeOneMember(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// A few runs, each of several pieces, written in any order and number.
		var runs []Segment
		var contents [][]byte
		for i := range rapid.IntRange(1, 3).Draw(t, "runs") {
			content := drawBytes(t, fmt.Sprintf("run %d", i))
			var pieces [][]byte
			for rest := content; len(rest) > 0; {
				n := rapid.IntRange(0, len(rest)).Draw(t, "piece")
				if rapid.Bool().Draw(t, "last piece") {
					n = len(rest)
				}
				pieces, rest = append(pieces, rest[:n]), rest[n:]
			}
			runs, contents = append(runs, Compress(nil, pieces...)), append(contents, content)
		}
		var body bytes.Buffer
		var want []byte
		z := NewWriter(&body)
		for range rapid.IntRange(0, 8).Draw(t, "writes") {
			if rapid.Bool().Draw(t, "loose") {
				loose := drawBytes(t, "loose")
				write(t, z, loose)
				want = append(want, loose...)
				clear(loose) // a Writer does not retain its input
				continue
			}
			i := rapid.IntRange(0, len(runs)-1).Draw(t, "run")
			if err := z.WriteRun(runs[i]); err != nil {
				t.Fatalf("WriteRun: %v", err)
			}
			want = append(want, contents[i]...)
		}
		if err := z.Close(); err != nil {
			t.Fatalf("Close: %v", err)
		}
		requireDecodesTo(t, body.Bytes(), want)
	})
}

func FuzzWriter(f *testing.F) {
	f.Add([]byte{}, []byte{})
	f.Add([]byte(`{"items":[{"metadata":{}},{"metadata":{}}]}`), []byte{10, 14, 14})
	f.Add(base64.StdEncoding.AppendEncode(nil, randomBytes(1<<10, 1)), []byte{3, 255, 0, 255})
	f.Fuzz(func(t *testing.T, content, cuts []byte) {
		var body bytes.Buffer
		z := NewWriter(&body)
		rest := content
		for _, cut := range cuts {
			n := min(int(cut>>1), len(rest))
			if cut&1 == 0 {
				write(t, z, rest[:n])
			} else if err := z.WriteRun(Compress(nil, rest[:n/2], rest[n/2:n])); err != nil {
				t.Fatalf("WriteRun: %v", err)
			}
			rest = rest[n:]
		}
		testcheck.NoError(t, errors.Join(z.WriteRun(Compress(nil, rest)), z.Close()))
		requireDecodesTo(t, body.Bytes(), content)
	})
}

func TestWriter_NoContent_WritesEmptyMember(t *testing.T) {
	for name, fill := range map[string]func(*Writer){
		"nothing": func(*Writer) {},
		"empty run": func(z *Writer) {
			z.WriteRun(Segment{})
			z.WriteRun(Compress(nil))
			z.WriteRun(Compress(nil, nil, []byte{}))
		},
		"no bytes": func(z *Writer) { z.Write(nil) },
	} {
		t.Run(name, func(t *testing.T) {
			var body bytes.Buffer
			z := NewWriter(&body)
			fill(z)
			testcheck.NoError(t, z.Close())
			requireDecodesTo(t, body.Bytes(), nil)
		})
	}
}

// The header and the end of the last block are visible to a client.
func TestWriter_Framing_EqualsStandardLibrary(t *testing.T) {
	var want, got bytes.Buffer
	std, err := stdgzip.NewWriterLevel(&want, stdgzip.BestSpeed)
	testcheck.NoError(t, err)
	content := []byte("some bytes")
	std.Write(content)
	std.Close()
	z := NewWriter(&got)
	write(t, z, content)
	testcheck.NoError(t, z.Close())
	if g, w := got.Bytes()[:len(header)], want.Bytes()[:len(header)]; !bytes.Equal(g, w) {
		t.Errorf("header % x, want % x", g, w)
	}
	trailer := func(b []byte) []byte { return b[len(b)-8:] }
	if g, w := trailer(got.Bytes()), trailer(want.Bytes()); !bytes.Equal(g, w) {
		t.Errorf("trailer % x, want % x", g, w)
	}
}

// lastBytes keeps the last bytes written to it.
type lastBytes [8]byte

func (l *lastBytes) Write(p []byte) (int, error) {
	last := append(l[:], p...)
	copy(l[:], last[len(last)-len(l):])
	return len(p), nil
}

// The length in the trailer is modulo 2^32. Decoding so many bytes takes too long with the race
// detector, so the trailer is compared with that of the standard library for the same bytes.
func TestWriter_BodyBeyond4GiB_HasStandardTrailer(t *testing.T) {
	content := bytes.Repeat([]byte(`{"metadata":{}},`), 1<<16)
	run := Compress(nil, content)
	if run.Len != 1<<20 {
		t.Fatalf("a run of %d bytes", run.Len)
	}
	var trailer lastBytes
	z := NewWriter(&trailer)
	write(t, z, []byte("x"))
	crc := crc32.ChecksumIEEE([]byte("x"))
	const times = 1<<32>>20 + 3
	for range times {
		testcheck.NoError(t, z.WriteRun(run))
		crc = crc32.Update(crc, crc32.IEEETable, content)
	}
	testcheck.NoError(t, z.Close())
	if got := binary.LittleEndian.Uint32(trailer[:4]); got != crc {
		t.Errorf("checksum %08x, want %08x", got, crc)
	}
	if got, want := binary.LittleEndian.Uint32(trailer[4:]), uint32(3<<20+1); got != want {
		t.Errorf("length modulo 2^32 is %d, want %d", got, want)
	}
}

func TestCompress_AppendsToSlice(t *testing.T) {
	content := randomBytes(1000, 1)
	own := Compress(nil, content)
	if len(own.Deflated) != cap(own.Deflated) {
		t.Errorf("%d bytes in an array of %d", len(own.Deflated), cap(own.Deflated))
	}
	if own.Len != 1000 || own.CRC != crc32.ChecksumIEEE(content) {
		t.Errorf("length %d, checksum %08x", own.Len, own.CRC)
	}
	dst := append(make([]byte, 0, 4000), "before"...)
	appended := Compress(dst, content)
	if !bytes.Equal(appended.Deflated, own.Deflated) {
		t.Error("appended to a slice it is another run")
	}
	if &dst[:len(dst)+1][len(dst)] != &appended.Deflated[0] || string(dst) != "before" {
		t.Error("not appended to the slice that was given")
	}
	appended = Compress(appended.Deflated[:0], nil)
	if appended.Len != 0 || len(appended.Deflated) != 0 {
		t.Errorf("the empty input is %+v", appended)
	}
}

// Neither Compress nor a Writer shares state between calls.
func TestWriter_ConcurrentUse_SharesNoState(t *testing.T) {
	shared := bytes.Repeat([]byte("shared by all,"), 5000)
	run := Compress(nil, shared)
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			for _, size := range []int{10_000, 100_000} {
				own := base64.StdEncoding.AppendEncode(nil, randomBytes(size, uint64(i)))
				var body bytes.Buffer
				z := NewWriter(&body)
				z.Write(own[:3000])
				z.WriteRun(run)
				z.WriteRun(Compress(nil, own))
				z.Write(own[:100])
				z.WriteRun(run)
				z.Close()
				got, err := decode(body.Bytes())
				if want := bytes.Join([][]byte{own[:3000], shared, own, own[:100], shared}, nil); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
				}
			}
		})
	}
	group.Wait()
}

// failAfter fails once n bytes were written.
type failAfter struct{ n int }

var errFull = errors.New("full")

func (f *failAfter) Write(p []byte) (int, error) {
	if f.n -= len(p); f.n < 0 {
		return 0, errFull
	}
	return len(p), nil
}

func TestWriter_UnderlyingError_IsPermanent(t *testing.T) {
	run := Compress(nil, randomBytes(1000, 1))
	for _, n := range []int{0, len(header), 500, len(header) + len(run.Deflated), 2000} {
		z := NewWriter(&failAfter{n})
		err := z.WriteRun(run)
		if _, writeErr := z.Write(randomBytes(1000, 2)); err == nil {
			err = writeErr
		}
		if closeErr := z.Close(); closeErr != errFull || err != nil && err != errFull {
			t.Errorf("after %d bytes: %v, then Close: %v", n, err, closeErr)
		}
		if _, err := z.Write([]byte("x")); err != errFull {
			t.Errorf("after %d bytes: Write after the error: %v", n, err)
		}
		if err := z.WriteRun(run); err != errFull {
			t.Errorf("after %d bytes: WriteRun after the error: %v", n, err)
		}
	}
}

func TestWriter_Closed_ReturnsErrClosed(t *testing.T) {
	var body bytes.Buffer
	z := NewWriter(&body)
	write(t, z, []byte("x"))
	testcheck.NoError(t, errors.Join(z.Close(), z.Close()))
	if _, err := z.Write([]byte("y")); err != ErrClosed {
		t.Errorf("Write: %v", err)
	}
	if err := z.WriteRun(Compress(nil, []byte("y"))); err != ErrClosed {
		t.Errorf("WriteRun: %v", err)
	}
	requireDecodesTo(t, body.Bytes(), []byte("x"))
}

// Other decoders, if they are installed.
func TestWriter_OtherDecoders_DecodeBody(t *testing.T) {
	var body bytes.Buffer
	var want []byte
	z := NewWriter(&body)
	for i := range 20 {
		content := base64.StdEncoding.AppendEncode(nil, randomBytes(10_000*i, uint64(i)))
		want = append(want, content...)
		if i%3 == 0 {
			write(t, z, content)
		} else if err := z.WriteRun(Compress(nil, content)); err != nil {
			t.Fatal(err)
		}
	}
	testcheck.NoError(t, z.Close())
	for _, command := range [][]string{
		{"gzip", "-dc"},
		{"python3", "-c", "import sys,zlib; d=zlib.decompressobj(31); sys.stdout.buffer.write(d.decompress(sys.stdin.buffer.read())); assert d.eof and not d.unused_data"},
		{"node", "-e", "process.stdin.pipe(require('zlib').createGunzip()).pipe(process.stdout)"},
	} {
		t.Run(command[0], func(t *testing.T) {
			if _, err := exec.LookPath(command[0]); err != nil {
				testrequire.Missing(t, command[0], err.Error())
			}
			cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
			cmd.Stdin = bytes.NewReader(body.Bytes())
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			got, err := cmd.Output()
			if err != nil || stderr.Len() > 0 {
				t.Fatalf("%v: %s", err, stderr.Bytes())
			}
			if !bytes.Equal(got, want) {
				t.Fatalf("%d bytes, other than the %d that were written", len(got), len(want))
			}
		})
	}
}
