package main

import (
	"bytes"
	"compress/gzip"
	"testing"

	"github.com/stratakube/strata/test/bench/internal/wire"
)

func TestGunzip_SecondMember_IsRejected(t *testing.T) {
	const list = `{"items":[{"metadata":{"uid":"x"}}]}`
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write([]byte(list))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := gunzip(b.Bytes(), wire.ReadJSONList)
	if err != nil || got.Objects != 1 || got.Bytes != int64(len(list)) {
		t.Errorf("got %+v, %v", got, err)
	}
	if _, err := gunzip(append(b.Bytes(), b.Bytes()...), wire.ReadJSONList); err == nil {
		t.Error("two members are accepted")
	}
	broken := bytes.Clone(b.Bytes())
	broken[len(broken)-8] ^= 1 // of the CRC
	if _, err := gunzip(broken, wire.ReadJSONList); err == nil {
		t.Error("a wrong checksum is accepted")
	}
}
