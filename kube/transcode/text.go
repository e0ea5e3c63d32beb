package transcode

import (
	"encoding/json"
	"unicode/utf8"
)

// replacement is what encoding/json writes for a byte that is not UTF-8: an escape before Go 1.27,
// then the character U+FFFD itself.
var replacement = func() []byte {
	quoted, err := json.Marshal("\xff")
	if err != nil {
		panic(err)
	}
	return quoted[1 : len(quoted)-1]
}()

// plain are the ASCII characters that encoding/json writes in a string as they are.
var plain = func() (t [256]bool) {
	for c := ' '; c < utf8.RuneSelf; c++ {
		t[c] = c != '"' && c != '\\' && c != '<' && c != '>' && c != '&'
	}
	return t
}()

// appendString appends s as a JSON string, with the escapes of encoding/json.
func appendString(dst, s []byte) []byte {
	dst = append(dst, '"')
	from := 0
	for i := 0; i < len(s); {
		c := s[i]
		if plain[c] {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			dst = appendEscape(append(dst, s[from:i]...), c)
			i++
			from = i
			continue
		}
		r, size := utf8.DecodeRune(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			dst = append(append(dst, s[from:i]...), replacement...)
			from = i + size
		case r == '\u2028' || r == '\u2029': // line ends in JavaScript
			dst = append(append(dst, s[from:i]...), `\u202`...)
			dst = append(dst, hex[r&0xf])
			from = i + size
		}
		i += size
	}
	return append(append(dst, s[from:]...), '"')
}

const hex = "0123456789abcdef"

// appendEscape appends the escape of an ASCII character that is not plain.
func appendEscape(dst []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(dst, '\\', c)
	case '\b':
		return append(dst, `\b`...)
	case '\f':
		return append(dst, `\f`...)
	case '\n':
		return append(dst, `\n`...)
	case '\r':
		return append(dst, `\r`...)
	case '\t':
		return append(dst, `\t`...)
	}
	return append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&0xf])
}
