package main

import (
	"bytes"
	"compress/gzip"
	"testing"
)

func TestGunzip_SecondMember_IsRejected(t *testing.T) {
	const list = `{"items":[{"metadata":{"uid":"x"}}]}`
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write([]byte(list))
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := gunzip(b.Bytes()); err != nil || string(got) != list {
		t.Errorf("got %q, %v", got, err)
	}
	if _, err := gunzip(append(b.Bytes(), b.Bytes()...)); err == nil {
		t.Error("two members are accepted")
	}
	broken := bytes.Clone(b.Bytes())
	broken[len(broken)-8] ^= 1 // of the CRC
	if _, err := gunzip(broken); err == nil {
		t.Error("a wrong checksum is accepted")
	}
}
