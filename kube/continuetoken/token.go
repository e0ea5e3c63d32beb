// Package continuetoken seals continue tokens: the position at which a list continues is encrypted
// and authenticated, so that a client can neither read a key's name in a token nor forge one.
//
// A sealed token is text that is safe in a URL:
//
//	s1.<base64url: key id (8) | nonce (24) | ciphertext | tag (16)>
//
// The dot never occurs in upstream's plain form, which is base64url throughout, so the two forms
// cannot be confused. The cipher is XChaCha20-Poly1305, whose nonces are long enough to be random.
// The format's version, the key's id and the Scope are its associated data: a token opens only for
// the list that it was made for. The plaintext is
//
//	revision (8, big endian, signed) | length of start (4) | start | zeros
//
// padded to a multiple of 32 bytes, so that its length reveals little about a name.
//
// A Keeper manages the keys: one ring in etcd, which all replicas share.
package continuetoken

import (
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/crypto/chacha20poly1305"
)

// Errors of tokens. Errors that wrap them are for clients: they contain no key.
var (
	// ErrInvalid: the token was not made by this cluster for this list. Permanent.
	ErrInvalid = errors.New("continue key is not valid")
	// ErrExpired: the token was sealed with a key that is gone. Permanent; the client must restart
	// the list.
	ErrExpired = errors.New("continue key is too old")
	// ErrUnavailable: the keys are not available now. The same request may succeed later.
	ErrUnavailable = errors.New("continue token keys are not available")
)

// Token is the position at which a list continues.
type Token struct {
	// Revision is the revision of the list, -1 for the latest one.
	Revision int64
	// Start is the first key of the next page, relative to the prefix of the list.
	Start string
}

// Scope is the list that a token is valid for.
type Scope struct {
	Group, Resource string
	// Prefix is the prefix of all keys of the list: resource, and namespace for a list of one.
	Prefix string
}

const (
	version   = "s1"
	separator = "." // not in the alphabet of base64url

	idSize    = 8
	nonceSize = chacha20poly1305.NonceSizeX
	tagSize   = chacha20poly1305.Overhead
	headSize  = 8 + 4
	padding   = 32
)

// encoding rejects text that it would not have written, except for line breaks, see parse.
var encoding = base64.RawURLEncoding.Strict()

// Sealed reports whether a token is not in the plain form. It may still be garbage.
func Sealed(token string) bool { return strings.Contains(token, separator) }

// associated returns the associated data of a token. Each field is preceded by its length, so that
// fields are unambiguous.
func (s Scope) associated(id keyID) []byte {
	b := make([]byte, 0, len(version)+idSize+3*binary.MaxVarintLen32+len(s.Group)+len(s.Resource)+len(s.Prefix))
	b = append(b, version...)
	b = append(b, id[:]...)
	for _, field := range []string{s.Group, s.Resource, s.Prefix} {
		b = binary.AppendUvarint(b, uint64(len(field)))
		b = append(b, field...)
	}
	return b
}

// seal makes a token with a fresh nonce.
func (k *key) seal(scope Scope, t Token) string {
	var nonce [nonceSize]byte
	_, _ = rand.Read(nonce[:]) // never fails
	return k.sealWith(nonce, scope, t)
}

func (k *key) sealWith(nonce [nonceSize]byte, scope Scope, t Token) string {
	plain := make([]byte, (headSize+len(t.Start)+padding-1)/padding*padding)
	binary.BigEndian.PutUint64(plain, uint64(t.Revision))
	binary.BigEndian.PutUint32(plain[8:], uint32(len(t.Start)))
	copy(plain[headSize:], t.Start)

	sealed := make([]byte, 0, idSize+nonceSize+len(plain)+tagSize)
	sealed = append(append(sealed, k.id[:]...), nonce[:]...)
	sealed = k.aead.Seal(sealed, nonce[:], plain, scope.associated(k.id))
	return version + separator + encoding.EncodeToString(sealed)
}

// parse splits a sealed token into the key's id and the rest. Error: ErrInvalid.
func parse(token string) (id keyID, rest []byte, err error) {
	v, body, ok := strings.Cut(token, separator)
	if !ok {
		return id, nil, fmt.Errorf("%w: token is not sealed", ErrInvalid)
	}
	if v != version {
		return id, nil, fmt.Errorf("%w: unsupported token version", ErrInvalid)
	}
	// The decoder would skip line breaks.
	data, err := encoding.DecodeString(body)
	if err != nil || strings.ContainsAny(body, "\r\n") {
		return id, nil, fmt.Errorf("%w: invalid base64", ErrInvalid)
	}
	if len(data) < idSize+nonceSize+headSize+tagSize {
		return id, nil, fmt.Errorf("%w: token is truncated", ErrInvalid)
	}
	copy(id[:], data)
	return id, data[idSize:], nil
}

// open decrypts the part of a sealed token after the key's id. Error: ErrInvalid.
func (k *key) open(scope Scope, sealed []byte) (Token, error) {
	plain, err := k.aead.Open(nil, sealed[:nonceSize], sealed[nonceSize:], scope.associated(k.id))
	if err != nil {
		return Token{}, fmt.Errorf("%w: token was issued for another list or has been modified", ErrInvalid)
	}
	length := uint64(0)
	if len(plain) >= headSize {
		length = uint64(binary.BigEndian.Uint32(plain[8:]))
	}
	if uint64(len(plain)) < headSize+length {
		// the sealer had the key
		return Token{}, fmt.Errorf("%w: token content is truncated", ErrInvalid)
	}
	return Token{
		Revision: int64(binary.BigEndian.Uint64(plain)),
		Start:    string(plain[headSize : headSize+length]),
	}, nil
}
