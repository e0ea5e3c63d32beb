package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

// BenchmarkView captures all keys of 300 resources, and one key, as the revision reads of mirrors of a feed do.
func BenchmarkView(b *testing.B) {
	const resources = 300
	m, _ := startBench(b, newBenchSource(3000, resources, 100), resources, nil)
	ctx := context.Background()
	b.Run("all", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			v, err := m.View(ctx, 0)
			if err != nil || v.Count(root+"probe", root+"probe\x00") != 0 {
				b.Fatal(err)
			}
		}
	})
	b.Run("key", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			v, err := m.ViewKey(ctx, root+"probe", 0)
			if err != nil || v.Count(root+"probe", root+"probe\x00") != 0 {
				b.Fatal(err)
			}
		}
	})
}

// viewed returns the keys of a range of a view with their values.
func viewed(v mirror.View, start, end string) (text string) {
	for e := range v.All(start, end) {
		text += fmt.Sprintf(" %s=%s@%d", e.Key(), e.Value(), e.ModRevision())
	}
	return text
}

// TestMirror_ViewKey_EqualsViewOfKey: the view of a key has what the view of all keys has of it, now and in the past, for keys of resources, nested
// ones, ones that are not cached, and keys without a claim. It covers no other range.
func TestMirror_ViewKey_EqualsViewOfKey(t *testing.T) {
	ctx := t.Context()
	store := memory.New()
	keys := []string{root + "a/x", root + "a/nested/x", root + "uncached/x", root + "unclaimed", root + "other/x", root + "a/absent"}
	var revs []mirror.Revision
	m, err := mirror.New(mirror.Options{Prefix: root, Source: store})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, prefix := range []string{root + "a/", root + "a/nested/"} {
		r, err := m.Claim(prefix)
		if err == nil {
			err = r.WaitReady(ctx)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.Exclude(root + "uncached/"); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		for _, key := range keys[:5] {
			revs = append(revs, store.Txn(memory.Op{Key: key, Value: fmt.Sprint(i), Delete: i == 2 && key == keys[0]}))
		}
	}
	if err := m.Wait(ctx, revs[len(revs)-1]); err != nil {
		t.Fatal(err)
	}
	covered := 0
	for _, rev := range append(revs, 0) {
		all, err := m.View(ctx, rev)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			end := key + "\x00"
			one, err := m.ViewKey(ctx, key, rev)
			if err != nil {
				t.Fatal(err)
			}
			if one.Rev != all.Rev || one.Covers(key, end) != all.Covers(key, end) || one.Count(key, end) != all.Count(key, end) || viewed(one, key, end) != viewed(all, key, end) {
				t.Errorf("%s at %d: %q, covered %t, want %q, covered %t", key, rev, viewed(one, key, end), one.Covers(key, end), viewed(all, key, end), all.Covers(key, end))
			}
			if one.Covers(key, key+"1") || one.Covers(root, "") || one.Covers(key+"1", key+"1\x00") {
				t.Errorf("the view of %s covers other ranges", key)
			}
			if one.Covers(key, end) {
				covered++
			}
		}
	}
	if want := (len(revs) + 1) * (len(keys) - 1); covered != want {
		t.Errorf("%d keys are covered, want all but those that are not cached: %d", covered, want)
	}
	if _, err := m.ViewKey(ctx, keys[0], revs[len(revs)-1]+1000); !errors.Is(err, mirror.ErrFutureRevision) {
		t.Errorf("a future revision: %v", err)
	}
}
