package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestRewriteImports_KeepsEverythingElse(t *testing.T) {
	const text = `/*
Copyright 2017 The Kubernetes Authors.
*/

package p // k8s.io/kubernetes/test/integration/framework

import (
	"fmt"

	kubeapiservertesting "k8s.io/kubernetes/cmd/kube-apiserver/app/testing"
	"k8s.io/kubernetes/test/integration"
	"k8s.io/kubernetes/test/integrations"
)

var s = fmt.Sprint("k8s.io/kubernetes/test/integration")
`
	got, replaced, err := rewriteImports(text, isCopied, func(path string) string { return "copy/" + path })
	if err != nil {
		t.Fatal(err)
	}
	want := strings.NewReplacer(
		`testing "k8s.io/kubernetes/cmd`, `testing "copy/k8s.io/kubernetes/cmd`,
		"\t\"k8s.io/kubernetes/test/integration\"", "\t\"copy/k8s.io/kubernetes/test/integration\"").Replace(text)
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if paths := []string{"k8s.io/kubernetes/cmd/kube-apiserver/app/testing", "k8s.io/kubernetes/test/integration"}; !slices.Equal(replaced, paths) {
		t.Errorf("replaced %v, want %v", replaced, paths)
	}
}

func TestPatch_WithoutAnchor_Fails(t *testing.T) {
	const text = "import (\n\t\"fmt\"\n)\n\nfunc f() {\n\ta()\n\tb()\n\tb()\n}\n"
	got, err := patch(text, []edit{{"\ta()", "\tbefore()\n"}})
	if err != nil || !strings.Contains(got, "\n\n\tstrata \"") || !strings.Contains(got, "\tbefore()\n\ta()\n") {
		t.Errorf("got %q, %v", got, err)
	}
	for _, anchor := range []string{"\tc()", "\tb()"} {
		if _, err := patch(text, []edit{{anchor, "\tbefore()\n"}}); err == nil {
			t.Errorf("patch before %q succeeded, want an error", anchor)
		}
	}
}

func TestParseTest2JSON(t *testing.T) {
	const events = `{"Action":"run","Test":"TestA"}
{"Action":"output","Test":"TestA","Output":"hello\n"}
not json
{"Action":"pass","Test":"TestA/sub"}
{"Action":"fail","Test":"TestA"}
{"Action":"skip","Test":"TestB"}
{"Action":"run","Test":"TestC"}
{"Action":"fail"}
`
	var log strings.Builder
	got, err := parseTest2JSON(strings.NewReader(events), &log)
	want := Verdicts{"TestA/sub": Pass, "TestA": Fail, "TestB": Skip}
	if err != nil || len(got) != len(want) {
		t.Fatalf("got %v, %v, want %v", got, err, want)
	}
	for test, verdict := range want {
		if got[test] != verdict {
			t.Errorf("%s: got %s, want %s", test, got[test], verdict)
		}
	}
	if log.String() != "hello\nnot json\n" {
		t.Errorf("log is %q", log.String())
	}
}

func TestCompare(t *testing.T) {
	byEngine := map[Engine]Verdicts{
		Upstream: {"TestSame": Pass, "TestBoth": Fail, "TestSub": Pass, "TestSub/a": Pass, "TestSub/b": Pass, "TestGone": Pass, "TestSkip": Skip},
		Strata:   {"TestSame": Pass, "TestBoth": Fail, "TestSub": Fail, "TestSub/a": Pass, "TestSub/b": Fail, "TestSkip": Skip},
	}
	if got, want := disputed(byEngine), []string{"TestBoth", "TestGone", "TestSub"}; !slices.Equal(got, want) {
		t.Errorf("disputed: got %v, want %v", got, want)
	}
	gone, sub := Difference{"u", "TestGone", Pass, Absent}, Difference{"u", "TestSub/b", Pass, Fail}
	found := differences("u", byEngine)
	if want := []Difference{gone, sub}; !slices.Equal(found, want) {
		t.Errorf("differences: got %v, want %v", found, want)
	}
	if got, want := failedEverywhere(byEngine), []string{"TestBoth"}; !slices.Equal(got, want) {
		t.Errorf("failed everywhere: got %v, want %v", got, want)
	}

	entry := func(d Difference) knownDifference {
		return knownDifference{Suite: "s", Unit: d.Unit, Test: d.Test, Upstream: d.Upstream, Strata: d.Strata, Reason: "because"}
	}
	for name, test := range map[string]struct {
		known    []knownDifference
		problems int
	}{
		"unknown":          {nil, 2},
		"one known":        {[]knownDifference{entry(gone)}, 1},
		"known":            {[]knownDifference{entry(gone), entry(sub)}, 0},
		"other verdict":    {[]knownDifference{entry(gone), entry(Difference{"u", "TestSub/b", Fail, Pass})}, 2},
		"no longer occurs": {[]knownDifference{entry(gone), entry(sub), entry(Difference{"u", "TestSame", Pass, Fail})}, 1},
		"other unit":       {[]knownDifference{entry(gone), entry(sub), entry(Difference{"v", "TestSame", Pass, Fail})}, 0},
	} {
		if _, problems := judge(test.known, "s", "u", found); len(problems) != test.problems {
			t.Errorf("%s: problems %q, want %d", name, problems, test.problems)
		}
	}

	byEngine[Strata].merge(Verdicts{"TestSub": Pass, "TestSub/a": Fail, "TestSub/b": Pass, "TestGone": Pass})
	if found := differences("u", byEngine); len(found) != 0 {
		t.Errorf("after a retry that passed: differences %v, want none", found)
	}
}

// The document is generated: a change of it, of the results or of the generator alone is an error.
func TestDocumentFollowsFromResults(t *testing.T) {
	r, err := readResults("results.json")
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../docs/conformance.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != document(all, r) {
		t.Error("docs/conformance.md is not what results.json yields: run go run . -document")
	}
}
