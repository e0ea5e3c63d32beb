package main

import "testing"

func TestProse_Document_OmitsCode(t *testing.T) {
	const doc = "What is it?\n\n```sh\nwho\n```\n\n> whoever said it\n\nRun `what` first.\n"
	_, text, err := prose("doc.md", []byte(doc))
	if hits := indefinite.FindAllString(text, -1); err != nil || len(hits) != 1 || hits[0] != "What" {
		t.Errorf("got %q, %v; want the first word alone", hits, err)
	}
}

func TestProse_GoFile_ReturnsCommentsAndMessages(t *testing.T) {
	const src = "// Package p: nobody reads it.\npackage p\n\n//go:generate who\n\nvar what = \"whatever\" // those who know\nvar message = \"nobody has read the key\"\n"
	name, text, err := prose("a/p_test.go", []byte(src))
	if hits := indefinite.FindAllString(text, -1); err != nil || name != "a (tests)" || len(hits) != 3 {
		t.Errorf("got %q of %s, %v; want three of a (tests)", hits, name, err)
	}
}

func TestReport_CountsTextsAboveLimit(t *testing.T) {
	counts := map[string]count{"few": {3, 1000}, "many": {4, 1000}, "short": {1, minWords - 1}, "shorter": {0, minWords - 1}}
	if n := report(counts, 3); n != 1 {
		t.Errorf("%d texts are above the limit, want 1", n)
	}
	counts["shorter"] = count{1, minWords - 1} // the two together are above it
	delete(counts, small)
	if n := report(counts, 3); n != 2 {
		t.Errorf("%d texts are above the limit, want 2", n)
	}
}
