package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

const ginkgoReport = `[{"SpecReports": [
	{"LeafNodeType": "BeforeSuite", "State": "passed"},
	{"LeafNodeType": "AfterSuite", "State": "failed"},
	{"ContainerHierarchyTexts": ["a"], "LeafNodeType": "It", "LeafNodeText": "reads/writes", "State": "passed"},
	{"ContainerHierarchyTexts": ["a"], "LeafNodeType": "It", "LeafNodeText": "reads/writes", "State": "failed"},
	{"ContainerHierarchyTexts": ["a", "b"], "LeafNodeType": "It", "LeafNodeText": "waits", "State": "pending"},
	{"LeafNodeType": "It", "LeafNodeText": "ends", "State": "timedout"}
]}]`

func TestSpecVerdicts(t *testing.T) {
	report := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(report, []byte(ginkgoReport), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		only []string
		want Verdicts
	}{
		"all":  {nil, Verdicts{"AfterSuite": Fail, "a reads_writes": Pass, "a reads_writes #2": Fail, "a b waits": Skip, "ends": Fail}},
		"some": {[]string{"ends", "a reads_writes #2"}, Verdicts{"AfterSuite": Fail, "a reads_writes": Pass, "a reads_writes #2": Fail, "ends": Fail}},
	}
	for name, test := range tests {
		got, err := specVerdicts(report, test.only)
		if err != nil || !maps.Equal(got, test.want) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, test.want)
		}
	}
	if _, err := specVerdicts(report+".missing", nil); err == nil {
		t.Error("a report that does not exist has verdicts")
	}
}

func TestSpecFocus_SelectsWholeTexts(t *testing.T) {
	focus := regexp.MustCompile(specFocus([]string{"a reads_writes", "of f(x) [Slow]"}))
	for text, want := range map[string]bool{
		"Suite a reads/writes": true, "a reads_writes": true, "Suite of f(x) [Slow]": true,
		"Suite a reads/writes twice": false, "Suite data reads/writes": false, "Suite of f(x)": false,
	} {
		if focus.MatchString(text) != want {
			t.Errorf("%q: selected %t, want %t", text, !want, want)
		}
	}
}

func TestSpecRunner(t *testing.T) {
	dir := t.TempDir()
	source := "package p\n\nfunc TestOther(t *testing.T) {\n\tt.Log()\n}\n\nfunc TestP(t *testing.T) {\n\tRegisterFailHandler(Fail)\n\tRunSpecs(t, \"P\")\n}\n"
	if runner, err := specRunner(dir); runner != "" || err != nil {
		t.Errorf("no tests: %q, %v", runner, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "p_test.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if runner, err := specRunner(dir); runner != "TestP" || err != nil {
		t.Errorf("%q, %v; want TestP", runner, err)
	}
}
