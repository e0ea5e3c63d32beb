package main

import (
	"fmt"
	"go/ast"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/stratakube/strata/kube/transcode"
)

// generator has the rules of one kind.
type generator struct {
	src       *source
	used      map[string]bool // digests of known statements
	rules     map[target]*transcode.Rule
	converted map[string]bool // functions
	lost      []place         // fields that conversion does not copy
}

// target is a type to which a rule applies; the gate is "" for a rule without a feature gate.
type target struct {
	typ  reflect.Type
	gate string
}

// place is a value in an object of the stored version: its type, and the field that has it.
type place struct {
	typ, owner reflect.Type
	field      string // its JSON name
	omit       bool   // JSON and protobuf omit an empty value
}

// frame is a function that is followed, with its variables that are places.
type frame struct {
	*generator
	fn   *function
	vars map[string]place
	gate string // the rules apply while it is enabled
}

// kind makes the rules of a kind.
func (g *generator) kind(dir, group string, typ reflect.Type) error {
	fn, err := g.src.function(dir, "SetObjectDefaults_"+typ.Name())
	if err != nil {
		return err
	}
	if fn != nil {
		if err := g.call(fn, []place{{typ: typ}}, ""); err != nil {
			return err
		}
	}
	for _, c := range []struct{ stored, name string }{{"in", "Convert_v1_%[2]s_To_%[1]s_%[2]s"}, {"out", "Convert_%[1]s_%[2]s_To_v1_%[2]s"}} {
		name := fmt.Sprintf(c.name, group, typ.Name())
		fn, err := g.src.function(dir, name)
		if err != nil {
			return err
		}
		if fn == nil {
			return fmt.Errorf("no %s in %s", name, dir)
		}
		if err := g.convert(fn, c.stored, place{typ: typ}); err != nil {
			return err
		}
	}
	for _, p := range g.lost {
		r := g.rules[target{p.owner, ""}]
		named := func(pair [2]string) bool { return pair[0] == p.field }
		if r == nil || !slices.Contains(r.Unset, p.field) && !slices.ContainsFunc(r.First, named) {
			return fmt.Errorf("conversion loses %s of %s, and no rule has it", p.field, p.owner)
		}
	}
	return nil
}

// add adds conditions to the rule of a type.
func (g *generator) add(typ reflect.Type, gate string, r transcode.Rule) {
	if g.rules[target{typ, gate}] == nil {
		g.rules[target{typ, gate}] = &transcode.Rule{}
	}
	all := g.rules[target{typ, gate}]
	all.Set, all.Unset, all.NotNegative = union(all.Set, r.Set), union(all.Unset, r.Unset), union(all.NotNegative, r.NotNegative)
	all.Equal, all.First, all.Covered = union(all.Equal, r.Equal), union(all.First, r.First), union(all.Covered, r.Covered)
	all.OneOf = all.OneOf || r.OneOf
}

func union[T comparable](a, b []T) []T {
	for _, x := range b {
		if !slices.Contains(a, x) {
			a = append(a, x)
		}
	}
	return a
}

// isKnown adds the rule of a known statement, or of the body of a known function.
func (g *generator) isKnown(n ast.Node, gate string) bool {
	digest := g.src.digest(n)
	s, ok := known[digest]
	if ok && s.typ != nil {
		g.add(s.typ, gate, s.rule)
	}
	g.used[digest] = true
	return ok
}

func (f *frame) unknown(n ast.Node) error {
	return fmt.Errorf("%s: %s has a statement of an unknown form (digest %s, of the body %s)",
		f.src.files.Position(n.Pos()), f.fn.Name.Name, f.src.digest(n), f.src.digest(f.fn.Body))
}

var (
	cast     = regexp.MustCompile(`^\(\*[\w.]+\)\((.*)\)$`)
	selector = regexp.MustCompile(`^\w+(\[\w+\])?(\.\w+(\[\w+\])?)*$`)
)

// place returns the value that an expression names, without dereferences, addresses and casts.
func (f *frame) place(expr string) (p place, ok bool) {
	expr = strings.TrimLeft(cast.ReplaceAllString(expr, "$1"), "*&")
	if !selector.MatchString(expr) {
		return p, false
	}
	for i, name := range strings.Split(expr, ".") {
		name, _, indexed := strings.Cut(name, "[")
		if i == 0 {
			p, ok = f.vars[name]
		} else {
			p, ok = member(deref(p.typ), name)
		}
		if indexed && ok {
			p, ok = place{typ: deref(p.typ).Elem()}, deref(p.typ).Kind() == reflect.Slice
		}
		if !ok {
			return p, false
		}
	}
	return p, true
}

// member returns a field of a struct, which may be one of an embedded struct.
func member(t reflect.Type, name string) (place, bool) {
	if t.Kind() != reflect.Struct {
		return place{}, false
	}
	field, ok := t.FieldByName(name)
	if !ok {
		return place{}, false
	}
	for _, i := range field.Index[:len(field.Index)-1] {
		t = t.Field(i).Type
	}
	json, options, _ := strings.Cut(field.Tag.Get("json"), ",")
	return place{field.Type, t, json, strings.Contains(options, "omitempty")}, true
}

func deref(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}

// callee returns the function that is called by a name; nil if it is not of Kubernetes.
func (f *frame) callee(name string) (*function, error) {
	from, base, qualified := strings.Cut(name, ".")
	if !qualified {
		return f.src.function(f.fn.dir, name)
	}
	dir, ok := strings.CutPrefix(f.fn.imports[from], "k8s.io/kubernetes/")
	if !ok {
		return nil, nil
	}
	return f.src.function(dir, base)
}
