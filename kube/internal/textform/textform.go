// Package textform makes YAML and indented JSON of cached JSON. The bytes equal those that the
// serializers of k8s.io/apimachinery make of the decoded object: they convert JSON, too.
package textform

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// Form is a form of a document, and of a list that is written element by element. Its functions
// append to dst. Safe for concurrent use.
type Form struct {
	// MediaType is the Content-Type of the form.
	MediaType string
	// Object appends a document.
	Object func(dst, object []byte) ([]byte, error)
	// Element appends an element of a list that is a field of a document.
	Element func(dst, element []byte, first bool) ([]byte, error)
	// Check returns the error that Element will return. It costs a scan of the JSON. It is nil if
	// Element never fails for valid JSON.
	Check func(element []byte) error

	field func(name string) (empty, before, after string)
}

// Around returns the text before and after the elements of a list that is not empty. The list is
// the field of the document; its elements come between head and tail, which end and begin with the
// brackets of the list.
func (f *Form) Around(head, tail []byte, field string) (before, after []byte, err error) {
	whole, err := f.Object(nil, append(bytes.Clone(head), tail...))
	if err != nil {
		return nil, nil, err
	}
	empty, begin, end := f.field(field)
	if n := bytes.Count(whole, []byte(empty)); n != 1 {
		return nil, nil, fmt.Errorf("%d lists %q in %.200q", n, field, whole)
	}
	i := bytes.Index(whole, []byte(empty))
	before = append(bytes.Clone(whole[:i]), begin...)
	return before, append([]byte(end), whole[i+len(empty):]...), nil
}

// Indented is indented JSON.
var Indented = &Form{
	MediaType: "application/json",
	Object:    func(dst, object []byte) ([]byte, error) { return appendIndented(dst, object, "") },
	Element: func(dst, element []byte, first bool) ([]byte, error) {
		if !first {
			dst = append(dst, ',')
		}
		return appendIndented(append(dst, "\n    "...), element, "    ")
	},
	field: func(name string) (empty, before, after string) {
		name = "\n  \"" + name + `": [`
		return name + "]", name, "\n  ]"
	},
}

func appendIndented(dst, object []byte, prefix string) ([]byte, error) {
	b := bytes.NewBuffer(dst)
	if err := json.Indent(b, bytes.TrimSuffix(object, []byte("\n")), prefix, "  "); err != nil {
		return dst, err
	}
	return b.Bytes(), nil
}
