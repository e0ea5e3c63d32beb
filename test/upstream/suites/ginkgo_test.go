package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

func TestSpecVerdicts_Report_ReturnsSelectedSpecs(t *testing.T) {
	report := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(report, []byte(ginkgoReport), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		only []string
		want Verdicts
	}{
		"all":  {nil, Verdicts{mainTest: Fail, "a reads_writes": Pass, "a reads_writes #2": Fail, "a b waits": Skip, "ends": Fail}},
		"some": {[]string{"ends", "a reads_writes #2"}, Verdicts{mainTest: Fail, "a reads_writes": Pass, "a reads_writes #2": Fail, "ends": Fail}},
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

func TestSpecRunner_Package_ReturnsTestThatRunsSpecs(t *testing.T) {
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

func TestSplitSpecs_Names_SeparatesGoTestsFromSpecs(t *testing.T) {
	all, none := []string(nil), []string{}
	tests := map[string]struct{ only, goTests, specs []string }{
		"all":                   {nil, all, all},
		"binary":                {[]string{mainTest, "a spec"}, all, all},
		"runner":                {[]string{"TestP"}, []string{"TestP"}, all},
		"runner and a spec":     {[]string{"TestP", "a spec"}, []string{"TestP"}, all},
		"spec":                  {[]string{"a spec"}, []string{"TestP"}, []string{"a spec"}},
		"spec that is no test":  {[]string{"Test of x"}, []string{"TestP"}, []string{"Test of x"}},
		"test without specs":    {[]string{"TestOther"}, []string{"TestOther"}, all},
		"test and a spec":       {[]string{"TestOther", "a spec"}, []string{"TestOther", "TestP"}, []string{"a spec"}},
		"empty list, not a nil": {none, none, all},
	}
	for name, test := range tests {
		goTests, specs := splitSpecs(test.only, "TestP")
		if !slices.Equal(goTests, test.goTests) || (goTests == nil) != (test.goTests == nil) || !slices.Equal(specs, test.specs) {
			t.Errorf("%s: Go tests %q, specs %q; want %q and %q", name, goTests, specs, test.goTests, test.specs)
		}
	}
}

func TestReplaceRunner_SpecVerdicts_ReplaceVerdictOfRunner(t *testing.T) {
	tests := map[string]struct{ verdicts, bySpec, want Verdicts }{
		"passed":                  {Verdicts{mainTest: Pass, "TestP": Pass}, Verdicts{"a": Pass}, Verdicts{mainTest: Pass, "a": Pass}},
		"some passed":             {Verdicts{"TestP": Pass}, Verdicts{"a": Pass}, Verdicts{"a": Pass}},
		"a spec failed":           {Verdicts{mainTest: Pass, "TestP": Fail}, Verdicts{"a": Fail}, Verdicts{mainTest: Pass, "a": Fail}},
		"another node failed":     {Verdicts{mainTest: Pass, "TestP": Fail}, Verdicts{"a": Skip, mainTest: Fail}, Verdicts{mainTest: Fail, "a": Skip}},
		"no spec failed":          {Verdicts{mainTest: Pass, "TestP": Fail}, Verdicts{"a": Pass}, Verdicts{mainTest: Fail, "a": Pass}},
		"crashed":                 {Verdicts{mainTest: Pass, "TestP": Fail, "TestOther": Absent}, nil, Verdicts{mainTest: Fail, "TestOther": Absent}},
		"crashed before it began": {Verdicts{mainTest: Pass, "TestP": Absent}, nil, Verdicts{mainTest: Fail}},
	}
	for name, test := range tests {
		if got := replaceRunner(test.verdicts, "TestP", test.bySpec); !maps.Equal(got, test.want) {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestSpecRunner_Crashed_IsReplacedByRetry(t *testing.T) {
	whole := func() Verdicts {
		return replaceRunner(Verdicts{mainTest: Pass, "TestP": Pass}, "TestP", Verdicts{"a": Pass, "b": Pass})
	}
	byEngine := map[Engine]Verdicts{Upstream: replaceRunner(Verdicts{mainTest: Pass, "TestP": Fail}, "TestP", nil), Strata: whole()}
	again := disputed(byEngine)
	if goTests, specs := splitSpecs(again, "TestP"); goTests != nil || specs != nil {
		t.Fatalf("the retry of %q is restricted to %q and %q", again, goTests, specs)
	}
	for _, verdicts := range byEngine {
		verdicts.merge(whole())
	}
	if again := disputed(byEngine); len(again) != 0 {
		t.Errorf("disputed after a retry that passed: %q", again)
	}
	if found := differences(byEngine); len(found) != 0 {
		t.Errorf("differences after a retry that passed: %v", found)
	}
}
