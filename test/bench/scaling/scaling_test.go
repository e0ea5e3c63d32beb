package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

func TestNodeWatches_AreAsManyAsTheModelCounts(t *testing.T) {
	if n := len(nodeWatches(7)); n != scaling.NodeWatches {
		t.Errorf("a node has %d watches, the model counts %d", n, scaling.NodeWatches)
	}
	want := scaling.PodInformers + scaling.NodeInformers + scaling.LeaseInformers + scaling.EventInformers + scaling.SliceInformers
	if n := len(informerWatches()); n != want {
		t.Errorf("%d informers, the model counts %d", n, want)
	}
}

// frame is a frame of a watch in protobuf: its length, the type of the event as field 1, and other bytes.
func frame(kind string, rest int) []byte {
	body := append([]byte{'\n', byte(len(kind))}, kind...)
	body = append(body, make([]byte, rest)...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

func TestRead_Frames_CountByType(t *testing.T) {
	p := newWatchPool(t.Context())
	stream := bytes.Join([][]byte{frame("ADDED", 300), frame("BOOKMARK", 20), frame("MODIFIED", 0), frame("DELETED", 1)}, nil)
	if err := p.read(bytes.NewReader(stream), scaling.DeliverPod); !errors.Is(err, io.EOF) {
		t.Fatalf("a stream that ended: %v", err)
	}
	if events, bookmarks := p.frames[scaling.DeliverPod].Load(), p.frames[scaling.Bookmark].Load(); events != 3 || bookmarks != 1 {
		t.Errorf("%d events and %d bookmarks, want 3 and 1", events, bookmarks)
	}
}

func TestRead_ErrorFrame_Fails(t *testing.T) {
	p := newWatchPool(t.Context())
	if err := p.read(bytes.NewReader(frame("ERROR", 50)), scaling.DeliverPod); err == nil || !strings.Contains(err.Error(), "ERROR") {
		t.Errorf("an ERROR event: %v", err)
	}
}

func TestAddKwok_RequestsOfBoth_CountOnce(t *testing.T) {
	rates := scaling.Rates{scaling.PodDelete: 2, scaling.Get: 5}
	after := requestCounts{scaling.PodRemove: 150, scaling.Get: 170, scaling.PodStatus: 30}
	after.addKwok(rates, requestCounts{scaling.PodRemove: 100, scaling.Get: 100}, 10)
	for op, want := range map[scaling.Op]float64{scaling.PodRemove: 3, scaling.Get: 7, scaling.PodStatus: 3, scaling.DeliverAll: 2 + 3 + 3} {
		if rates[op] != want {
			t.Errorf("%s: %v per second, want %v", op, rates[op], want)
		}
	}
}

func TestMedianBucket_ReturnsUpperBound(t *testing.T) {
	var buckets []target.Series
	for le, n := range map[string]float64{"0.001": 10, "0.002": 60, "0.004": 90, "+Inf": 100} {
		buckets = append(buckets, target.Series{Labels: map[string]string{"le": le}, Value: n})
	}
	if got := medianBucket(buckets); got != 0.002 {
		t.Errorf("%v s, want 0.002", got)
	}
}
