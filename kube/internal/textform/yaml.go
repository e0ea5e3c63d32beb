package textform

import (
	"strconv"
	"unicode/utf8"

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
	// maxKey bounds the keys that parse reads: a parser of YAML refuses keys above 1,024 bytes.
	maxKey = 512
	// maxDepth bounds the depth of values that parse reads.
	maxDepth = 500
	// maxDigits bounds the integers that parse reads.
	maxDigits = 18
)

// plain reports whether a parser of YAML reads JSON without an error. It may report false for JSON
// that the parser reads.
func plain(data []byte) bool {
	p := parser{data: data}
	for depth := 0; p.next < len(data); {
		switch data[p.next] {
		case '{', '[':
			if depth++; depth > maxDepth {
				return false
			}
		case '}', ']':
			depth--
		case '"':
			begin := p.next
			if !p.skipText() || p.next-begin > maxKey && p.next < len(data) && data[p.next] == ':' {
				return false
			}
			continue
		}
		p.next++
	}
	return true
}

// parse returns the value that a parser of YAML reads from JSON in the form of encoding/json,
// without spaces. It reports false for JSON that the parser may refuse or read differently.
func parse(data []byte) (value any, ok bool) {
	p := parser{data: data}
	if n := len(data); n > 0 && data[n-1] == '\n' {
		p.data = data[:n-1]
	}
	value, ok = p.value(0)
	return value, ok && p.next == len(p.data)
}

type parser struct {
	data []byte
	next int
	buf  []byte // of strings with escapes
}

// take reports whether the next byte is c, and passes it.
func (p *parser) take(c byte) bool {
	if p.next < len(p.data) && p.data[p.next] == c {
		p.next++
		return true
	}
	return false
}

// word passes a word.
func (p *parser) word(w string) bool {
	if len(p.data)-p.next < len(w) || string(p.data[p.next:p.next+len(w)]) != w {
		return false
	}
	p.next += len(w)
	return true
}

func (p *parser) value(depth int) (any, bool) {
	if p.next == len(p.data) || depth > maxDepth {
		return nil, false
	}
	switch p.data[p.next] {
	case '{':
		return p.object(depth)
	case '[':
		return p.array(depth)
	case '"':
		s, ok := p.text()
		return s, ok
	case 't':
		return true, p.word("true")
	case 'f':
		return false, p.word("false")
	case 'n':
		return nil, p.word("null")
	}
	return p.number()
}

func (p *parser) object(depth int) (any, bool) {
	p.next++
	fields := map[string]any{}
	if p.take('}') {
		return fields, true
	}
	for {
		if p.next == len(p.data) || p.data[p.next] != '"' {
			return nil, false
		}
		begin := p.next
		key, ok := p.text()
		if !ok || p.next-begin > maxKey || !p.take(':') {
			return nil, false
		}
		if fields[key], ok = p.value(depth + 1); !ok {
			return nil, false
		}
		if p.take('}') {
			return fields, true
		}
		if !p.take(',') {
			return nil, false
		}
	}
}

func (p *parser) array(depth int) (any, bool) {
	p.next++
	elements := []any{}
	if p.take(']') {
		return elements, true
	}
	for {
		element, ok := p.value(depth + 1)
		if !ok {
			return nil, false
		}
		elements = append(elements, element)
		if p.take(']') {
			return elements, true
		}
		if !p.take(',') {
			return nil, false
		}
	}
}

// number reads a number. A number that is not a short integer is read by the parser of YAML.
func (p *parser) number() (any, bool) {
	begin := p.next
	integer := true
scan:
	for ; p.next < len(p.data); p.next++ {
		switch c := p.data[p.next]; {
		case '0' <= c && c <= '9', c == '-' && p.next == begin:
		case c == '.', c == 'e', c == 'E', c == '+', c == '-':
			integer = false
		default:
			break scan
		}
	}
	token := p.data[begin:p.next]
	digits := token
	if len(digits) > 0 && digits[0] == '-' {
		digits = digits[1:]
	}
	if len(digits) == 0 || len(digits) > 1 && digits[0] == '0' {
		if len(digits) < 2 || digits[1] != '.' && digits[1] != 'e' && digits[1] != 'E' {
			return nil, false
		}
	}
	if integer && len(digits) <= maxDigits {
		n, err := strconv.Atoi(string(token))
		return n, err == nil
	}
	var n any
	if goyaml.Unmarshal(token, &n) != nil {
		return nil, false
	}
	return n, true
}

// text reads a string.
func (p *parser) text() (string, bool) {
	p.next++
	begin := p.next
	for p.next < len(p.data) {
		switch c := p.data[p.next]; {
		case c == '"':
			s := string(p.data[begin:p.next])
			p.next++
			return s, true
		case c == '\\':
			return p.escaped(begin)
		case c < ' ', c == 0x7f:
			return "", false
		case c < utf8.RuneSelf:
			p.next++
		default:
			if !p.rune() {
				return "", false
			}
		}
	}
	return "", false
}

// skipText passes a string. It reports false as text does, and for escaped surrogates.
func (p *parser) skipText() bool {
	p.next++
	for p.next < len(p.data) {
		switch c := p.data[p.next]; {
		case c == '"':
			p.next++
			return true
		case c == '\\':
			rest := p.data[p.next:]
			if len(rest) < 3 || rest[1] == '/' || rest[1] == 'u' && rest[2]|0x20 == 'd' {
				return false
			}
			p.next += 2
		case c < ' ', c == 0x7f:
			return false
		case c < utf8.RuneSelf:
			p.next++
		default:
			if !p.rune() {
				return false
			}
		}
	}
	return false
}

// escaped reads the rest of a string, from its first escape.
func (p *parser) escaped(begin int) (string, bool) {
	p.buf = append(p.buf[:0], p.data[begin:p.next]...)
	for p.next < len(p.data) {
		c := p.data[p.next]
		switch {
		case c == '"':
			p.next++
			return string(p.buf), true
		case c == '\\':
			if !p.escape() {
				return "", false
			}
		case c < ' ', c == 0x7f:
			return "", false
		case c < utf8.RuneSelf:
			p.buf = append(p.buf, c)
			p.next++
		default:
			first := p.next
			if !p.rune() {
				return "", false
			}
			p.buf = append(p.buf, p.data[first:p.next]...)
		}
	}
	return "", false
}

// escape reads an escape into the buffer.
func (p *parser) escape() bool {
	if p.next+1 == len(p.data) {
		return false
	}
	c := p.data[p.next+1]
	p.next += 2
	switch c {
	case '"', '\\':
	case 'b':
		c = '\b'
	case 'f':
		c = '\f'
	case 'n':
		c = '\n'
	case 'r':
		c = '\r'
	case 't':
		c = '\t'
	case 'u':
		if len(p.data)-p.next < 4 {
			return false
		}
		n, err := strconv.ParseUint(string(p.data[p.next:p.next+4]), 16, 16)
		if err != nil || 0xd800 <= n && n < 0xe000 {
			return false
		}
		p.next += 4
		p.buf = utf8.AppendRune(p.buf, rune(n))
		return true
	default:
		return false
	}
	p.buf = append(p.buf, c)
	return true
}

// rune passes a character that is not ASCII. It reports false for characters that YAML does not
// allow, or that end a line in YAML.
func (p *parser) rune() bool {
	r, n := utf8.DecodeRune(p.data[p.next:])
	switch {
	case r == utf8.RuneError && n < 2, r < 0xa0, r == '\u2028', r == '\u2029', r == '\ufeff', r == '\ufffe', r == '\uffff':
		return false
	}
	p.next += n
	return true
}
