package mirror_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// viewed returns the keys of a range of a view with their values.
func viewed(v mirror.View, start, end string) (text string) {
	for e := range v.All(start, end) {
		text += fmt.Sprintf(" %s=%s@%d", e.Key(), e.Value(), e.ModRevision())
	}
	return text
}

// TestView_OfRange_EqualsViewOfAllKeys: the view of all keys has the state of etcd in key order. A
// view of a range has what that view has of it, now and in the past, for keys and ranges in
// resources, nested ones, ones that are not cached, and keys without a claim. It covers no keys
// outside of its range.
func TestView_OfRange_EqualsViewOfAllKeys(t *testing.T) {
	ctx := t.Context()
	store := memory.New()
	md := &model{store: store, at: map[mirror.Revision]state{1: {}}}
	keys := []string{root + "a/x", root + "a/nested/x", root + "uncached/x", root + "unclaimed", root + "other/x", root + "a/absent"}
	var revs []mirror.Revision
	m, err := mirror.New(mirror.Options{Prefix: root, Source: store})
	testcheck.NoError(t, err)
	defer m.Close()
	for _, prefix := range []string{root + "a/", root + "a/nested/"} {
		r, err := m.Claim(prefix)
		if err == nil {
			err = r.WaitReady(ctx)
		}
		testcheck.NoError(t, err)
	}
	if _, err := m.Exclude(root + "uncached/"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		for _, key := range keys[:5] {
			md.txn(memory.Op{Key: key, Value: fmt.Sprint(i), Delete: i == 2 && key == keys[0]})
			revs = append(revs, store.Revision())
		}
	}
	testcheck.NoError(t, m.Wait(ctx, revs[len(revs)-1]))
	type keyRange struct{ start, end string }
	var ranges []keyRange
	for _, key := range keys {
		ranges = append(ranges, keyRange{key, key + "\x00"})
	}
	for _, prefix := range []string{root, root + "a/", root + "a/nested/", root + "other/", root + "uncached/", root + "none/"} {
		ranges = append(ranges, keyRange{prefix, prefix[:len(prefix)-1] + "0"})
	}
	ranges = append(ranges, keyRange{root, ""}, keyRange{root + "a/a", root + "a/nested/y"}, keyRange{root + "a/x", root + "b"},
		keyRange{root + "a/nested/y", root + "unclaimed"}, keyRange{root + "a/nested/", root + "a/nested/x"})
	covered := 0
	for _, rev := range append(revs, 0) {
		all, err := m.View(ctx, rev, root, "")
		testcheck.NoError(t, err)
		cached, want := md.want(all.Rev, root), ""
		delete(cached, keys[2])
		for _, key := range slices.Sorted(maps.Keys(cached)) {
			want += fmt.Sprintf(" %s=%s", key, cached[key])
		}
		if got := viewed(all, root, ""); got != want {
			t.Fatalf("all keys at %d: %q, want %q", all.Rev, got, want)
		}
		for first := range all.All(root, "") {
			if !strings.HasPrefix(want, " "+first.Key()+"=") {
				t.Errorf("the first key at %d is %s, want that of %q", all.Rev, first.Key(), want)
			}
			break
		}
		for _, x := range ranges {
			some, err := m.View(ctx, rev, x.start, x.end)
			testcheck.NoError(t, err)
			got, want := viewed(some, x.start, x.end), viewed(all, x.start, x.end)
			if some.Rev != all.Rev || some.Covers(x.start, x.end) != all.Covers(x.start, x.end) || some.Count(x.start, x.end) != all.Count(x.start, x.end) || got != want {
				t.Errorf("%q at %d: %q, covered %t, want %q, covered %t", x, rev, got, some.Covers(x.start, x.end), want, all.Covers(x.start, x.end))
			}
			if some.Covers(root, "\xff") || x.end != "" && some.Covers(x.start, x.end+"1") || x.start != root && some.Covers(root, x.end) {
				t.Errorf("the view of %q covers other ranges", x)
			}
			// The parts of the range are of the same view.
			for _, y := range ranges {
				inside := x.start <= y.start && (x.end == "" || y.end != "" && y.end <= x.end)
				if inside && (some.Covers(y.start, y.end) != all.Covers(y.start, y.end) || viewed(some, y.start, y.end) != viewed(all, y.start, y.end)) {
					t.Errorf("%q of the view of %q at %d: %q, want %q", y, x, rev, viewed(some, y.start, y.end), viewed(all, y.start, y.end))
				}
			}
			if some.Covers(x.start, x.end) {
				covered++
			}
		}
	}
	if want := (len(revs) + 1) * (len(ranges) - 5); covered != want {
		t.Errorf("%d ranges are covered, want all without keys that are not cached: %d", covered, want)
	}
	if _, err := m.View(ctx, revs[len(revs)-1]+1000, root, ""); !errors.Is(err, mirror.ErrFutureRevision) {
		t.Errorf("a future revision: %v", err)
	}
}

// TestView_BeforeRemovalOfResource_CoversOthers: memory does not have the keys of a removed
// resource from before its removal, also after it was claimed again. Views of that time cover the
// other resources.
func TestView_BeforeRemovalOfResource_CoversOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		md := past("/registry/a/", "/registry/b/")
		m := start(t, md.store, nil)
		a, b := claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")
		reach(t, m, md.store.Revision(), a, b)
		forget(t, m, md, a)
		removed := m.PublishedRevision()
		put(md, "/registry/a/", "again", 2)
		reach(t, m, md.store.Revision())
		for _, claimed := range []bool{false, true} {
			if claimed {
				reach(t, m, md.store.Revision(), claim(t, m, "/registry/a/"))
			}
			for rev := mirror.Revision(2); rev <= md.store.Revision(); rev++ {
				for _, prefix := range []string{"/registry/a/", "/registry/b/", root} {
					end := prefix[:len(prefix)-1] + "0"
					v, err := m.View(t.Context(), rev, prefix, end)
					testcheck.NoError(t, err)
					if got, want := v.Covers(prefix, end), rev >= removed || prefix == "/registry/b/"; got != want {
						t.Errorf("claimed %t: %s at %d is covered: %t, want %t, removed at %d", claimed, prefix, rev, got, want, removed)
					}
					if got, want := v.Count(prefix, end), int64(len(md.want(rev, prefix))); v.Covers(prefix, end) && got != want {
						t.Errorf("claimed %t: %s at %d has %d keys, want %d", claimed, prefix, rev, got, want)
					}
				}
			}
		}
	})
}
