package main

import (
	"fmt"
	"io"
	"path"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// Sentences of documents are counted by blocks: a paragraph, an item of a list, a cell of a table.
// Code blocks, headings, quotations, comments, and generated parts of a page do not count. A block
// that ends with a full stop, a question mark, an exclamation mark or a colon consists of
// sentences. Any other block is a label, such as most cells, and counts only if it is longer than a
// sentence may be: so short cells do not hide long sentences, and a missing full stop hides no long
// cell. A code span and the text of a link are words of their sentence; the target of a link, and
// an image, are not.

const (
	// maxSentence is the number of words that a sentence may have: the limit of the style guide.
	maxSentence = 30
	// longShare is the part of a page's sentences, in percent, that may be longer.
	longShare = 8.0
)

// pending are the pages above longShare, with the share that each may have, in percent, rounded up.
// A share never grows. A page leaves the list when it is below longShare.
var pending = map[string]float64{}

var (
	generated   = regexp.MustCompile(`(?s)<!-- (generated|tested|table)\b.*?<!-- end\b.*?-->`)
	comment     = regexp.MustCompile(`(?s)<!--.*?-->`)
	heading     = regexp.MustCompile(`(?m)^#+ .*$`)
	image       = regexp.MustCompile(`!\[[^\]]*\]\([^)]*\)`)
	link        = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	listItem    = regexp.MustCompile(`^\s*([-*+]|[0-9]+\.)\s+`)
	indented    = regexp.MustCompile(`^(\t| {4})`)
	rule        = regexp.MustCompile(`^[\s|:=-]+$`)
	sentence    = regexp.MustCompile(`[.!?]["')\]*_]*\s+`)
	abbreviated = regexp.MustCompile(`\b(e\.g|i\.e|etc|cf|vs)\.\s+$`)
	terminated  = regexp.MustCompile(`[.!?:]["')\]*_]*$`)
)

// lengths is the number of sentences of a page, and of those with more than maxSentence words.
type lengths struct{ long, all int }

// percent returns the share of long sentences.
func (l lengths) percent() float64 {
	if l.all == 0 {
		return 0
	}
	return 100 * float64(l.long) / float64(l.all)
}

// isPage reports whether the sentences of a document are judged: pages of docs, and those at the
// top of the repository.
func isPage(file string) bool {
	return path.Ext(file) == ".md" && (strings.HasPrefix(file, "docs/") || !strings.Contains(file, "/"))
}

// sentencesOf returns the sentences of a page that count, in their order.
func sentencesOf(page string) (all []string) {
	for _, block := range blocks(page) {
		label := !terminated.MatchString(block)
		for _, s := range splitSentences(block) {
			if n := countWords(s); n > maxSentence || n > 0 && !label {
				all = append(all, strings.TrimSpace(s))
			}
		}
	}
	return all
}

// measure counts the sentences of a page.
func measure(page string) (l lengths) {
	for _, s := range sentencesOf(page) {
		l.all++
		if countWords(s) > maxSentence {
			l.long++
		}
	}
	return l
}

func measureAll(pages map[string]string) map[string]lengths {
	all := map[string]lengths{}
	for name, page := range pages {
		all[name] = measure(page)
	}
	return all
}

// listLong writes the long sentences of a page with their numbers of words.
func listLong(w io.Writer, page string) {
	for _, s := range sentencesOf(page) {
		if n := countWords(s); n > maxSentence {
			fmt.Fprintf(w, "%d: %s\n", n, s)
		}
	}
}

// blocks returns the paragraphs, list items and table cells of a page, each in one line.
func blocks(page string) (all []string) {
	for _, outside := range []*regexp.Regexp{generated, comment, codeBlock, quotation, heading} {
		page = outside.ReplaceAllString(page, "\n")
	}
	page = codeSpan.ReplaceAllString(page, "code")
	page = image.ReplaceAllString(page, "")
	page = link.ReplaceAllString(page, "$1")
	var block []string
	inList := false // indented lines are of an item, not code
	end := func() {
		if len(block) > 0 {
			all = append(all, strings.Join(block, " "))
		}
		block = nil
	}
	for line := range strings.Lines(page) {
		text := strings.TrimSpace(line)
		switch {
		case text == "" || rule.MatchString(text):
			end()
		case strings.HasPrefix(text, "|"):
			end()
			for cell := range strings.SplitSeq(strings.Trim(text, "|"), "|") {
				if cell = strings.TrimSpace(cell); cell != "" {
					all = append(all, cell)
				}
			}
		default:
			marker := listItem.FindString(line)
			switch {
			case marker != "":
				end()
				inList, text = true, strings.TrimSpace(line[len(marker):])
			case len(block) == 0 && !inList && indented.MatchString(line):
				continue // code
			case len(block) == 0 && text[0] == line[0]:
				inList = false
			}
			block = append(block, text)
		}
	}
	end()
	return all
}

// splitSentences splits a block after full stops, question marks and exclamation marks that a space
// follows, except for those of abbreviations.
func splitSentences(block string) (all []string) {
	from := 0
	for _, at := range sentence.FindAllStringIndex(block, -1) {
		if !abbreviated.MatchString(block[from:at[1]]) {
			all = append(all, block[from:at[1]])
			from = at[1]
		}
	}
	return append(all, block[from:])
}

// countWords counts the words of a sentence: parts between spaces with a letter or digit.
func countWords(s string) (n int) {
	for w := range strings.FieldsSeq(s) {
		if strings.ContainsFunc(w, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
			n++
		}
	}
	return n
}

// reportLong lists the pages with a larger share of long sentences than they may have, those with
// the largest share first, and returns their number.
func reportLong(pages map[string]lengths, pending map[string]float64) (above int) {
	var names []string
	for name, l := range pages {
		if allowed := max(longShare, pending[name]); l.percent() > allowed {
			names = append(names, name)
		} else if pending[name] > 0 && l.percent() <= longShare {
			fmt.Printf("%s: %.1f %% long sentences; remove the page from pending in tools/prose/sentences.go\n", name, l.percent())
		}
	}
	slices.SortFunc(names, func(a, b string) int {
		switch p, q := pages[a].percent(), pages[b].percent(); {
		case p > q:
			return -1
		case p < q:
			return 1
		}
		return strings.Compare(a, b)
	})
	for _, name := range names {
		l := pages[name]
		fmt.Printf("%s: %d of %d sentences have more than %d words, %.1f %%; at most %g %%\n",
			name, l.long, l.all, maxSentence, l.percent(), max(longShare, pending[name]))
	}
	return len(names)
}
