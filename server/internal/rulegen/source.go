package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// source has the functions of packages of k8s.io/kubernetes, by the folder of the package.
type source struct {
	tree     fs.FS
	files    token.FileSet
	packages map[string]map[string]*function
}

// function is a function with the packages that its file imports, by name, and the comments in its
// body.
type function struct {
	*ast.FuncDecl
	dir      string
	imports  map[string]string
	comments []string
}

// function returns a function of a package; nil if it has none of that name.
func (s *source) function(dir, name string) (*function, error) {
	all, ok := s.packages[dir]
	if !ok {
		all = map[string]*function{}
		s.packages[dir] = all
		names, err := fs.Glob(s.tree, path.Join(dir, "*.go"))
		if err != nil || len(names) == 0 {
			return nil, fmt.Errorf("no Go files in %s: %w", dir, err)
		}
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			if err := s.parse(dir, name, all); err != nil {
				return nil, err
			}
		}
	}
	return all[name], nil
}

func (s *source) parse(dir, name string, all map[string]*function) error {
	text, err := fs.ReadFile(s.tree, name)
	if err != nil {
		return err
	}
	file, err := parser.ParseFile(&s.files, name, text, parser.ParseComments)
	if err != nil {
		return err
	}
	imports := map[string]string{}
	for _, i := range file.Imports {
		to, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			return err
		}
		if imports[path.Base(to)] = to; i.Name != nil {
			imports[i.Name.Name] = to
		}
	}
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Recv != nil || f.Body == nil {
			continue
		}
		fn := &function{FuncDecl: f, dir: dir, imports: imports}
		for _, group := range file.Comments {
			if group.Pos() > f.Body.Pos() && group.End() < f.Body.End() {
				for _, c := range group.List {
					fn.comments = append(fn.comments, c.Text)
				}
			}
		}
		all[f.Name.Name] = fn
	}
	return nil
}

// text returns the source of a node in one line, without its comments.
func (s *source) text(n ast.Node) string {
	text := &bytes.Buffer{}
	if err := format.Node(text, &s.files, n); err != nil {
		panic(err) // the node was parsed
	}
	return strings.Join(strings.Fields(text.String()), " ")
}

// digest returns a digest of the source of a node.
func (s *source) digest(n ast.Node) string {
	sum := sha256.Sum256([]byte(s.text(n)))
	return hex.EncodeToString(sum[:6])
}
