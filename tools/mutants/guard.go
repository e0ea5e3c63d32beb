package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"go/ast"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// selectedBy is the variable of the environment that selects a mutation of a program: its number.
const selectedBy = "STRATA_MUTATION"

// helpers is the file that guarded code needs in its package.
const helpers = `

import (
	"os"
	"strconv"
)

var strataMutation, _ = strconv.Atoi(os.Getenv("` + selectedBy + `"))

func strataError(mutation int, err error) error {
	if strataMutation == mutation {
		return nil
	}
	return err
}

func strataNil[C any](mutation int, channel C) C {
	if strataMutation == mutation {
		var none C
		return none
	}
	return channel
}

func strataClosed[T any](mutation int, channel <-chan T) <-chan T {
	if strataMutation == mutation {
		closed := make(chan T)
		close(closed)
		return closed
	}
	return channel
}
`

var packageClause = regexp.MustCompile(`(?m)^package \w+$`)

// program is a package's tests with mutations.
type program struct {
	file, dir string
	timeout   time.Duration
}

// buildGuarded builds the tests of a package with all mutations, numbered from 1.
func buildGuarded(root, temporary, pkg string, mutations []mutation) (program, error) {
	files := map[string][]numbered{}
	for i, m := range mutations {
		files[m.file] = append(files[m.file], numbered{m, i + 1})
	}
	replace := map[string]string{}
	write := func(name, text string) error {
		changed := filepath.Join(temporary, fmt.Sprint(len(replace), ".go"))
		replace[filepath.Join(root, name)] = changed
		return os.WriteFile(changed, []byte(text), 0o600)
	}
	for name, of := range files {
		if err := write(name, guard(of[0].old, of)); err != nil {
			return program{}, err
		}
	}
	clause := packageClause.FindString(mutations[0].old)
	if err := write(filepath.Join(pkg, "strata_mutation.go"), clause+helpers); err != nil {
		return program{}, err
	}
	description, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return program{}, err
	}
	overlay := filepath.Join(temporary, "overlay.json")
	if err := os.WriteFile(overlay, description, 0o600); err != nil {
		return program{}, err
	}
	p := program{file: filepath.Join(temporary, "test"), dir: filepath.Join(root, pkg), timeout: 10 * time.Minute}
	cmd := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-tags="+buildTag, "-overlay", overlay, "-o", p.file, "./"+pkg)
	cmd.Dir, cmd.Env = root, environment()
	if output, err := cmd.CombinedOutput(); err != nil {
		return program{}, fmt.Errorf("%s with its mutations: %w\n%s", pkg, err, output)
	}
	return p, nil
}

// run runs the tests with one mutation, or without for 0.
func (p program) run(number int) result {
	cmd := exec.Command("go", "tool", "test2json", p.file, "-test.v=test2json", "-test.failfast", "-test.short", fmt.Sprint("-test.timeout=", p.timeout), "-test.paniconexit0")
	cmd.Dir, cmd.Env = p.dir, append(environment(), fmt.Sprint(selectedBy, "=", number))
	return judge(cmd.Output())
}

// atOnce is the number of mutations that run at a time: those that hang need no processor.
const atOnce = 4

// survivors runs all mutations, and returns the indexes of those that no test kills.
func (p program) survivors(n int) []int {
	killedBy, next := make([]bool, n), make(chan int)
	var workers sync.WaitGroup
	for range atOnce {
		workers.Go(func() {
			for i := range next {
				began, r := time.Now(), p.run(i+1)
				killedBy[i] = r.outcome == killed
				fmt.Fprintf(os.Stderr, "%d of %d: %s %s in %.1f s\n", i+1, n, r.outcome, r.by, time.Since(began).Seconds())
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	workers.Wait()
	var survivors []int
	for i := range n {
		if !killedBy[i] {
			survivors = append(survivors, i)
		}
	}
	return survivors
}

// numbered is a mutation that its number selects.
type numbered struct {
	mutation
	number int
}

// span returns the offsets of the code that depends on the mutation.
func (m numbered) span() (from, to int) {
	if n, ok := m.node.(*ast.BinaryExpr); ok {
		base := m.from - int(n.OpPos)
		return base + int(n.Pos()), base + int(n.End())
	}
	return m.from, m.to
}

// guard returns a file's code with mutations, each applied only if it is selected.
func guard(content string, mutations []numbered) string {
	slices.SortStableFunc(mutations, func(a, b numbered) int {
		fromA, toA := a.span()
		fromB, toB := b.span()
		return cmp.Or(fromA-fromB, toB-toA) // the outer one first
	})
	return guarded{content, mutations}.text(0, len(content), 0)
}

type guarded struct {
	content   string
	mutations []numbered
}

// text returns the code of a part of the file with those of the mutations from index next that are
// in it.
func (g guarded) text(from, to, next int) string {
	var b strings.Builder
	for next < len(g.mutations) {
		begin, end := g.mutations[next].span()
		same := next + 1
		for same < len(g.mutations) {
			if otherBegin, otherEnd := g.mutations[same].span(); otherBegin != begin || otherEnd != end {
				break
			}
			same++
		}
		if begin >= from && end <= to {
			b.WriteString(g.content[from:begin])
			b.WriteString(g.place(g.mutations[next:same], same))
			from = end
		}
		next = same
	}
	b.WriteString(g.content[from:to])
	return b.String()
}

// place returns the code of a place with its mutations.
func (g guarded) place(of []numbered, next int) string {
	from, to := of[0].span()
	switch n := of[0].node.(type) {
	case *ast.BinaryExpr:
		x := "(" + g.text(from, from+int(n.X.End()-n.Pos()), next) + ")"
		y := "(" + g.text(to-int(n.End()-n.Y.Pos()), to, next) + ")"
		var texts, none string
		for _, m := range of {
			texts += fmt.Sprintf("strataMutation == %d && (%s %s %s) || ", m.number, x, m.new, y)
			none += fmt.Sprintf("strataMutation != %d && ", m.number)
		}
		return "(" + texts + none + "(" + x + " " + n.Op.String() + " " + y + "))"
	case *ast.IfStmt, *ast.SwitchStmt:
		return fmt.Sprintf("(strataMutation == %d) != (%s)", of[0].number, g.text(from, to, next))
	case *ast.ReturnStmt:
		return fmt.Sprintf("strataError(%d, %s)", of[0].number, g.text(from, to, next))
	case *ast.UnaryExpr:
		return fmt.Sprintf("strataClosed(%d, %s)", of[0].number, g.text(from, to, next))
	case *ast.CommClause:
		return fmt.Sprintf("strataNil(%d, %s)", of[0].number, g.text(from, to, next))
	}
	return fmt.Sprintf("if strataMutation != %d { %s }", of[0].number, g.text(from, to, next))
}
