package continuetoken

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// goldenToken is a token as a client has it, and its content.
type goldenToken struct {
	Key   int    `json:"key"` // of the golden ring
	Nonce []byte `json:"nonce"`
	Scope Scope  `json:"scope"`
	Page  Token  `json:"page"`
	Token string `json:"token"`
}

func golden(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile("testdata/" + name)
	testcheck.NoError(t, err)
	return bytes.TrimSpace(data)
}

// goldenRing is the ring that ring.json stores.
func goldenRing() *ring {
	at := func(hour int) time.Time { return time.Date(2026, 1, 2, hour, 4, 5, 6, time.UTC) }
	keyOf := func(b byte, created time.Time) *key {
		k := &key{created: created}
		for i := range k.id {
			k.id[i] = b + byte(i)
		}
		for i := range k.secret {
			k.secret[i] = b ^ byte(i)
		}
		k.aead = newAEAD(k.secret)
		return k
	}
	newest, old := keyOf(0x10, at(9)), keyOf(0x40, at(3))
	old.replaced = newest.created
	return &ring{keys: []*key{newest, old}, dropped: []dropped{{keyID{7, 6, 5, 4, 3, 2, 1}, at(1)}}}
}

// TestRing_Golden_IsStoredForm: etcd has the ring of an earlier release. A change of this file is a
// change of the stored form: it needs another version, and code that reads this one.
func TestRing_Golden_IsStoredForm(t *testing.T) {
	stored, want := golden(t, "ring.json"), goldenRing()
	if data, err := want.encode(); err != nil || !bytes.Equal(data, stored) {
		t.Errorf("the ring is stored as\n%s, %v; an earlier release has stored it as\n%s", data, err, stored)
	}
	got, err := decodeRing(stored)
	testcheck.NoError(t, err)
	same := func(a, b *key) bool {
		return a.id == b.id && a.secret == b.secret && a.created.Equal(b.created) && a.replaced.Equal(b.replaced)
	}
	if !slices.EqualFunc(got.keys, want.keys, same) || !slices.Equal(got.dropped, want.dropped) {
		t.Errorf("the stored ring is read as %+v, want %+v", got, want)
	}
}

// TestToken_Golden_Opens: clients have tokens of an earlier release, and servers of two releases
// run at the same time during an upgrade. So tokens are sealed with the same bytes, and open, as
// long as their version is the same.
func TestToken_Golden_Opens(t *testing.T) {
	var tokens []goldenToken
	if err := json.Unmarshal(golden(t, "tokens.json"), &tokens); err != nil || len(tokens) == 0 {
		t.Fatalf("%d tokens, %v", len(tokens), err)
	}
	for _, g := range tokens {
		k := goldenRing().keys[g.Key]
		if got, err := k.openText(g.Scope, g.Token); err != nil || got != g.Page {
			t.Errorf("%s opens as %+v, %v; want %+v", g.Token, got, err, g.Page)
		}
		if got := k.sealWith([nonceSize]byte(g.Nonce), g.Scope, g.Page); got != g.Token {
			t.Errorf("%+v is sealed as %s, by an earlier release as %s", g.Page, got, g.Token)
		}
	}
}
