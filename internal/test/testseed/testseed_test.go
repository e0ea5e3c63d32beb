package testseed_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/test/testseed"
)

// recorder records the log of a test.
type recorder struct {
	testing.TB
	log string
}

func (r *recorder) Helper() {}

func (r *recorder) Logf(format string, args ...any) { r.log += fmt.Sprintf(format, args...) }

func TestNew_Repetition_HasTheLoggedSeed(t *testing.T) {
	t.Setenv(testseed.EnvVar, "")
	first := &recorder{TB: t}
	seed := testseed.New(first)
	if other := testseed.New(first); other == seed {
		t.Errorf("seed %d was drawn twice", seed)
	}
	name, value, _ := strings.Cut(fmt.Sprintf("%s=%d", testseed.EnvVar, seed), "=")
	if !strings.HasPrefix(first.log, name+"="+value) {
		t.Fatalf("log %q, want %s=%s", first.log, name, value)
	}
	t.Setenv(name, value)
	if again := testseed.New(&recorder{TB: t}); again != seed {
		t.Errorf("repetition has seed %d, want %d", again, seed)
	}
}

// unlogged matches a random seed that no line of the test's log has.
var unlogged = regexp.MustCompile(`NewPCG\((uint64\()?(math)?(rand|time)\.|\bseed(, \w+)? :?= (uint64\()?(math)?(rand|time)\.`)

// TestSeeds_OfAllTests_AreLogged reads the tests of all modules.
func TestSeeds_OfAllTests_AreLogged(t *testing.T) {
	files := 0
	err := filepath.WalkDir("../../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "bin" || d.Name() == ".git" || d.Name() == "testdata") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		if found := unlogged.FindString(string(text)); found != "" {
			t.Errorf("%s: %s: a seed of internal/test/testseed is logged", path, found)
		}
		return err
	})
	if err != nil || files < 100 {
		t.Fatalf("%d files, %v", files, err)
	}
}
