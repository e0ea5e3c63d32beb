package main

import (
	"go/ast"
	"regexp"

	"github.com/stratakube/strata/kube/transcode"
)

// Statements of conversions from in to out: of all fields by a function, of all fields by a cast to
// a type of the same layout, of one field by a copy or a cast, and of one field by a function.
var (
	whole  = regexp.MustCompile(`^(?:return|if err :=) (\w+)\(in, out, s\)(?:; err != nil { return err })?$`)
	same   = regexp.MustCompile(`^(?:\*out = \*\(\*[\w.]+\)\(unsafe\.Pointer\(in\)\)|return nil)$`)
	copied = regexp.MustCompile(`^out\.(\w+) = (?:\*?\(\*[\w.\[\]]+\)\(unsafe\.Pointer\(&?in\.(\w+)\)\)|(?:\w+\.[A-Z]\w+\()?in\.(\w+)\)?)$`)
	part   = regexp.MustCompile(`^if err := ([\w.]+)\(&in\.(\w+), &out\.(\w+), s\); err != nil { return err }$`)

	fromPointer = regexp.MustCompile(`^metav1\.Convert_Pointer_(\w+)_To_(\w+)$`)
	toPointer   = regexp.MustCompile(`^metav1\.Convert_(\w+)_To_Pointer_(\w+)$`)

	// lost is the note at a field that a generated conversion does not copy.
	lost = regexp.MustCompile(`^// (?:WARNING|INFO): in\.(\w+) `)
)

// convert follows a conversion of a place; stored is the variable of the stored version, "in" or
// "out".
func (g *generator) convert(fn *function, stored string, p place) error {
	if g.converted[fn.dir+fn.Name.Name] || g.isKnown(fn.Body, "") {
		return nil
	}
	g.converted[fn.dir+fn.Name.Name] = true
	f := &frame{generator: g, fn: fn, vars: map[string]place{stored: p}}
	for _, comment := range fn.comments {
		if m := lost.FindStringSubmatch(comment); m != nil && stored == "in" {
			field, ok := f.place("in." + m[1])
			if !ok {
				return f.unknown(fn)
			}
			g.lost = append(g.lost, field)
		}
	}
	for _, s := range fn.Body.List {
		if err := f.conversion(s, stored); err != nil {
			return err
		}
	}
	return nil
}

func (f *frame) conversion(s ast.Stmt, stored string) error {
	text := f.src.text(s)
	if f.isKnown(s, "") || same.MatchString(text) {
		return nil
	}
	if m := copied.FindStringSubmatch(text); m != nil && m[1] == m[2]+m[3] {
		return nil
	}
	name, at := "", stored
	if m := whole.FindStringSubmatch(text); m != nil {
		name = m[1]
	} else if m := part.FindStringSubmatch(text); m != nil && m[2] == m[3] {
		name, at = m[1], stored+"."+m[2]
	} else if is, ok := s.(*ast.IfStmt); ok && stored == "in" && is.Init == nil && is.Else == nil {
		return f.conditional(is)
	}
	p, ok := f.place(at)
	if name == "" || !ok {
		return f.unknown(s)
	}
	if fn, err := f.callee(name); err != nil || fn != nil {
		if err != nil {
			return err
		}
		return f.convert(fn, stored, p)
	}
	if m := fromPointer.FindStringSubmatch(name); m != nil && m[1] == m[2] {
		if stored == "in" { // nil becomes the zero value
			f.add(p.owner, "", transcode.Rule{Set: []string{p.field}})
		}
		return nil
	}
	if m := toPointer.FindStringSubmatch(name); m != nil && m[1] == m[2] {
		return nil
	}
	return f.unknown(s)
}
