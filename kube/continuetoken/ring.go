package continuetoken

import (
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/crypto/chacha20poly1305"
)

// Bounds of a ring, so that its value in etcd stays small at any rate of replacement.
const (
	// maxKeys bounds the ring: keys beyond it are dropped early.
	maxKeys = 64
	// maxDropped and rememberDropped bound the ids of dropped keys: guesses, some 50 kB and longer
	// than the lifetime of a token.
	maxDropped      = 1024
	rememberDropped = 30 * 24 * time.Hour
)

type keyID [idSize]byte

// key seals and opens tokens. It is not changed once it is in a ring.
type key struct {
	id       keyID
	secret   [chacha20poly1305.KeySize]byte
	aead     cipher.AEAD
	created  time.Time
	replaced time.Time // zero: it is the newest
}

// ring is the keys of a cluster. It is immutable.
//
//	the first key seals, all open
//	no id occurs twice in keys and dropped together
type ring struct {
	keys    []*key    // newest first, never empty
	dropped []dropped // newest first
}

// dropped is the id of a dropped key.
type dropped struct {
	id keyID
	at time.Time
}

func newKey(now time.Time) *key {
	k := &key{created: now}
	_, _ = rand.Read(k.id[:]) // never fails
	_, _ = rand.Read(k.secret[:])
	k.aead = newAEAD(k.secret)
	return k
}

func newAEAD(secret [chacha20poly1305.KeySize]byte) cipher.AEAD {
	aead, err := chacha20poly1305.NewX(secret[:])
	if err != nil {
		panic(err) // the key has the right length
	}
	return aead
}

// newRing returns a ring with a new key that takes over only the ids of gone, a deleted ring, which
// may be nil.
func newRing(now time.Time, gone *ring) *ring {
	r := &ring{keys: []*key{newKey(now)}}
	if gone != nil {
		for _, k := range gone.keys {
			r.dropped = append(r.dropped, dropped{k.id, now})
		}
		r.dropped = append(r.dropped, gone.dropped...)
	}
	r.dropped = r.dropped[:min(len(r.dropped), maxDropped)]
	return r
}

// find returns the key with an id, or whether it was dropped.
func (r *ring) find(id keyID) (k *key, gone bool) {
	if r == nil {
		return nil, false
	}
	for _, k := range r.keys {
		if k.id == id {
			return k, false
		}
	}
	return nil, slices.ContainsFunc(r.dropped, func(d dropped) bool { return d.id == id })
}

// maintained returns the ring with all due changes, or itself if none is due: the first key is
// replaced when it is as old as rotation (0: never), and a replaced key is dropped keep later.
func (r *ring) maintained(now time.Time, rotation, keep time.Duration) *ring {
	rotate := rotation > 0 && now.Sub(r.keys[0].created) >= rotation
	expired := func(k *key) bool { return !k.replaced.IsZero() && now.Sub(k.replaced) >= keep }
	forget := func(d dropped) bool { return now.Sub(d.at) >= rememberDropped }
	if !rotate && !slices.ContainsFunc(r.keys, expired) && !slices.ContainsFunc(r.dropped, forget) {
		return r
	}
	next := &ring{}
	keys := r.keys
	if rotate {
		old := *keys[0]
		old.replaced = now
		keys = append([]*key{newKey(now), &old}, keys[1:]...)
	}
	for i, k := range keys {
		if expired(k) || i >= maxKeys {
			next.dropped = append(next.dropped, dropped{k.id, now})
		} else {
			next.keys = append(next.keys, k)
		}
	}
	for _, d := range r.dropped {
		if !forget(d) {
			next.dropped = append(next.dropped, d)
		}
	}
	next.dropped = next.dropped[:min(len(next.dropped), maxDropped)]
	return next
}

// due returns the time of the next change by maintained, the zero time if there is none.
func (r *ring) due(rotation, keep time.Duration) time.Time {
	var due time.Time
	sooner := func(t time.Time) {
		if due.IsZero() || t.Before(due) {
			due = t
		}
	}
	if rotation > 0 {
		sooner(r.keys[0].created.Add(rotation))
	}
	for _, k := range r.keys[1:] {
		sooner(k.replaced.Add(keep))
	}
	return due
}

// The value in etcd, before encryption: JSON whose version changes with its meaning.
type (
	storedRing struct {
		Version int             `json:"version"`
		Keys    []storedKey     `json:"keys"`
		Dropped []storedDropped `json:"dropped,omitempty"`
	}
	storedKey struct {
		ID       []byte    `json:"id"`
		Secret   []byte    `json:"secret"`
		Created  time.Time `json:"created"`
		Replaced time.Time `json:"replaced,omitzero"`
	}
	storedDropped struct {
		ID []byte    `json:"id"`
		At time.Time `json:"at"`
	}
)

const ringVersion = 1

func (r *ring) encode() ([]byte, error) {
	s := storedRing{Version: ringVersion}
	for _, k := range r.keys {
		s.Keys = append(s.Keys, storedKey{ID: k.id[:], Secret: k.secret[:], Created: k.created, Replaced: k.replaced})
	}
	for _, d := range r.dropped {
		s.Dropped = append(s.Dropped, storedDropped{ID: d.id[:], At: d.at})
	}
	return json.Marshal(s)
}

var errNoRing = errors.New("stored value is not a key ring")

// decodeRing decodes the output of encode. Its errors contain nothing of the value.
func decodeRing(data []byte) (*ring, error) {
	var head struct {
		Version int `json:"version"`
	}
	if json.Unmarshal(data, &head) != nil {
		return nil, errNoRing
	}
	if head.Version != ringVersion {
		return nil, fmt.Errorf("%w: unsupported version %d", errNoRing, head.Version)
	}
	var s storedRing
	if json.Unmarshal(data, &s) != nil || len(s.Keys) == 0 {
		return nil, errNoRing
	}
	r := &ring{}
	seen := map[keyID]bool{}
	id := func(b []byte) (id keyID, ok bool) {
		copy(id[:], b)
		ok = len(b) == idSize && !seen[id]
		seen[id] = true
		return id, ok
	}
	for i, k := range s.Keys {
		next := &key{created: k.Created, replaced: k.Replaced}
		var ok bool
		if next.id, ok = id(k.ID); !ok || len(k.Secret) != len(next.secret) || k.Replaced.IsZero() != (i == 0) {
			return nil, errNoRing
		}
		copy(next.secret[:], k.Secret)
		next.aead = newAEAD(next.secret)
		r.keys = append(r.keys, next)
	}
	for _, d := range s.Dropped {
		gone, ok := id(d.ID)
		if !ok {
			return nil, errNoRing
		}
		r.dropped = append(r.dropped, dropped{gone, d.At})
	}
	return r, nil
}
