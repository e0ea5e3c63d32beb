package mirror

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unsafe"

	"github.com/stratakube/strata/mirror/driver"
)

// load is a prefix as listed at one revision. Every lineage begins with a load (D5). The loader
// creates it; it has no effect before the writer installs it.
type load struct {
	header     driver.Header // of the list
	entries    []*Entry
	began      time.Time
	omitted    []string // excluded prefixes whose keys were left out
	hasGap     bool     // ended lineages get a successor, with a gap of events in between
	mayBeWrong bool     // the cached state, or events sent to clients, may be wrong
	restore    *restore // of the history before the list, nil if it is not restored
	err        error
}

// omits reports whether keys with the prefix may have been left out.
func (l *load) omits(prefix string) bool {
	return slices.ContainsFunc(l.omitted, func(p string) bool { return strings.HasPrefix(prefix, p) })
}

// errStart is the reason for the first list.
var errStart = errors.New("initial list")

// errOvertaken: etcd was compacted past the published revision, which does not advance without
// progress. The whole prefix has to be listed.
var errOvertaken = fmt.Errorf("%w: etcd was compacted past the published revision", ErrCompacted)

// omit reports whether key is under an excluded prefix, and records that prefix in left.
func omit(key []byte, excluded []string, omitted *[]string) bool {
	p := slices.IndexFunc(excluded, func(p string) bool { return bytes.HasPrefix(key, []byte(p)) })
	if p < 0 {
		return false
	}
	if !slices.Contains(*omitted, excluded[p]) {
		*omitted = append(*omitted, excluded[p])
	}
	return true
}

// innerPrefixes are the prefixes of other resources inside a prefix, each as key and value. A list
// of the prefix has their keys too, which may be nearly all of etcd around a few unclaimed keys.
type innerPrefixes map[string]string

// contain reports whether the key belongs to one of the resources inside prefix.
func (in innerPrefixes) contain(prefix string, key []byte) bool {
	return len(in) > 0 && longestPrefix(in, prefix, unsafe.String(unsafe.SliceData(key), len(key))) != ""
}

// loader reads resources and their history from the source. It changes nothing in the mirror except
// counters of its reads, and accesses the mirror only through the functions below. Its methods may
// be called concurrently.
type loader struct {
	opts  *Options
	count *counters

	// the mirrored cluster and the published revision
	mirroredState func() driver.Header
	// prefixes whose keys can be left out
	excluded func() []string
	// history before it must not be restored
	oldestTrusted func() Revision
	// until the revision is published
	wait func(ctx context.Context, revision Revision) error

	restoring chan struct{} // contains a value while history is being read
}

// list reads a prefix, without excluded and inner prefixes, at a revision, or at the newest one if
// that is 0. It builds the entries of a page while the next page is in flight. A list that cannot
// be of one revision returns errDiverged.
func (o *loader) list(ctx context.Context, prefix string, inner innerPrefixes, at Revision) *load {
	l := &load{}
	whole := prefix == o.opts.Prefix
	if whole {
		o.count.listing.Store(0)
	}
	var last []byte
	var newest Revision
	l.header, l.err = o.opts.Source.List(ctx, prefix, at, func(page []driver.KV) error {
		excluded := o.excluded()
		for i := range page {
			kv := &page[i]
			if last != nil && bytes.Compare(last, kv.Key) >= 0 {
				return fmt.Errorf("%w: list out of order: key %q after key %q", errDiverged, kv.Key, last)
			}
			last, newest = append(last[:0], kv.Key...), max(newest, kv.ModRevision)
			if !inner.contain(prefix, kv.Key) && !omit(kv.Key, excluded, &l.omitted) {
				l.entries = append(l.entries, newEntry(kv, true))
			}
		}
		o.count.ListedKeys.Add(int64(len(page)))
		if whole && len(page) > 0 {
			position := string(last)
			o.count.position.Store(&position)
			o.count.listing.Add(int64(len(page)))
		}
		if len(page) > 0 && page[0].Version == 0 {
			o.count.uncounted.Store(true)
		}
		return ctx.Err()
	})
	if l.err == nil && newest > l.header.Revision {
		l.err = fmt.Errorf("%w: list at revision %d contains mod revision %d", errDiverged, l.header.Revision, newest)
	}
	return l
}

// newRestore returns the restore of the history before a load, nil if history is not restored: a
// source without reliable progress cannot report that a part of it is complete.
func (o *loader) newRestore(l *load) *restore {
	if o.opts.Replay.Revisions <= 0 || o.opts.Replay.Bytes <= 0 || o.opts.EventsOnly {
		return nil
	}
	return &restore{cluster: l.header.ClusterID, through: l.header.Revision}
}

// loadAll loads the whole prefix; why is the reason.
func (o *loader) loadAll(ctx context.Context, why error) *load {
	began := time.Now()
	l := o.list(ctx, o.opts.Prefix, nil, 0)
	l.began = began
	l.hasGap = errors.Is(why, ErrCompacted)
	l.mayBeWrong = !l.hasGap && !errors.Is(why, errStart)
	// After a restore of etcd, or if the feed has contradicted itself, etcd's history may differ
	// from the events that clients have received, so they have to start over.
	if l.err == nil && !l.mayBeWrong && !o.mirroredState().ReplacedBy(l.header) {
		l.restore = o.newRestore(l)
	}
	if l.err == nil {
		o.opts.Logger.Info("Listed the prefix", "prefix", o.opts.Prefix, "keys", len(l.entries), "revision", l.header.Revision,
			"took", time.Since(began).Round(time.Millisecond))
	}
	return l
}

// loadOne loads a prefix without inner prefixes, at the published revision, with a restore of the
// history before it if that is requested.
func (o *loader) loadOne(ctx context.Context, prefix string, inner innerPrefixes, published Revision, history bool) *load {
	l := o.list(ctx, prefix, inner, published)
	if errors.Is(l.err, ErrCompacted) {
		l = o.listAhead(ctx, prefix, inner)
	}
	if l.err == nil && l.header.ClusterID != o.mirroredState().ClusterID {
		l.err = fmt.Errorf("%w: cluster ID %x", ErrRestored, l.header.ClusterID)
	}
	if l.err == nil && history {
		l.restore = o.newRestore(l)
	}
	return l
}

// listAhead lists a prefix at the newest revision: the published revision has not advanced for so
// long that etcd was compacted past it. A snapshot at the list's revision must not exist before the
// published revision has reached it; the wait requests progress. Error, if there is no progress:
// errOvertaken.
func (o *loader) listAhead(ctx context.Context, prefix string, inner innerPrefixes) *load {
	if o.opts.EventsOnly {
		return &load{err: fmt.Errorf("%w %d", errOvertaken, o.mirroredState().Revision)}
	}
	l := o.list(ctx, prefix, inner, 0)
	if l.err == nil {
		l.err = o.wait(ctx, l.header.Revision)
	}
	return l
}
