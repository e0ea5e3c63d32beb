package main

import (
	"bytes"
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

var (
	goFile    = regexp.MustCompile(`\b[a-z][\w-]*\.go\b`)
	dotted    = regexp.MustCompile(`\b[A-Za-z]\w*(?:\.[A-Za-z]\w*)+\b`)
	camelCase = regexp.MustCompile(`\b(?:[a-z]+|[A-Z][a-z0-9]+)[A-Z]\w*\b`)
	// example is a line of code in a comment, which may declare names; lower is a file, a resource,
	// or another name that is not of Go.
	example = regexp.MustCompile(`(?m)^(//)?\t.*$`)
	lower   = regexp.MustCompile(`^[a-z0-9.]+$`)
)

// algorithms are in camel case too.
var algorithms = map[string]bool{"CoDel": true}

// names is the names that comments may use: those of the code, of strings and of other files than
// Go's, and those of dependencies.
type names struct {
	words   map[string]bool
	files   map[string]bool            // base names of Go files
	members map[string]map[string]bool // fields and methods by type, declarations by package
	open    map[string]bool            // types that have members of other types
}

func (n *names) declare(of, member string) {
	if n.members[of] == nil {
		n.members[of] = map[string]bool{}
	}
	n.members[of][member] = true
}

// addFile adds the names of a file of the repository.
func (n *names) addFile(file string, src []byte) error {
	if filepath.Ext(file) != ".go" {
		n.addWords(src)
		return nil
	}
	n.files[filepath.Base(file)] = true
	parsed, err := parser.ParseFile(token.NewFileSet(), file, src, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	pkg := strings.TrimSuffix(parsed.Name.Name, "_test")
	ast.Inspect(parsed, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.Ident:
			n.words[node.Name] = true
		case *ast.BasicLit:
			n.addWords([]byte(node.Value))
		case *ast.ValueSpec:
			for _, name := range node.Names {
				n.declare(pkg, name.Name)
			}
		case *ast.TypeSpec:
			n.declare(pkg, node.Name.Name)
			n.addType(node)
		case *ast.FuncDecl:
			if of := receiver(node); of != "" {
				n.declare(of, node.Name.Name)
			} else {
				n.declare(pkg, node.Name.Name)
			}
		}
		return true
	})
	return nil
}

func (n *names) addWords(src []byte) {
	for word := range bytes.FieldsFuncSeq(src, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) }) {
		if !n.words[string(word)] {
			n.words[string(word)] = true
		}
	}
}

func (n *names) addType(spec *ast.TypeSpec) {
	name := spec.Name.Name
	var fields *ast.FieldList
	switch t := spec.Type.(type) {
	case *ast.StructType:
		fields = t.Fields
	case *ast.InterfaceType:
		fields = t.Methods
	default:
		n.open[name] = true
		return
	}
	n.declare(name, "")
	for _, field := range fields.List {
		n.open[name] = n.open[name] || len(field.Names) == 0
		for _, member := range field.Names {
			n.declare(name, member.Name)
		}
	}
}

// receiver returns the type of a method's receiver, "" for a function.
func receiver(f *ast.FuncDecl) (name string) {
	if f.Recv != nil {
		ast.Inspect(f.Recv.List[0].Type, func(node ast.Node) bool {
			id, ok := node.(*ast.Ident)
			if ok {
				name = cmp.Or(name, id.Name)
			}
			return true
		})
	}
	return name
}

// addDependencies adds the words in packages that the workspace at dir depends on. It reads 200 MB.
func (n *names) addDependencies(dir string) error {
	list := func(args ...string) ([]string, error) {
		cmd := exec.Command("go", append([]string{"list"}, args...)...)
		cmd.Dir, cmd.Env, cmd.Stderr = dir, append(os.Environ(), "GOWORK="), os.Stderr
		out, err := cmd.Output()
		return strings.Fields(string(out)), err
	}
	modules, err := list("-m", "-f", "{{.Dir}}/...")
	if err != nil {
		return fmt.Errorf("list modules: %w", err)
	}
	dirs, err := list(append([]string{"-e", "-deps", "-test", "-f", "{{.Dir}}"}, modules...)...)
	if err != nil {
		return fmt.Errorf("list dependencies: %w", err)
	}
	read := map[string]bool{}
	for _, dir := range dirs {
		if read[dir] || strings.HasPrefix(dir+"/", strings.TrimSuffix(modules[0], "...")) {
			continue // with the tests of a package, or of this repository
		}
		read[dir] = true
		sources, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			return err
		}
		for _, file := range sources {
			src, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			n.files[filepath.Base(file)] = true
			n.addWords(src)
		}
	}
	return nil
}

// stale returns the names in a comment that do not exist: files, members of a type or package of
// the repository, and names in camel case.
func (n *names) stale(text string) (stale []string) {
	for _, file := range goFile.FindAllString(text, -1) {
		if !n.files[file] {
			stale = append(stale, file)
		}
	}
	for _, name := range dotted.FindAllString(text, -1) {
		parts := strings.Split(name, ".")
		of, member := parts[0], parts[1]
		if len(parts) > 2 { // package.Type.Member
			if !n.members[of][member] {
				continue // of a dependency
			}
			of, member = member, parts[2]
		}
		if known := n.members[of]; known != nil && !known[member] && !(n.open[of] && n.words[member]) && !lower.MatchString(name) {
			stale = append(stale, name)
		}
	}
	for _, name := range camelCase.FindAllString(example.ReplaceAllString(text, ""), -1) {
		if !n.words[name] && !n.words[strings.TrimSuffix(name, "s")] && !algorithms[name] {
			stale = append(stale, name)
		}
	}
	return stale
}

// staleNames returns the positions of stale names in the comments of the repository at dir.
func staleNames(dir string) (stale []string, err error) {
	sources, err := read(dir)
	if err != nil {
		return nil, err
	}
	for file := range sources {
		if filepath.Ext(file) == ".md" || filepath.Ext(file) == ".svg" {
			delete(sources, file) // may be as stale
		}
	}
	n := &names{words: map[string]bool{}, files: map[string]bool{}, members: map[string]map[string]bool{}, open: map[string]bool{}}
	for file, src := range sources {
		if err := n.addFile(file, src); err != nil {
			return nil, err
		}
	}
	if err := n.addDependencies(dir); err != nil {
		return nil, err
	}
	for file, src := range sources {
		if filepath.Ext(file) != ".go" {
			continue
		}
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, file, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, group := range parsed.Comments {
			for _, comment := range group.List {
				for _, name := range n.stale(comment.Text) {
					stale = append(stale, fmt.Sprintf("%s: %s does not exist", fset.Position(comment.Pos()), name))
				}
			}
		}
	}
	slices.Sort(stale)
	return stale, nil
}
