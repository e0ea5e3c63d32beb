package transcode

import (
	"fmt"
	"reflect"
)

// Rules are the conditions under which upstream's defaulting and conversion do not change a
// message, by Go type. All rules of a type must hold. A type without an entry is never changed.
type Rules map[reflect.Type][]Rule

// Rule is the condition on one message. Fields are named by their JSON names; a pair names two
// fields of the message. All parts of the rule must hold.
type Rule struct {
	// Set are fields that must be present, and not zero if they are not pointers.
	Set []string
	// Unset are fields that must be absent, or zero if they are not pointers.
	Unset []string
	// OneOf requires that some field is present.
	OneOf bool
	// NotNegative are integers that must be absent or at least 0.
	NotNegative []string
	// Equal are pairs of strings that must be equal; absent is equal to empty.
	Equal [][2]string
	// First are pairs of a string and of a list whose first element must be equal to it: a string,
	// or a message whose field 1 is a string. An absent list is equal to an empty string.
	First [][2]string
	// Covered are pairs of maps: the second must have all keys of the first.
	Covered [][2]string
}

// check is a compiled Rule; fields are indexes.
type check struct {
	set, unset, notNegative []int
	oneOf                   bool
	equal, first, covered   [][2]int
}

// compileRule adds a rule to the check of the message.
func (m *message) compileRule(t reflect.Type, r Rule) error {
	var failed error
	index := func(name string) int {
		for i := range m.fields {
			if m.fields[i].name == `"`+name+`":` {
				return i
			}
		}
		failed = fmt.Errorf("transcode: a rule for %s names %q, which is not a field of it", t, name)
		return 0
	}
	all := func(names []string) (is []int) {
		for _, name := range names {
			is = append(is, index(name))
		}
		return is
	}
	pairs := func(names [][2]string) (is [][2]int) {
		for _, pair := range names {
			is = append(is, [2]int{index(pair[0]), index(pair[1])})
		}
		return is
	}
	if m.check == nil {
		m.check = &check{}
	}
	c := m.check
	c.set, c.unset, c.notNegative = append(c.set, all(r.Set)...), append(c.unset, all(r.Unset)...), append(c.notNegative, all(r.NotNegative)...)
	c.equal, c.first, c.covered = append(c.equal, pairs(r.Equal)...), append(c.first, pairs(r.First)...), append(c.covered, pairs(r.Covered)...)
	c.oneOf = c.oneOf || r.OneOf
	return failed
}

// holds reports whether the fields of m satisfy its rule.
func (w *walk) holds(m *message, slots []slot) bool {
	c := m.check
	for _, i := range c.set {
		if !slots[i].present() || w.zero(&m.fields[i], slots[i]) {
			return false
		}
	}
	for _, i := range c.unset {
		if slots[i].present() && !w.zero(&m.fields[i], slots[i]) {
			return false
		}
	}
	for _, i := range c.notNegative {
		if slots[i].present() && int64(w.varint(slots[i])) < 0 {
			return false
		}
	}
	for _, pair := range c.equal {
		if string(w.content(slots[pair[0]])) != string(w.content(slots[pair[1]])) {
			return false
		}
	}
	for _, pair := range c.first {
		first, ok := w.first(&m.fields[pair[1]], slots[pair[1]])
		if !ok || string(w.content(slots[pair[0]])) != string(first) {
			return false
		}
	}
	for _, pair := range c.covered {
		if !w.covered(slots[pair[0]], slots[pair[1]]) {
			return false
		}
	}
	if c.oneOf {
		for i := range slots {
			if slots[i].present() {
				return true
			}
		}
		return false
	}
	return true
}

// first returns the first element of a list: a string, or field 1 of a message.
func (w *walk) first(f *field, s slot) ([]byte, bool) {
	if !s.present() {
		return nil, true
	}
	r := reader{w.data, int(s.from), int(s.to)}
	element, ok := r.element()
	if !ok || f.kind == kindString {
		return element.bytes(), ok
	}
	for element.more() {
		number, wire, ok := element.tag()
		if !ok || wire != wireLen {
			return nil, false
		}
		value, ok := element.delimited()
		if !ok {
			return nil, false
		}
		if number == 1 {
			return value.bytes(), true
		}
	}
	return nil, true
}

// covered reports whether the map b has all keys of the map a. Both are sorted by key.
func (w *walk) covered(a, b slot) bool {
	ra, rb := reader{w.data, int(a.from), int(a.to)}, reader{w.data, int(b.from), int(b.to)}
	for ra.more() {
		key, _, ok := ra.entry()
		if !ok {
			return false
		}
		for {
			if !rb.more() {
				return false
			}
			other, _, ok := rb.entry()
			if !ok {
				return false
			}
			if string(other.bytes()) == string(key.bytes()) {
				break
			}
		}
	}
	return true
}
