package main

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// buildTag selects the files of kube/ that the workspace builds.
const buildTag = "apiserver_v0_37"

// wantedScore is the share of the mutations of a package that its own tests must kill.
const wantedScore = 0.85

// score applies sampled mutations of every place of a package, each for itself, and fails if the
// tests of the package kill fewer than wantedScore of them. The places are comparisons, conditions,
// returned errors, locks, and operations on channels (places): a removed receive returns the zero
// value at once, a removed case of a select is never ready. One program has all mutations of the
// sample: the environment selects one (guard). The survivors are listed: each is equivalent to the
// code, or a gap of the tests.
func score(root string, packages []string, sample int, seed uint64) error {
	temporary, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	var low []string
	for _, pkg := range packages {
		all, err := places(root, pkg)
		if err != nil {
			return err
		}
		if len(all) == 0 {
			return fmt.Errorf("%s has no place to mutate", pkg)
		}
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		tried := all
		if sample > 0 {
			tried = all[:min(sample, len(all))]
		}
		program, err := buildGuarded(root, temporary, pkg, tried)
		if err != nil {
			return err
		}
		began := time.Now()
		if r := program.run(0); r.outcome != survived {
			return fmt.Errorf("%s: %s%s", pkg, failsWithout, r.by)
		}
		// Four tests at once, on a busy machine: a test that takes ten times as long hangs.
		program.timeout = max(10*time.Since(began), 10*time.Second)
		survivors := program.survivors(len(tried))
		for _, i := range survivors {
			fmt.Printf("%s: %s survived\n", tried[i].id, cmp.Or(tried[i].new, "nothing"))
		}
		kills := len(tried) - len(survivors)
		share := float64(kills) / float64(len(tried))
		fmt.Printf("%s: %d of %d killed (%.0f %%), of %d places; seed %d\n", pkg, kills, len(tried), 100*share, len(all), seed)
		if share < wantedScore {
			low = append(low, pkg)
		}
	}
	if len(low) > 0 {
		return fmt.Errorf("fewer than %.0f %% of the mutations were killed in %s (seed %d)", 100*wantedScore, strings.Join(low, ", "), seed)
	}
	return nil
}

// places returns a mutation for every place of the package's files, without those of tests.
func places(root, pkg string) ([]mutation, error) {
	context := build.Default
	context.BuildTags = []string{buildTag}
	p, err := context.ImportDir(filepath.Join(root, pkg), 0)
	if err != nil {
		return nil, err
	}
	var all []mutation
	for _, name := range p.GoFiles {
		file := filepath.Join(pkg, name)
		content, err := os.ReadFile(filepath.Join(root, file))
		if err != nil {
			return nil, err
		}
		found, err := placesOf(file, string(content))
		if err != nil {
			return nil, err
		}
		all = append(all, found...)
	}
	return all, nil
}

// operators are the other operators for one.
var operators = map[token.Token][]token.Token{
	token.EQL: {token.NEQ}, token.NEQ: {token.EQL},
	token.LSS: {token.LEQ, token.GEQ}, token.LEQ: {token.LSS, token.GTR},
	token.GTR: {token.GEQ, token.LEQ}, token.GEQ: {token.GTR, token.LSS},
	token.LAND: {token.LOR}, token.LOR: {token.LAND},
}

// placesOf returns the mutations of a file.
func placesOf(file, content string) ([]mutation, error) {
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, content, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	var all []mutation
	add := func(n ast.Node, from, to token.Pos, text string) {
		position, end := set.Position(from), set.Position(to)
		all = append(all, mutation{
			id: fmt.Sprintf("%s:%d:%d", file, position.Line, position.Column), file: file, old: content, new: text, from: position.Offset, to: end.Offset, node: n,
		})
	}
	negate := func(n ast.Node, condition ast.Expr) {
		if _, ok := condition.(*ast.BinaryExpr); !ok {
			add(n, condition.Pos(), condition.End(), "!("+content[set.Position(condition.Pos()).Offset:set.Position(condition.End()).Offset]+")")
		}
	}
	remove := func(statements []ast.Stmt) {
		for _, statement := range statements {
			if acts(statement) {
				add(statement, statement.Pos(), statement.End(), "{}")
			}
		}
	}
	selected := map[ast.Expr]bool{} // receives that are cases of a select
	var functions []*ast.FuncType   // those around the node
	var nodes []ast.Node
	ast.Inspect(parsed, func(n ast.Node) bool {
		if n == nil {
			switch nodes[len(nodes)-1].(type) {
			case *ast.FuncDecl, *ast.FuncLit:
				functions = functions[:len(functions)-1]
			}
			nodes = nodes[:len(nodes)-1]
			return true
		}
		if d, ok := n.(*ast.GenDecl); ok && d.Tok == token.CONST {
			return false
		}
		nodes = append(nodes, n)
		switch n := n.(type) {
		case *ast.FuncDecl:
			functions = append(functions, n.Type)
		case *ast.FuncLit:
			functions = append(functions, n.Type)
		case *ast.BinaryExpr:
			for _, other := range operators[n.Op] {
				add(n, n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), other.String())
			}
		case *ast.IfStmt:
			negate(n, n.Cond)
		case *ast.SwitchStmt:
			for _, clause := range n.Body.List {
				for _, condition := range clause.(*ast.CaseClause).List {
					if n.Tag == nil {
						negate(n, condition)
					}
				}
			}
		case *ast.ReturnStmt:
			if len(functions) > 0 && returnsError(functions[len(functions)-1], n) {
				last := n.Results[len(n.Results)-1]
				add(n, last.Pos(), last.End(), "nil")
			}
		case *ast.UnaryExpr:
			if n.Op == token.ARROW && !selected[n] {
				add(n, n.X.Pos(), n.X.End(), "closed")
			}
		case *ast.CommClause:
			if channel := channelOf(n.Comm, selected); channel != nil {
				add(n, channel.Pos(), channel.End(), "nil")
			}
			remove(n.Body)
		case *ast.CaseClause:
			remove(n.Body)
		case *ast.BlockStmt:
			remove(n.List)
		}
		return true
	})
	return all, nil
}

// returnsError reports whether the statement returns an error that is not the constant nil.
func returnsError(f *ast.FuncType, n *ast.ReturnStmt) bool {
	if f.Results == nil || len(n.Results) != f.Results.NumFields() {
		return false
	}
	kind, ok := f.Results.List[len(f.Results.List)-1].Type.(*ast.Ident)
	value, constant := n.Results[len(n.Results)-1].(*ast.Ident)
	return ok && kind.Name == "error" && (!constant || value.Name != "nil")
}

// channelOf returns the channel of a case of a select, nil for the default, and notes a receive.
func channelOf(operation ast.Stmt, receives map[ast.Expr]bool) ast.Expr {
	var received ast.Expr
	switch s := operation.(type) {
	case *ast.SendStmt:
		return s.Chan
	case *ast.ExprStmt:
		received = s.X
	case *ast.AssignStmt:
		received = s.Rhs[0]
	default:
		return nil
	}
	received = ast.Unparen(received)
	receives[received] = true
	return received.(*ast.UnaryExpr).X
}

// acts reports whether the statement takes or leaves a lock, sends on a channel, or closes it.
func acts(statement ast.Stmt) bool {
	var called ast.Expr
	switch s := statement.(type) {
	case *ast.SendStmt:
		return true
	case *ast.DeferStmt:
		called = s.Call
	case *ast.ExprStmt:
		called = s.X
	}
	if x, ok := called.(*ast.CallExpr); ok {
		switch f := x.Fun.(type) {
		case *ast.Ident:
			return f.Name == "close"
		case *ast.SelectorExpr:
			return slices.Contains([]string{"Lock", "Unlock", "RLock", "RUnlock"}, f.Sel.Name)
		}
	}
	return false
}
