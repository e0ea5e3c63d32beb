package kubestorage

import (
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/mirror"
)

// Expect returns the range of keys, and the newest revision here to look at them in, that Read
// would read for the same options: for estimates, before a request has waited for
// anything. It waits for nothing itself, and costs O(log n). ok is false if memory may not
// be what answers: the resource is not loaded, the revision is older than memory, not
// yet here, or not to be had from memory.
func (s *Store) Expect(key string, opts storage.ListOptions) (snap mirror.Snapshot, start, end string, ok bool) {
	prefix, err := s.prepareKey(key, opts.Recursive)
	if err != nil {
		return snap, "", "", false
	}
	exact, from, err := storage.ValidateListOptions(prefix, s.versioner, opts)
	if err != nil || exact < 0 || !s.resource.Ready() || !s.fromMemory(opts, exact) {
		return snap, "", "", false
	}
	if exact > 0 {
		snap, err = s.resource.At(exact)
	} else {
		snap, err = s.resource.Latest()
	}
	if err != nil {
		return snap, "", "", false
	}
	start, end = prefix, after(prefix)
	if !opts.Recursive {
		end = prefix + "\x00"
	} else if from != "" {
		start = from
	}
	return snap, start, end, true
}
