// Command prose counts indefinite pronouns in the comments and documents of a repository. A package
// or document with more of them than the limit is listed, and the command then exits with 1: such
// words usually stand for a noun that a reader has to guess. It also counts the sentences of pages
// (docs and the top of the repository) that have more than 30 words, and fails for a page in which
// they are more than 8 % of all (sentences.go), and fails for comments of more than 100 columns
// (width.go), and for names in them that do not exist (names.go).
//
// Counted are the words of indefinite, in comments and in messages of Go files (string literals of
// several words; a package's tests are counted apart from it) and in Markdown outside of code
// blocks, code spans and quotations. Packages and documents of few words are counted together.
// Usage: prose [-limit N] [-long PAGE] [directory].
package main

import (
	"cmp"
	"flag"
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
)

var (
	indefinite = regexp.MustCompile(`(?i)\b(what|who|whoever|whatever|nobody|somebody|anybody|everybody|those who|those that)\b`)
	word       = regexp.MustCompile(`[A-Za-z][A-Za-z'-]*`)
	codeBlock  = regexp.MustCompile("(?ms)^[ \t]*```.*?^[ \t]*```")
	codeSpan   = regexp.MustCompile("`[^`]*`")
	quotation  = regexp.MustCompile(`(?m)^>.*$`)
)

const (
	// minWords is the size below which a text is not judged alone: one word more or less would
	// decide.
	minWords = 300
	// small is the name under which such texts are counted together.
	small = "packages and documents of few words"
	// messageWords is the number of words from which on a string literal counts as a message.
	messageWords = 4
)

type count struct{ hits, words int }

func (c count) perThousand() float64 { return 1000 * float64(c.hits) / float64(c.words) }

func main() {
	limit := flag.Float64("limit", 3, "indefinite pronouns per 1,000 words that a package or document may have")
	list := flag.String("long", "", "list the sentences of this page that have more than 30 words, and check nothing")
	flag.Parse()
	dir := cmp.Or(flag.Arg(0), ".")
	counts, pages, wide, err := countAll(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if *list != "" {
		listLong(os.Stdout, pages[*list])
		return
	}
	stale, err := staleNames(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "prose:", err)
		os.Exit(2)
	}
	if report(counts, *limit)+reportLong(measureAll(pages), pending)+reportLines(os.Stdout, wide)+reportLines(os.Stdout, stale) > 0 {
		os.Exit(1)
	}
}

// report lists the texts above the limit, those with the most first, and returns their number.
func report(counts map[string]count, limit float64) (above int) {
	var names []string
	few := counts[small]
	for name, c := range counts {
		if c.words < minWords && name != small {
			few.hits, few.words = few.hits+c.hits, few.words+c.words
		}
	}
	counts[small] = few
	for name, c := range counts {
		if (c.words >= minWords || name == small) && c.words > 0 && c.perThousand() > limit {
			names = append(names, name)
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b].hits, counts[a].hits), cmp.Compare(a, b))
	})
	for _, name := range names {
		fmt.Printf("%s: %d indefinite pronouns in %d words, %.1f per 1,000; at most %g\n",
			name, counts[name].hits, counts[name].words, counts[name].perThousand(), limit)
	}
	return len(names)
}

// read returns the files that git tracks or would add, without those of this package, which has the
// words themselves.
func read(dir string, patterns ...string) (sources map[string][]byte, err error) {
	list := exec.Command("git", append([]string{"ls-files", "-co", "--exclude-standard"}, patterns...)...)
	list.Dir = dir
	out, err := list.Output()
	if err != nil {
		return nil, fmt.Errorf("list files: %w", err)
	}
	sources = map[string][]byte{}
	for file := range strings.Lines(string(out)) {
		file = strings.TrimSpace(file)
		if strings.Contains(file, "testdata/") || strings.HasPrefix(file, "tools/prose/") {
			continue
		}
		src, err := os.ReadFile(filepath.Join(dir, file))
		if os.IsNotExist(err) { // removed, not committed yet
			continue
		}
		if err != nil {
			return nil, err
		}
		sources[file] = src
	}
	return sources, nil
}

// countAll counts the files that git tracks or would add, by package and document, and returns the
// text of the pages among them, and the comments that are too wide.
func countAll(dir string) (counts map[string]count, pages map[string]string, wide []string, err error) {
	sources, err := read(dir, "*.go", "*.md")
	if err != nil {
		return nil, nil, nil, err
	}
	counts, pages = map[string]count{}, map[string]string{}
	for file, src := range sources {
		if isPage(file) {
			pages[file] = string(src)
		}
		if filepath.Ext(file) == ".go" {
			found, err := wideComments(file, src)
			if err != nil {
				return nil, nil, nil, err
			}
			wide = append(wide, found...)
		}
		name, text, err := prose(file, src)
		if err != nil {
			return nil, nil, nil, err
		}
		c := counts[name]
		c.hits += len(indefinite.FindAllString(text, -1))
		c.words += len(word.FindAllString(text, -1))
		counts[name] = c
	}
	return counts, pages, wide, nil
}

// prose returns the text of a file without code, and the name that it is counted under.
func prose(file string, src []byte) (name, text string, err error) {
	if filepath.Ext(file) == ".md" {
		text = codeBlock.ReplaceAllString(string(src), "")
		text = quotation.ReplaceAllString(codeSpan.ReplaceAllString(text, ""), "")
		return file, text, nil
	}
	parsed, err := parser.ParseFile(token.NewFileSet(), file, src, parser.ParseComments)
	if err != nil {
		return "", "", err
	}
	var all strings.Builder
	for _, group := range parsed.Comments {
		all.WriteString(group.Text() + "\n")
	}
	ast.Inspect(parsed, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING && len(word.FindAllString(literal.Value, messageWords)) == messageWords {
			all.WriteString(literal.Value + "\n")
		}
		return true
	})
	text = all.String()
	name = filepath.Dir(file)
	if strings.HasSuffix(file, "_test.go") {
		name += " (tests)"
	}
	return name, text, nil
}
