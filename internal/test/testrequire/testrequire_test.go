package testrequire_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testrequire"
)

// recorder records how a test ends, without ending it.
type recorder struct {
	testing.TB
	end string
}

func (r *recorder) Helper()                   {}
func (r *recorder) Fatalf(f string, a ...any) { r.end += "failed: " + fmt.Sprintf(f, a...) }
func (r *recorder) Skipf(f string, a ...any)  { r.end += "skipped: " + fmt.Sprintf(f, a...) }

func TestMissing_RequiredName_FailsTheTest(t *testing.T) {
	for required, want := range map[string]string{
		"":           "skipped: skipped without node: not installed",
		"nodes,curl": "skipped: skipped without node: not installed",
		"curl,node":  "failed: node is required (STRATA_TEST_REQUIRE), and not installed",
		"all":        "failed: node is required (STRATA_TEST_REQUIRE), and not installed",
	} {
		t.Setenv(testrequire.EnvVar, required)
		r := &recorder{TB: t}
		testrequire.Missing(r, "node", "not installed")
		// The recorder goes on after a failure, which ends a test.
		if !strings.HasPrefix(r.end, want) {
			t.Errorf("%s=%s: %s, want %s", testrequire.EnvVar, required, r.end, want)
		}
	}
}

// plain matches a skip for an error, of a search for a program or of a permission.
var plain = regexp.MustCompile(`\.Skip(\(err|f\(.*%v)`)

// TestSkips_ForErrors_CanBeRequired reads the tests of all modules.
func TestSkips_ForErrors_CanBeRequired(t *testing.T) {
	files := 0
	err := filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "bin" || d.Name() == ".git" || d.Name() == "testdata"):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		if found := plain.FindString(string(text)); found != "" {
			t.Errorf("%s: %s: with testrequire.Missing, a machine can require it", path, found)
		}
		return err
	})
	if err != nil || files < 100 {
		t.Fatalf("%d files, %v", files, err)
	}
}
