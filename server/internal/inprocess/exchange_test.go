package inprocess

import (
	"bytes"
	"net/http"
	"testing"
)

// TestExchange_Idle_HasNoBuffer: a response whose client has read all bytes holds no buffer,
// whatever the sizes of its writes were, and the buffer is no larger than the window.
func TestExchange_Idle_HasNoBuffer(t *testing.T) {
	for name, writes := range map[string][]int{
		"an event":         {1000},
		"small events":     {1000, 1000, 1000, 1000},
		"grown":            {3000, 2000, 1},
		"limit of small":   {eventBytes, 1},
		"the whole window": {1, eventBytes, window - eventBytes - 1},
	} {
		t.Run(name, func(t *testing.T) {
			x := newExchange(nil, newRequestBody(&http.Request{}), nil, func() {})
			for round := range 2 {
				var want []byte
				for i, n := range writes {
					part := bytes.Repeat([]byte{byte('a' + round + i)}, n)
					want = append(want, part...)
					if written, err := x.write(part); written != n || err != nil {
						t.Fatalf("wrote %d of %d bytes, %v", written, n, err)
					}
					if got := cap(x.buf); got > eventBytes && got != window || len(want) <= eventBytes && got != eventBytes {
						t.Errorf("a buffer of %d for %d bytes", got, len(want))
					}
				}
				got := make([]byte, window)
				n, err := x.Read(got)
				if !bytes.Equal(got[:n], want) || err != nil {
					t.Errorf("read %d bytes, want %d, %v", n, len(want), err)
				}
				if x.buf != nil || x.pooled != nil || x.read != 0 {
					t.Errorf("an idle response has a buffer of %d bytes", cap(x.buf))
				}
			}
		})
	}
}

// TestExchange_ReadsBetweenWrites_KeepOrder: bytes that the client has not read stay in order when
// the buffer is compacted and replaced.
func TestExchange_ReadsBetweenWrites_KeepOrder(t *testing.T) {
	x := newExchange(nil, newRequestBody(&http.Request{}), nil, func() {})
	var want, got []byte
	for i := range 2000 {
		part := bytes.Repeat([]byte{byte(i)}, (i*131)%5000)
		if unread := len(want) - len(got); unread+len(part) > window {
			buf := make([]byte, unread-i%100)
			n, err := x.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, buf[:n]...)
		}
		if unread := len(want) - len(got); unread > i%7000 {
			buf := make([]byte, 1+i%7000)
			n, err := x.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, buf[:n]...)
		}
		if _, err := x.write(part); err != nil {
			t.Fatal(err)
		}
		want = append(want, part...)
	}
	for len(got) < len(want) {
		buf := make([]byte, 1000)
		n, err := x.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, buf[:n]...)
	}
	if !bytes.Equal(got, want) {
		t.Error("the client read other bytes")
	}
}
