package tables

import (
	"bytes"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// reads is what a server has asked etcd for to answer a request, the most of it.
type reads int

const (
	nothing  reads = iota
	revision       // which revision it is at, which makes a read consistent
	values         // objects
)

func (r reads) String() string { return [...]string{"nothing", "its revision", "objects"}[r] }

// kind classifies a read. Those of other resources are not the request's.
func kind(r *pb.RangeRequest) reads {
	prefix := []byte("/registry/secrets")
	switch {
	case r.CountOnly && len(r.RangeEnd) > 0 && !bytes.HasPrefix(r.Key, prefix):
		return nothing // upstream counts the objects of each resource now and then
	case r.CountOnly, bytes.Equal(bytes.TrimSuffix(r.Key, []byte("/")), prefix) && len(r.RangeEnd) == 0:
		return revision
	case bytes.HasPrefix(r.Key, prefix) && !r.KeysOnly:
		return values
	}
	return nothing
}

// asked returns what etcd was asked for while f ran.
func (s *server) asked(f func() error) (reads, error) {
	s.proxy.Reset()
	err := f()
	most := nothing
	for _, r := range s.proxy.Ranges() {
		most = max(most, kind(r))
	}
	return most, err
}

// tries is how often requests are sent if etcd was asked for more than it should have been.
const tries = 3

// observe returns what etcd is asked for when send sends a request, or several. If that is more than want, send is called
// again: servers read now and then on their own account, and that can only add to what is seen.
func (s *server) observe(want reads, send func() error) (reads, error) {
	least := values
	for range tries {
		seen, err := s.asked(send)
		if err != nil {
			return seen, err
		}
		if least = min(least, seen); least <= want {
			break
		}
	}
	return least, nil
}
