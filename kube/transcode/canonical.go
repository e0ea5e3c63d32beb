package transcode

import (
	"bytes"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Canonical reports whether upstream's path, which decodes, defaults, converts and encodes in
// protobuf, would write a stored object as it is stored, but for the resource version and the
// envelope of runtime.Unknown. Cost is that of AppendItem without the output.
func (t *Transcoder) Canonical(stored []byte) bool {
	raw, ok := openStored(stored, t.head)
	if !ok {
		return false
	}
	w := walks.Get().(*walk)
	defer walks.Put(w)
	w.data, w.slots = stored, w.slots[:0]
	ok = w.canonical(t.root, raw)
	w.data = nil
	return ok
}

// canonical reports whether a message has the form that generated code writes: fields in the order
// of their numbers, none unknown, each that is not a pointer, and the shortest varints; and whether
// its rule holds.
func (w *walk) canonical(m *message, r reader) bool {
	base := len(w.slots)
	slots := w.push(len(m.fields))
	if !scan(m, r, slots) || m.check != nil && !w.holds(m, slots) || !ordered(m, r) {
		return false
	}
	for i := range m.fields {
		f, s := &m.fields[i], slots[i]
		switch {
		case !s.present():
			if !f.pointer && !f.repeated && f.kind != kindBytes {
				return false
			}
		case f.repeated:
			elements := w.reader(s)
			for elements.more() {
				if !w.canonicalElement(f, &elements) {
					return false
				}
			}
			if f.kind == kindMap && !w.ascending(w.reader(s)) {
				return false
			}
		case !w.canonicalValue(f, s):
			return false
		}
	}
	w.slots = w.slots[:base]
	return true
}

// ordered reports whether the fields of a message are known and ascend, and their tags and lengths
// are as short as possible. The message was scanned.
func ordered(m *message, r reader) bool {
	for last := 0; r.more(); {
		from := r.pos
		tag := r.data[from]
		// A tag and a length of one byte each, usual and fast; the scan has found both.
		short := tag < 0x80 && tag&7 == wireLen && r.data[from+1] < 0x80
		number, wire := int(tag>>3), tag&7
		if !short {
			number, wire, _ = r.tag()
		}
		if number >= len(m.index) || m.index[number] < 0 || number < last {
			return false
		}
		last = number
		if short {
			r.pos += 2 + int(r.data[from+1])
			continue
		}
		if r.pos-from != uvarintLen(uint64(number)<<3) {
			return false
		}
		from = r.pos
		if wire != wireLen {
			v, _ := r.uvarint()
			if r.pos-from != uvarintLen(v) {
				return false
			}
			continue
		}
		content, _ := r.delimited()
		if content.pos-from != uvarintLen(uint64(content.end-content.pos)) {
			return false
		}
	}
	return true
}

// canonicalElement reads an element of a list, or an entry of a map.
func (w *walk) canonicalElement(f *field, r *reader) bool {
	r.uvarint() // the tag
	if f.wire != wireLen {
		from := r.pos
		r.uvarint()
		return w.canonicalValue(f, slot{uint32(from), uint32(r.pos)})
	}
	content, ok := r.delimited()
	if !ok {
		return false
	}
	if f.kind != kindMap {
		return w.canonicalValue(f, slot{uint32(content.pos), uint32(content.end)})
	}
	var parts [2]reader
	for i := range parts { // the key, then the value
		from := content.pos
		number, wire, ok := content.tag()
		if !ok || wire != wireLen || number != i+1 || content.pos-from != 1 {
			return false
		}
		from = content.pos
		if parts[i], ok = content.delimited(); !ok || parts[i].pos-from != uvarintLen(uint64(parts[i].end-parts[i].pos)) {
			return false
		}
	}
	return !content.more() && w.canonicalValue(f.value, slot{uint32(parts[1].pos), uint32(parts[1].end)})
}

// ascending reports whether the keys of a map ascend.
func (w *walk) ascending(r reader) bool {
	var last []byte
	for first := true; r.more(); first = false {
		key, _, ok := r.entry()
		if !ok || !first && bytes.Compare(last, key.bytes()) >= 0 {
			return false
		}
		last = key.bytes()
	}
	return true
}

// canonicalValue reports whether a value is in the form that generated code writes.
func (w *walk) canonicalValue(f *field, s slot) bool {
	switch f.kind {
	case kindString, kindBytes:
		return true
	case kindResourceVersion:
		return s.from == s.to
	case kindBool:
		return w.varint(s) <= 1
	case kindInt32:
		v := w.varint(s)
		return v == uint64(int64(int32(v)))
	case kindInt64:
		return true
	case kindMessage, kindInline:
		return w.canonical(f.elem, w.reader(s))
	case kindTime:
		if s.from == s.to {
			return true
		}
		// Seconds and nanoseconds, of which only the seconds are read.
		ints, ok := w.numbers(s, 2)
		t, _ := w.time(f.kind, s)
		return ok && ints[2] == 0 && !t.IsZero()
	case kindMicroTime:
		if s.from == s.to {
			return true
		}
		ints, ok := w.numbers(s, 2)
		t, _ := w.time(f.kind, s)
		return ok && ints[2] == uint64(t.Nanosecond()) && !t.IsZero()
	case kindDuration:
		_, ok := w.numbers(s, 1)
		return ok
	case kindQuantity:
		return w.canonicalQuantity(s)
	case kindIntOrString:
		return w.canonicalIntOrString(s)
	case kindFields:
		if s.from == s.to {
			return true
		}
		text, ok := onlyText(w.reader(s), 1)
		return ok && len(text) > 0
	default:
		return false
	}
}

// numbers reads a message of the varints 1 to n in their shortest form, and nothing else.
func (w *walk) numbers(s slot, n int) (ints [3]uint64, ok bool) {
	r := w.reader(s)
	for i := 1; i <= n; i++ {
		if ints[i], ok = number(&r, i); !ok {
			return ints, false
		}
	}
	return ints, !r.more()
}

// number reads a varint field with the number n in its shortest form.
func number(r *reader, n int) (uint64, bool) {
	from := r.pos
	got, wire, ok := r.tag()
	if !ok || got != n || wire != wireVarint || r.pos-from != 1 {
		return 0, false
	}
	from = r.pos
	v, ok := r.uvarint()
	return v, ok && r.pos-from == uvarintLen(v)
}

// onlyText reads a message of one text with the number n, in the shortest form.
func onlyText(r reader, n int) ([]byte, bool) {
	from := r.pos
	got, wire, ok := r.tag()
	if !ok || got != n || wire != wireLen || r.pos-from != 1 {
		return nil, false
	}
	from = r.pos
	text, ok := r.delimited()
	return text.bytes(), ok && !r.more() && text.pos-from == uvarintLen(uint64(text.end-text.pos))
}

func (w *walk) canonicalQuantity(s slot) bool {
	text, ok := onlyText(w.reader(s), 1)
	if !ok {
		return false
	}
	canonical, ok := w.canonicalForm(text)
	return ok && canonical[1:len(canonical)-1] == string(text)
}

func (w *walk) canonicalIntOrString(s slot) bool {
	r := w.reader(s)
	kind, ok := number(&r, 1)
	if !ok || kind > 1 {
		return false
	}
	v, ok := number(&r, 2)
	if !ok || v != uint64(int64(int32(v))) {
		return false
	}
	_, ok = onlyText(r, 3)
	return ok
}

// Bounds of the canonical forms that a walk caches, and of their texts.
const (
	maxQuantities     = 512
	maxQuantityLength = 32
)

// canonicalForm returns the canonical form of a quantity, in quotes. Not ok: it is not a quantity,
// or has more precision than thousandths, to which defaulting rounds lists of resources.
func (w *walk) canonicalForm(text []byte) (string, bool) {
	if form, ok := w.quantities[string(text)]; ok {
		return form, true
	}
	q, err := resource.ParseQuantity(string(text))
	if err != nil {
		return "", false
	}
	data, err := q.MarshalJSON()
	if err != nil || !q.RoundUp(resource.Milli) {
		return "", false
	}
	form := string(data)
	if len(text) <= maxQuantityLength {
		if len(w.quantities) >= maxQuantities {
			clear(w.quantities)
		}
		w.quantities[string(text)] = form
	}
	return form, true
}
