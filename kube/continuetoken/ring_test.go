package continuetoken

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// check fails the test if an invariant of ring is broken.
func (r *ring) check(t rapid.TB) {
	t.Helper()
	if len(r.keys) == 0 || len(r.keys) > maxKeys || len(r.dropped) > maxDropped {
		t.Fatalf("%d keys, %d dropped", len(r.keys), len(r.dropped))
	}
	ids := map[keyID]bool{}
	for i, k := range r.keys {
		if ids[k.id] || k.replaced.IsZero() != (i == 0) || (i > 0 && r.keys[i-1].created.Before(k.created)) {
			t.Fatalf("key %d: seen %v, replaced %v, created %v", i, ids[k.id], k.replaced, k.created)
		}
		ids[k.id] = true
	}
	for _, d := range r.dropped {
		if ids[d.id] {
			t.Fatal("an id is there twice")
		}
		ids[d.id] = true
	}
}

func TestRing_EncodeAndDecode_ReturnsSameRing(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	r := newRing(now, nil)
	for i := range 5 {
		r = r.maintained(now.Add(time.Duration(i+1)*time.Hour), time.Hour, 2*time.Hour)
	}
	data, err := r.encode()
	testcheck.NoError(t, err)
	got, err := decodeRing(data)
	testcheck.NoError(t, err)
	got.check(t)
	again, err := got.encode()
	if err != nil || !bytes.Equal(data, again) {
		t.Errorf("stored as %s, then as %s, %v", data, again, err)
	}
	if len(got.keys) != 3 || len(got.dropped) != 3 {
		t.Errorf("%d keys, %d dropped", len(got.keys), len(got.dropped))
	}
	token := r.keys[1].seal(widgets, page)
	if opened, err := got.keys[1].openText(widgets, token); err != nil || opened != page {
		t.Errorf("the stored key opens %+v, %v", opened, err)
	}
}

// TestRing_KeysPastMaximum_AreDropped: the oldest key, though it has not expired.
func TestRing_KeysPastMaximum_AreDropped(t *testing.T) {
	now := time.Now()
	r := newRing(now, nil)
	for i := range maxKeys {
		if len(r.keys) != i+1 || len(r.dropped) != 0 {
			t.Fatalf("%d keys, %d dropped after %d rotations", len(r.keys), len(r.dropped), i)
		}
		now = now.Add(time.Hour)
		r = r.maintained(now, time.Hour, 1000*time.Hour)
	}
	if len(r.keys) != maxKeys || len(r.dropped) != 1 {
		t.Errorf("%d keys, %d dropped; want %d and 1", len(r.keys), len(r.dropped), maxKeys)
	}
}

// TestDecodeRing_FieldChanged_IsRefused changes one field of a stored ring with two keys at a time.
func TestDecodeRing_FieldChanged_IsRefused(t *testing.T) {
	now := time.Now()
	r := newRing(now, nil).maintained(now.Add(time.Hour), time.Hour, time.Hour)
	r = r.maintained(now.Add(2*time.Hour), time.Hour, 2*time.Hour)
	r.dropped = append(r.dropped, dropped{keyID{1}, now})
	data, err := r.encode()
	testcheck.NoError(t, err)
	for name, change := range map[string]func(s *storedRing){
		"version":           func(s *storedRing) { s.Version++ },
		"no keys":           func(s *storedRing) { s.Keys = nil },
		"short id":          func(s *storedRing) { s.Keys[0].ID = s.Keys[0].ID[1:] },
		"long id":           func(s *storedRing) { s.Keys[0].ID = append(s.Keys[0].ID, 1) },
		"short secret":      func(s *storedRing) { s.Keys[1].Secret = s.Keys[1].Secret[1:] },
		"first is replaced": func(s *storedRing) { s.Keys[0].Replaced = now },
		"later is not":      func(s *storedRing) { s.Keys[1].Replaced = time.Time{} },
		"key twice":         func(s *storedRing) { s.Keys[2].ID = s.Keys[1].ID },
		"key is dropped":    func(s *storedRing) { s.Dropped[0].ID = s.Keys[1].ID },
		"long dropped id":   func(s *storedRing) { s.Dropped[0].ID = append(s.Dropped[0].ID, 1) },
	} {
		var s storedRing
		testcheck.NoError(t, json.Unmarshal(data, &s))
		change(&s)
		changed, err := json.Marshal(s)
		testcheck.NoError(t, err)
		if got, err := decodeRing(changed); !errors.Is(err, errNoRing) || got != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestRing_RandomClock_ChangesWhenDue simulates years of rotation, with clocks that stop and jump.
func TestRing_RandomClock_ChangesWhenDue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		rotation := rapid.SampledFrom([]time.Duration{0, time.Minute, time.Hour, 24 * time.Hour}).Draw(t, "rotation")
		keep := rapid.SampledFrom([]time.Duration{10 * time.Minute, time.Hour, 10 * time.Hour}).Draw(t, "keep")
		r := newRing(now, nil)
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			now = now.Add(rapid.SampledFrom([]time.Duration{0, time.Second, time.Minute, 20 * time.Minute, time.Hour, 30 * time.Hour, 40 * 24 * time.Hour}).Draw(t, "pass"))
			due := r.due(rotation, keep)
			next := r.maintained(now, rotation, keep)
			next.check(t)
			if !due.IsZero() && !due.After(now) && next == r {
				t.Fatalf("due at %v, not done at %v", due, now)
			}
			if (due.IsZero() || due.After(now)) && (next.keys[0] != r.keys[0] || len(next.keys) != len(r.keys)) {
				t.Fatalf("due at %v, done at %v", due, now)
			}
			for i, k := range r.keys {
				found, gone := next.find(k.id)
				tooOld := i > 0 && now.Sub(k.replaced) >= keep
				if tooOld != gone || (found == nil) != gone {
					if len(r.keys) < maxKeys || found != nil {
						t.Fatalf("key %d, replaced at %v: found %v, dropped %v at %v", i, k.replaced, found != nil, gone, now)
					}
				}
			}
			for _, d := range r.dropped {
				if _, gone := next.find(d.id); !gone && now.Sub(d.at) < rememberDropped && len(r.dropped) < maxDropped-maxKeys {
					t.Fatalf("removed at %v, dropped at %v: too early", now, d.at)
				}
			}
			if rotation > 0 && now.Sub(next.keys[0].created) >= rotation {
				t.Fatalf("a key of %v seals at %v", next.keys[0].created, now)
			}
			if rotation == 0 && next.keys[0] != r.keys[0] {
				t.Fatal("replaced without rotation")
			}
			r = next
		}
		before := r
		if r = newRing(now, before); r.keys[0].id == before.keys[0].id {
			t.Fatal("the same key in a new ring")
		}
		r.check(t)
		for _, k := range before.keys {
			if _, gone := r.find(k.id); !gone {
				t.Fatal("a key of the previous ring is neither present nor dropped")
			}
		}
	})
}

// FuzzDecodeRing: any stored value is decoded or rejected, and a decoded ring is encoded to the
// same value.
func FuzzDecodeRing(f *testing.F) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	data, err := newRing(now, newRing(now, nil)).maintained(now.Add(time.Hour), time.Hour, time.Hour).encode()
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][]byte{nil, data, data[:len(data)/2], []byte(`{}`), []byte(`{"version":1}`), []byte(`{"version":2,"keys":[]}`),
		[]byte(`{"version":1,"keys":[{"id":"AAAAAAAAAAA=","secret":""}]}`), []byte(`[]`), []byte(`k8s:enc:`)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := decodeRing(data)
		if err != nil {
			if !errors.Is(err, errNoRing) || r != nil {
				t.Fatalf("%v, %v", r, err)
			}
			return
		}
		first, err := r.encode()
		if err != nil {
			return // a time that JSON cannot represent
		}
		again, err := decodeRing(first)
		if err != nil {
			t.Fatalf("%q is decoded, but its encoding is not: %v", data, err)
		}
		if second, err := again.encode(); err != nil || !bytes.Equal(first, second) {
			t.Fatalf("%q, then %q", first, second)
		}
	})
}
