package main

import (
	"fmt"
	"go/parser"
	"go/token"
	"io"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxColumns is the width of a line with a comment. A tab counts four columns.
const maxColumns = 100

// unwrapped matches comments that cannot be wrapped: directives, and preformatted lines.
var unwrapped = regexp.MustCompile(`^//(\t|[a-z]+:\S)`)

// wideComments returns the positions of lines of a Go file that have a comment beyond maxColumns.
func wideComments(file string, src []byte) (wide []string, err error) {
	fset := token.NewFileSet()
	parsed, err := parser.ParseFile(fset, file, src, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	lines := strings.Split(string(src), "\n")
	for _, group := range parsed.Comments {
		for _, comment := range group.List {
			if unwrapped.MatchString(comment.Text) {
				continue
			}
			first := fset.Position(comment.Pos()).Line
			for i := range strings.Count(comment.Text, "\n") + 1 {
				line := lines[first+i-1]
				if n := utf8.RuneCountInString(line) + 3*strings.Count(line, "\t"); n > maxColumns {
					wide = append(wide, fmt.Sprintf("%s:%d: a comment of %d columns, at most %d", file, first+i, n, maxColumns))
				}
			}
		}
	}
	return wide, nil
}

// reportLines lists places, and returns their number.
func reportLines(out io.Writer, lines []string) int {
	for _, line := range lines {
		fmt.Fprintln(out, line)
	}
	return len(lines)
}
