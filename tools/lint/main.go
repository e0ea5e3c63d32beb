// Program lint is a tool for go vet with four analyzers: errcheck, exhaustive, gosec and unparam.
//
//	go vet -vettool=bin/lint ./...
//
// go vet runs it once per package, with types from the build cache. golangci-lint has the same
// analyzers, but takes four minutes of two processors and 10 GB after a change of the engine.
//
// A line with the comment "//nolint:gosec // reason" is skipped; the other analyzers have the same
// form.
package main

import (
	"bytes"
	"go/token"
	"os"
	"regexp"
	"strings"

	"github.com/kisielk/errcheck/errcheck"
	"github.com/nishanths/exhaustive"
	"github.com/securego/gosec/v2/goanalysis"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/passes/buildssa"
	"golang.org/x/tools/go/analysis/unitchecker"
	"golang.org/x/tools/go/packages"
	"mvdan.cc/unparam/check"
)

// exclusion is a class of findings that are not defects, with the reason.
type exclusion struct {
	analyzer string
	path     string // a regular expression of the file; empty: all
	text     string // a regular expression of the message or the line; empty: all
	reason   string
}

const tests = `_test\.go$|/test/`

var exclusions = []exclusion{
	{"errcheck", "", `\bdefer .*\.(Close|Remove)\(`, "the end of a file that was read; Close of a written file is a statement"},
	{"errcheck", "", `(?i)\b(fmt\.Fprint(f|ln)?|w\.Write)\(`, "output to a terminal, or to a client that has gone"},
	{"errcheck", "", `(?i)(body|conn|readcloser|client|server|listener|\bl|inner|outer|source|target)\.Close\(\)`, "the end of a connection"},
	{"errcheck", tests, `^(go )?\w+\(|<-|\.(Close|Do|Encode|Kill|Read|Release|RemoveAll|SetWriteDeadline|Sscan|Stop|Wait|Write\w*)\(`,
		"cleanup, functions of the test, and bytes for a test that compares what arrives"},
	{"exhaustive", tests, "", "a test names the cases it is about"},
	{"exhaustive", "", `: (codes|reflect)\.`, "enumerations of grpc and reflect with many values"},
	{"gosec", tests, "", "a test has no attacker"},
	{"unparam", tests, "always receives|is always nil", "a helper's parameter may have one value today"},
	{"errcheck", "/test/bench/", "", "measurements, not a product"},
	{"exhaustive", "/test/bench/", "", "measurements, not a product"},
	{"unparam", "/test/bench/", "", "measurements, not a product"},
}

// gosecExcludes are rules that do not fit:
//
//	G103        unsafe is used in mirror/entry.go alone, which gives its reasons
//	G104        is errcheck's
//	G115        lengths are below 4 GiB, and revisions are positive
//	G204, G304  commands of an operator start programs, and read the files of their flags
//	G404        math/rand is for jitter; packages of crypto make keys
//	G703, G704  as G304; a replica requests the paths of its clients from its primary
const gosecExcludes = "G103,G104,G115,G204,G304,G404,G703,G704"

func main() {
	for a, flag := range map[*analysis.Analyzer][2]string{
		goanalysis.Analyzer: {"exclude", gosecExcludes},
		exhaustive.Analyzer: {"d", "true"}, // a default makes a switch exhaustive
	} {
		if err := a.Flags.Set(flag[0], flag[1]); err != nil {
			panic(err) // the version of the analyzer has no such flag
		}
	}
	unitchecker.Main(filtered(errcheck.Analyzer), filtered(exhaustive.Analyzer), filtered(goanalysis.Analyzer), filtered(unparam))
}

// unparam reports parameters and results without a use. Upstream has no analysis.Analyzer of it.
var unparam = &analysis.Analyzer{
	Name: "unparam", Doc: "check for unused parameters and results", Requires: []*analysis.Analyzer{buildssa.Analyzer},
	Run: func(pass *analysis.Pass) (any, error) {
		var c check.Checker
		c.Packages([]*packages.Package{{Fset: pass.Fset, Syntax: pass.Files, Types: pass.Pkg, TypesInfo: pass.TypesInfo}})
		c.ProgramSSA(pass.ResultOf[buildssa.Analyzer].(*buildssa.SSA).Pkg.Prog)
		issues, err := c.Check()
		for _, issue := range issues {
			pass.Report(analysis.Diagnostic{Pos: issue.Pos(), Message: issue.Message()})
		}
		return nil, err
	},
}

// filtered returns an analyzer that reports the findings of a without the exclusions.
func filtered(a *analysis.Analyzer) *analysis.Analyzer {
	own := *a
	own.Run = func(pass *analysis.Pass) (any, error) {
		if !strings.HasPrefix(pass.Pkg.Path(), "github.com/stratakube/") && !strings.HasPrefix(pass.Pkg.Path(), "main") && len(a.FactTypes) == 0 {
			return a.Run(pass)
		}
		lines := map[string][][]byte{}
		with := *pass
		with.Report = func(d analysis.Diagnostic) {
			at := pass.Fset.Position(d.Pos)
			line := source(lines, at)
			if !excluded(a.Name, at.Filename, line, d.Message) {
				d.Message += " (" + a.Name + ")"
				pass.Report(d)
			}
		}
		return a.Run(&with)
	}
	return &own
}

// source returns the line of a position.
func source(lines map[string][][]byte, at token.Position) string {
	if _, known := lines[at.Filename]; !known {
		text, err := os.ReadFile(at.Filename)
		if err != nil {
			return ""
		}
		lines[at.Filename] = bytes.Split(text, []byte("\n"))
	}
	if all := lines[at.Filename]; at.Line <= len(all) {
		return strings.TrimSpace(string(all[at.Line-1]))
	}
	return ""
}

func excluded(analyzer, path, line, message string) bool {
	if strings.Contains(line, "//nolint:"+analyzer) {
		return true
	}
	for _, e := range exclusions {
		matches := func(pattern, text string) bool { return pattern == "" || regexp.MustCompile(pattern).MatchString(text) }
		if e.analyzer == analyzer && matches(e.path, path) && (matches(e.text, line) || matches(e.text, message)) {
			return true
		}
	}
	return false
}
