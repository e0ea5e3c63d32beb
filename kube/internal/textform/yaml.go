package textform

import (
	"bytes"
	"unicode/utf8"

	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
	goyaml "sigs.k8s.io/yaml/goyaml.v2"
)

// YAML is YAML as sigs.k8s.io/yaml.JSONToYAML makes it. That function reads the JSON with a parser
// of YAML, which takes most of its time, because JSON does not tell integers from other numbers.
// The form reads it with a parser of JSON, and calls JSONToYAML for values that the two parsers may
// read differently.
var YAML = &Form{
	MediaType: "application/yaml",
	Object: func(dst, object []byte) ([]byte, error) {
		value, ok := parse(object)
		if !ok {
			text, err := yaml.JSONToYAML(object)
			return append(dst, text...), err
		}
		text, err := goyaml.Marshal(value)
		return append(dst, text...), err
	},
	Element: func(dst, element []byte, _ bool) ([]byte, error) {
		value, ok := parse(element)
		if !ok {
			text, err := yaml.JSONToYAML(append(append([]byte{'['}, element...), ']'))
			return append(dst, text...), err
		}
		text, err := goyaml.Marshal([]any{value})
		return append(dst, text...), err
	},
	Check: func(element []byte) error {
		if plain(element) {
			return nil
		}
		_, err := yaml.JSONToYAML(element)
		return err
	},
	field: func(name string) (empty, before, after string) {
		return "\n" + name + ": []\n", "\n" + name + ":\n", ""
	},
}

const (
	// maxKey bounds keys that plain accepts: a parser of YAML refuses keys above 1,024 bytes.
	maxKey = 512
	// maxDepth bounds the depth of values that plain accepts.
	maxDepth = 500
	// maxDigits bounds the digits and signs of numbers that plain accepts: a parser of YAML reads
	// integers of 64 bits without a sign.
	maxDigits = 18
)

// parse returns the value that a parser of YAML reads from JSON. It reports false for JSON that the
// parser may refuse or read differently.
func parse(data []byte) (value any, ok bool) {
	data = bytes.TrimSuffix(data, []byte("\n"))
	return value, plain(data) && json.UnmarshalCaseSensitivePreserveInts(data, &value) == nil
}

// plain reports whether a parser of YAML reads JSON, without spaces, as a parser of JSON does. It
// may report false for JSON that both read alike.
func plain(data []byte) bool {
	for depth, digits := 0, 0; len(data) > 0; {
		c := data[0]
		if '+' <= c && c <= '9' && c != ',' && c != '/' {
			if digits++; digits > maxDigits {
				return false
			}
			data = data[1:]
			continue
		}
		digits = 0
		switch c {
		case '{', '[':
			if depth++; depth > maxDepth {
				return false
			}
		case '}', ']':
			depth--
		case ' ', '\t', '\r', '\n':
			return false
		case '"':
			n := plainText(data)
			if n == 0 || n > maxKey && n < len(data) && data[n] == ':' {
				return false
			}
			data = data[n:]
			continue
		}
		data = data[1:]
	}
	return true
}

// plainText returns the length of the string at the begin of JSON. It returns 0 for a string that a
// parser of YAML may refuse or read differently: with surrogates, control characters, and
// characters that YAML does not allow or that end a line in YAML.
func plainText(data []byte) int {
	for n := 1; n < len(data); {
		switch c := data[n]; {
		case c == '"':
			return n + 1
		case c == '\\':
			rest := data[n:]
			if len(rest) < 3 || rest[1] == '/' || rest[1] == 'u' && rest[2]|0x20 == 'd' {
				return 0
			}
			n += 2
		case c < ' ', c == 0x7f:
			return 0
		case c < utf8.RuneSelf:
			n++
		default:
			r, size := utf8.DecodeRune(data[n:])
			switch {
			case r == utf8.RuneError && size < 2, r < 0xa0, r == '\u2028', r == '\u2029', r == '\ufeff', r == '\ufffe', r == '\uffff':
				return 0
			}
			n += size
		}
	}
	return 0
}
