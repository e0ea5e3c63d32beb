package continuetoken

import (
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var (
	widgets = Scope{Group: "example.com", Resource: "widgets", Prefix: "example.com/widgets/ns"}
	page    = Token{Revision: 4711, Start: "very-secret-name\x00"}
)

// openText opens a token with one key, as Keeper.Open does.
func (k *key) openText(scope Scope, token string) (Token, error) {
	id, sealed, err := parse(token)
	if err != nil {
		return Token{}, err
	}
	if id != k.id {
		return Token{}, ErrInvalid
	}
	return k.open(scope, sealed)
}

func drawScope(t *rapid.T, label string) Scope {
	word := rapid.StringMatching(`[a-z./]{0,6}`)
	return Scope{Group: word.Draw(t, label+" group"), Resource: word.Draw(t, label+" resource"), Prefix: word.Draw(t, label+" prefix")}
}

// TestToken_OpensForItsScopeOnly: a sealed token opens unchanged for its list, and for no other.
func TestToken_OpensForItsScopeOnly(t *testing.T) {
	k, other := newKey(time.Now()), newKey(time.Now())
	rapid.Check(t, func(t *rapid.T) {
		want := Token{
			Revision: rapid.OneOf(rapid.Just(int64(-1)), rapid.Int64()).Draw(t, "revision"),
			Start:    string(rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "start")),
		}
		scope, elsewhere := drawScope(t, "its"), drawScope(t, "other")
		token := k.seal(scope, want)
		if !Sealed(token) {
			t.Fatalf("%q does not look sealed", token)
		}
		if got, err := k.openText(scope, token); err != nil || got != want {
			t.Fatalf("opened %+v, %v, want %+v", got, err, want)
		}
		if got, err := k.openText(elsewhere, token); (err == nil) != (scope == elsewhere) {
			t.Fatalf("made for %+v, opened for %+v: %+v, %v", scope, elsewhere, got, err)
		}
		if again := k.seal(scope, want); again == token {
			t.Fatal("the same token twice: the nonce is not new")
		}
		_, sealed, _ := parse(token)
		if got, err := other.open(scope, sealed); !errors.Is(err, ErrInvalid) {
			t.Fatalf("another key opens it: %+v, %v", got, err)
		}
	})
}

// TestScope_FieldsSplitDifferently_AreAnotherScope: the same characters, split differently between
// the fields, are another list, and so is one with another value of any one field.
func TestScope_FieldsSplitDifferently_AreAnotherScope(t *testing.T) {
	k := newKey(time.Now())
	scopes := []Scope{{"ab", "c", "d"}, {"a", "bc", "d"}, {"a", "b", "cd"}, {"", "abc", "d"}, {"abcd", "", ""}, {"", "", "abcd"},
		// the last ones differ from the first in one field
		{"ab", "c", "e"}, {"ab", "e", "d"}, {"e", "c", "d"}}
	for _, made := range scopes {
		token := k.seal(made, page)
		for _, asked := range scopes {
			if _, err := k.openText(asked, token); (err == nil) != (made == asked) {
				t.Errorf("made for %+v, opened for %+v: %v", made, asked, err)
			}
		}
	}
}

// TestToken_AnyChange_IsRefused replaces each character of a token by each other one, truncates it
// and appends to it.
func TestToken_AnyChange_IsRefused(t *testing.T) {
	k := newKey(time.Now())
	token := k.seal(widgets, page)
	refuse := func(changed string) {
		t.Helper()
		if changed == token {
			return
		}
		if got, err := k.openText(widgets, changed); !errors.Is(err, ErrInvalid) || got != (Token{}) {
			t.Errorf("%q opens as %+v, %v", changed, got, err)
		}
	}
	const characters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/=. \r\n\x00\xff"
	for i := range token {
		for _, c := range []byte(characters) {
			refuse(token[:i] + string(c) + token[i+1:])
			refuse(token[:i] + string(c) + token[i:])
		}
		refuse(token[:i])
		refuse(token[i:])
		refuse(token[:i] + token[i+1:])
	}
	for _, c := range []byte(characters) {
		refuse(token + string(c))
	}
	refuse(token + token)
	if _, err := k.openText(widgets, token); err != nil {
		t.Errorf("the token itself: %v", err)
	}
}

// TestToken_HidesNameAndItsLength: names of common lengths show neither in a token's text nor in
// its length.
func TestToken_HidesNameAndItsLength(t *testing.T) {
	k := newKey(time.Now())
	lengths := map[int]bool{}
	for n := range padding - headSize + 1 {
		token := k.seal(widgets, Token{Revision: 1, Start: strings.Repeat("n", n)})
		lengths[len(token)] = true
		data, err := encoding.DecodeString(strings.TrimPrefix(token, version+separator))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(data), "nn") && n > 8 && strings.Contains(string(data), strings.Repeat("n", n)) {
			t.Errorf("%q shows the name", token)
		}
	}
	if len(lengths) != 1 {
		t.Errorf("names up to %d bytes make tokens of %d lengths", padding-headSize, len(lengths))
	}
}

// TestToken_OpenErrors_HideContents: error messages describe the failure without the contents of
// the token.
func TestToken_OpenErrors_HideContents(t *testing.T) {
	k := newKey(time.Now())
	token := k.seal(widgets, page)
	for what, test := range map[string]struct {
		scope Scope
		token string
		says  string
	}{
		"another list":    {Scope{Resource: "pods", Prefix: "pods/ns"}, token, "issued for another list"},
		"another version": {widgets, "s2" + token[2:], "version"},
		"plain":           {widgets, "eyJ2IjoibWV0YS5rOHMuaW8vdjEifQ", "not sealed"},
		"cut off":         {widgets, token[:23], "truncated"},
		"no base64":       {widgets, token[:20] + "!" + token[21:], "base64"},
	} {
		_, err := k.openText(test.scope, test.token)
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), test.says) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, want %q in it", what, err, test.says)
		}
	}
}

// TestKey_SealedContent_HasItsLength: content that the sealer has cut off is refused, an empty
// start is not.
func TestKey_SealedContent_HasItsLength(t *testing.T) {
	k := newKey(time.Now())
	for length, want := range map[byte]error{0: nil, 1: ErrInvalid} {
		plain := []byte{0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, length}
		sealed := k.aead.Seal(append(k.id[:], make([]byte, nonceSize)...), make([]byte, nonceSize), plain, widgets.associated(k.id))
		token, err := k.openText(widgets, version+separator+encoding.EncodeToString(sealed))
		if !errors.Is(err, want) || want == nil && token != (Token{Revision: 7}) || want != nil && token != (Token{}) {
			t.Errorf("content of length %d: %+v, %v; want %v", length, token, err, want)
		}
	}
}

// FuzzOpen opens text that was not sealed: it never opens, and never panics.
func FuzzOpen(f *testing.F) {
	k := &key{id: keyID{1, 2, 3, 4, 5, 6, 7, 8}}
	k.aead = newAEAD(k.secret)
	token := k.sealWith([nonceSize]byte{1}, widgets, page) // the same in each process of the fuzzer
	short := k.aead.Seal(append(k.id[:], make([]byte, nonceSize)...), make([]byte, nonceSize), []byte("short"), widgets.associated(k.id))
	for _, seed := range []string{"", ".", "s1.", "s1", "s2.AAAA", token, token[:40], token + "A", token + "\n", strings.ToUpper(token),
		"eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NSwic3RhcnQiOiJhIn0", version + separator + encoding.EncodeToString(short),
		version + separator + encoding.EncodeToString(make([]byte, 200))} {
		f.Add(seed, widgets.Group, widgets.Resource, widgets.Prefix)
	}
	f.Fuzz(func(t *testing.T, text, group, resource, prefix string) {
		scope := Scope{group, resource, prefix}
		got, err := k.openText(scope, text)
		switch {
		case err == nil:
			// Only one sealed token exists; opening any other means that a token can be forged.
			if text != token || scope != widgets || got != page {
				t.Fatalf("%q opens for %+v as %+v", text, scope, got)
			}
		case !errors.Is(err, ErrInvalid) || got != (Token{}):
			t.Fatalf("%q: %+v, %v", text, got, err)
		}
		// The start key of a sealed token may be any string.
		sealed := k.seal(scope, Token{Revision: int64(len(text)), Start: text})
		if got, err := k.openText(scope, sealed); err != nil || got.Start != text || got.Revision != int64(len(text)) {
			t.Fatalf("sealed %q, opened %+v, %v", text, got, err)
		}
	})
}
