package main

import (
	"go/ast"
	"go/token"
	"reflect"
	"regexp"
	"strings"

	"github.com/stratakube/strata/kube/transcode"
)

// call follows a defaulting function. An argument that is no place has no type.
func (g *generator) call(fn *function, args []place, gate string) error {
	if g.isKnown(fn.Body, gate) {
		return nil
	}
	f := &frame{generator: g, fn: fn, vars: map[string]place{}, gate: gate}
	for _, param := range fn.Type.Params.List {
		for _, name := range param.Names {
			if args[0].typ != nil {
				f.vars[name.Name] = args[0]
			}
			args = args[1:]
		}
	}
	return f.block(fn.Body.List)
}

var (
	isNil  = regexp.MustCompile(`^([\w.\[\]]+) == nil$`)
	notNil = regexp.MustCompile(`^([\w.\[\]]+) != nil$`)
	gated  = regexp.MustCompile(`^(!?)utilfeature\.DefaultFeatureGate\.Enabled\(features\.(\w+)\)$`)
	allNil = regexp.MustCompile(`^ptr\.AllPtrFieldsNil\(&([\w.\[\]]+)\)$`)
)

// block follows statements of defaulting.
func (f *frame) block(list []ast.Stmt) error {
	for _, s := range list {
		if is, ok := s.(*ast.IfStmt); ok && is.Init == nil && f.src.text(is.Body) == "{ return }" {
			p, ok := f.match(isNil, is.Cond)
			if !ok || p.owner == nil {
				return f.unknown(s)
			}
			f.add(p.owner, f.gate, transcode.Rule{Unset: []string{p.field}})
			return nil // the rest is not reached
		}
		if err := f.statement(s); err != nil {
			return err
		}
	}
	return nil
}

// match returns the place that a pattern finds in an expression.
func (f *frame) match(pattern *regexp.Regexp, e ast.Expr) (place, bool) {
	m := pattern.FindStringSubmatch(f.src.text(e))
	if m == nil {
		return place{}, false
	}
	return f.place(m[1])
}

func (f *frame) statement(s ast.Stmt) error {
	if f.isKnown(s, f.gate) {
		return nil
	}
	switch s := s.(type) {
	case *ast.IfStmt:
		if s.Init == nil && s.Else == nil {
			return f.conditional(s)
		}
	case *ast.RangeStmt:
		if p, ok := f.place(f.src.text(s.X)); ok && s.Value == nil && deref(p.typ).Kind() == reflect.Slice {
			return f.block(s.Body.List)
		}
	case *ast.ExprStmt:
		call, ok := s.X.(*ast.CallExpr)
		if !ok {
			break
		}
		fn, err := f.callee(f.src.text(call.Fun))
		if err != nil {
			return err
		}
		if fn == nil {
			return f.unknown(s)
		}
		args := make([]place, len(call.Args))
		for i, arg := range call.Args {
			args[i], _ = f.place(f.src.text(arg))
		}
		return f.call(fn, args, f.gate)
	case *ast.AssignStmt:
		if f.assign(s) {
			return nil
		}
	}
	return f.unknown(s)
}

// assign follows the definition of a variable, and the assignment of a string to another of its
// message.
func (f *frame) assign(s *ast.AssignStmt) bool {
	to, isPlace := f.place(f.src.text(s.Lhs[0]))
	from, fromPlace := f.place(f.src.text(s.Rhs[0]))
	switch {
	case len(s.Lhs) > 1:
		return false
	case s.Tok == token.DEFINE && fromPlace:
		f.vars[f.src.text(s.Lhs[0])] = from
		return true
	case s.Tok == token.DEFINE: // of a value that is in no object
		changes := false
		ast.Inspect(s.Rhs[0], func(n ast.Node) bool {
			id, ok := n.(*ast.Ident)
			changes = changes || ok && f.vars[id.Name].typ != nil
			return true
		})
		return !changes
	case !isPlace || !fromPlace || to.owner == nil || to.owner != from.owner || to.typ.Kind() != reflect.String || from.typ.Kind() != reflect.String:
		return false
	}
	f.add(to.owner, f.gate, transcode.Rule{Equal: [][2]string{{min(to.field, from.field), max(to.field, from.field)}}})
	return true
}

// conditional follows an if statement. It changes nothing if a condition does not hold, or if its
// body changes nothing.
func (f *frame) conditional(s *ast.IfStmt) error {
	body := *f
	var guards []place
	var tests []ast.Expr
	for _, cond := range conjuncts(s.Cond) {
		guard, isGuard := f.match(notNil, cond)
		gate := gated.FindStringSubmatch(f.src.text(cond))
		switch {
		case gate != nil && gate[1] == "!": // the rule then holds for both values of the gate
		case gate != nil && (f.gate == "" || f.gate == gate[2]):
			body.gate = gate[2]
		case isGuard: // the rule of a message is for a message that is present
			guards = append(guards, guard)
		default:
			tests = append(tests, cond)
		}
	}
	switch {
	case len(tests) == 0:
		return body.block(s.Body.List)
	case len(tests) == 1 && body.avoid(tests[0], guards, s.Body.List):
		return nil
	}
	return f.unknown(s)
}

func conjuncts(e ast.Expr) []ast.Expr {
	if b, ok := e.(*ast.BinaryExpr); ok && b.Op == token.LAND {
		return append(conjuncts(b.X), conjuncts(b.Y)...)
	}
	return []ast.Expr{e}
}

// tests are conditions on one field, with the part of a rule under which they do not hold.
var tests = []struct {
	pattern *regexp.Regexp
	part    string
}{
	{regexp.MustCompile(`^([\w.\[\]]+) == (?:nil|""|0)$`), "Set"},
	{regexp.MustCompile(`^len\(([\w.\[\]]+)\) == 0$`), "Set"},
	{regexp.MustCompile(`^len\(([\w.\[\]]+)\) > 0$`), "Unset"},
	{regexp.MustCompile(`^([\w.\[\]]+)$`), "Unset"}, // a bool
	{regexp.MustCompile(`^\*([\w.\[\]]+) < 0$`), "NotNegative"},
}

// avoid adds the rule under which a condition does not hold, or the body changes nothing.
func (f *frame) avoid(test ast.Expr, guards []place, body []ast.Stmt) bool {
	if p, ok := f.match(allNil, test); ok {
		f.add(deref(p.typ), f.gate, transcode.Rule{OneOf: true})
		return true
	}
	for _, t := range tests {
		p, ok := f.match(t.pattern, test)
		if !ok || p.owner == nil {
			continue
		}
		if t.part == "Set" && len(body) == 1 {
			// Of a map without entries, which is not stored, or of a string of the same message.
			if s, ok := body[0].(*ast.AssignStmt); ok {
				to, _ := f.place(f.src.text(s.Lhs[0]))
				makes := strings.HasPrefix(f.src.text(s.Rhs[0]), "make(")
				if to == p && p.omit && p.typ.Kind() == reflect.Map && makes || s.Tok == token.ASSIGN && f.assign(s) {
					return true
				}
			}
		}
		for _, g := range guards { // the map g is there, and p is not
			if t.part == "Set" && g.owner == p.owner && g.typ.Kind() == reflect.Map && p.typ.Kind() == reflect.Map {
				f.add(p.owner, f.gate, transcode.Rule{Covered: [][2]string{{g.field, p.field}}})
				return true
			}
		}
		r := transcode.Rule{}
		reflect.ValueOf(&r).Elem().FieldByName(t.part).Set(reflect.ValueOf([]string{p.field}))
		f.add(p.owner, f.gate, r)
		return true
	}
	return false
}
