package main

import (
	"slices"
	"strings"
	"testing"
)

// wordsOf returns a sentence of n words, without its end.
func wordsOf(n int) string { return strings.TrimSpace(strings.Repeat("word ", n)) }

func TestSentencesOf_Block_ReturnsSentences(t *testing.T) {
	short, long := wordsOf(maxSentence), wordsOf(maxSentence+1)
	for name, test := range map[string]struct {
		page string
		want []string
	}{
		"a paragraph over two lines":      {"One is\nhere. Two? (Three!) Four.\n", []string{"One is here.", "Two?", "(Three!)", "Four."}},
		"a heading":                       {"# A title.\n", nil},
		"a code block":                    {"```sh\nOne. Two.\n```\n", nil},
		"indented code":                   {"One.\n\n    make x. Y.\n", []string{"One."}},
		"an indented part of an item":     {"- One.\n\n    Two.\n\nThree.\n\n    make x.\n", []string{"One.", "Two.", "Three."}},
		"a quotation":                     {"> One.\n", nil},
		"a comment":                       {"<!-- One.\nTwo. -->\n", nil},
		"a generated table":               {"<!-- generated: x -->\n| One. |\n<!-- end of x -->\n\nTwo.\n", []string{"Two."}},
		"a code span is a word":           {"Run `a b. C` now.\n", []string{"Run code now."}},
		"a link without its target":       {"See [the page](a b. C).\n", []string{"See the page."}},
		"an image":                        {"One ![a picture. Two.](x.png) is.\n", []string{"One  is."}},
		"an abbreviation":                 {"Stores, e.g. kine, are slow. Others too.\n", []string{"Stores, e.g. kine, are slow.", "Others too."}},
		"a number with a point":           {"It takes 1.5 s in v1.37.2 of it.\n", []string{"It takes 1.5 s in v1.37.2 of it."}},
		"an item that ends with a colon":  {"One thing:\n\n- Two.\n- a label\n", []string{"One thing:", "Two."}},
		"a cell with a stop":              {"| a label | One. Two. |\n| --- | --- |\n", []string{"One.", "Two."}},
		"a label of the longest sentence": {"| " + short + " |\n", nil},
		"a label longer than a sentence":  {"| " + long + " |\n- " + long + "\n", []string{long, long}},
		"a long sentence before a label":  {long + ". A label\n", []string{long + "."}},
	} {
		if got := sentencesOf(test.page); !slices.Equal(got, test.want) {
			t.Errorf("%s: got %q, want %q", name, got, test.want)
		}
	}
}

func TestMeasure_CountsSentencesAboveLimit(t *testing.T) {
	page := wordsOf(maxSentence) + ". " + wordsOf(maxSentence+1) + ". - " + wordsOf(maxSentence) + ".\n"
	if got, want := measure(page), (lengths{long: 1, all: 3}); got != want {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestIsPage_SelectsDocsAndTop(t *testing.T) {
	for file, want := range map[string]bool{
		"README.md": true, "docs/tour.md": true, "docs/design/README.md": true,
		"docs/metrics.yaml": false, "test/README.md": false, "deploy/docs/x.md": false,
	} {
		if isPage(file) != want {
			t.Errorf("%s: %v, want %v", file, !want, want)
		}
	}
}

func TestReportLong_CountsPagesAboveTheirShare(t *testing.T) {
	pages := map[string]lengths{
		"at the limit": {8, 100}, "above it": {9, 100}, "empty": {},
		"pending":       {20, 100},
		"grown":         {21, 100},
		"below, listed": {1, 100},
	}
	listed := map[string]float64{"pending": 20, "grown": 20, "below, listed": 20, "removed": 20}
	if n := reportLong(pages, listed); n != 2 {
		t.Errorf("%d pages are above their share, want 2", n)
	}
}
