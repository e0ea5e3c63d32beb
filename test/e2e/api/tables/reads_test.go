package tables

import (
	"bytes"
	"slices"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"

	"github.com/stratakube/strata/test/harness"
)

// reads is the most expensive kind of read of etcd for a request.
type reads int

const (
	nothing  reads = iota
	revision       // etcd's current revision, which makes a read consistent
	values         // objects
)

func (r reads) String() string { return [...]string{"nothing", "its revision", "objects"}[r] }

// kind classifies a read. Reads of other resources do not belong to the request.
func kind(r *pb.RangeRequest) reads {
	prefix := []byte("/registry/secrets")
	switch {
	case r.CountOnly && len(r.RangeEnd) > 0 && !bytes.HasPrefix(r.Key, prefix):
		return nothing // upstream counts the objects of each resource periodically
	case r.CountOnly, bytes.Equal(bytes.TrimSuffix(r.Key, []byte("/")), prefix) && len(r.RangeEnd) == 0:
		return revision
	case bytes.HasPrefix(r.Key, prefix) && !r.KeysOnly:
		return values
	}
	return nothing
}

// asked returns the reads of etcd while f ran.
func (s *server) asked(f func() error) (reads, error) {
	s.proxy.Reset()
	err := f()
	most := nothing
	for _, r := range s.proxy.Ranges() {
		most = max(most, kind(r))
	}
	return most, err
}

// tries is the number of attempts to send requests with no more reads of etcd than expected.
const tries = 6

// observe returns the reads of etcd while send sends one or more requests. Servers also read
// periodically, which can only add reads: if they exceed want, send is called again. Upstream reads
// its revision once a minute, to count keys; want does not say whether a request needs that of it,
// so one that seems to is sent twice.
func (s *server) observe(want reads, send func() error) (reads, error) {
	least := values
	for try := range tries {
		seen, err := s.asked(send)
		if err != nil {
			return seen, err
		}
		least = min(least, seen)
		if least == nothing || least <= want && (try > 0 || !s.isUpstream()) {
			break
		}
	}
	return least, nil
}

func (s *server) isUpstream() bool { return slices.Contains(s.flags, "--engine="+harness.Upstream) }
