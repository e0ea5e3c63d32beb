package testseed_test

import (
	"cmp"
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

// mathRand matches an import of math/rand, with its name if it has one. crypto/rand is for keys and
// incompressible bytes, from which no test draws its actions.
var mathRand = regexp.MustCompile(`(?m)^(?:import)?\s*(\w*) *"math/rand(?:/v2)?"$`)

// global matches a function of math/rand that draws from the source of the process, which has no
// seed. %s is the name of the import.
const global = `\b%s\.(N(\[\w+\])?|U?[iI]nt\w*|Perm|Shuffle|Float\w*|NormFloat64|ExpFloat64|Read|Seed)\(`

// withoutSeed has the files whose draws follow from no seed, with the reason.
var withoutSeed = map[string]string{
	"internal/test/testseed/testseed_test.go":     "its test data has the forbidden calls",
	"test/e2e/faults/chaos/faults_test.go":        "draws the seed of a round, which is the name of its subtest",
	"test/e2e/faults/chaos/schedule_test.go":      "concurrent callers draw, in an order that does not follow from a seed",
	"test/upstream/robustness/robustness_test.go": "etcd's validators judge a record of concurrent clients, in an order that does not follow from a seed",
	"test/upstream/robustness/run_test.go":        "as robustness_test.go",
}

// unseeded returns the places of a Go file that draw without a logged seed. Most files have neither
// text that the expressions need, which take a second for each megabyte under the race detector.
func unseeded(text string) (found []string) {
	if strings.Contains(text, "NewPCG(") || strings.Contains(text, "seed") {
		found = unlogged.FindAllString(text, -1)
	}
	if !strings.Contains(text, `"math/rand`) {
		return found
	}
	for _, m := range mathRand.FindAllStringSubmatch(text, -1) {
		name := cmp.Or(m[1], "rand")
		found = append(found, regexp.MustCompile(fmt.Sprintf(global, name)).FindAllString(text, -1)...)
	}
	return found
}

// TestUnseeded_DrawsWithoutLoggedSeed_AreFound tests the test of all tests.
func TestUnseeded_DrawsWithoutLoggedSeed_AreFound(t *testing.T) {
	const imports = "package p\n\nimport (\n\t\"fmt\"\n\t%s\n)\n\nfunc f() { %s }\n"
	for _, c := range []struct {
		imported, code string
		want           int
	}{
		{`"math/rand/v2"`, `rand.New(rand.NewPCG(rand.Uint64(), 0))`, 2}, // seed and draw
		{`"math/rand/v2"`, `rnd := rand.New(rand.NewPCG(testseed.New(t), 0)); rnd.IntN(3)`, 0},
		{`"math/rand/v2"`, `rand.IntN(rand.IntN(3))`, 2},
		{`"math/rand/v2"`, `rand.N(time.Second)`, 1},
		{`"math/rand/v2"`, `rand.N[int64](3)`, 1},
		{`"math/rand/v2"`, `rand.Shuffle(n, swap)`, 1},
		{`"math/rand/v2"`, `rand.Perm(3)`, 1},
		{`"math/rand/v2"`, `rand.Float64() < 0.5`, 1},
		{`"math/rand/v2"`, `rand.Uint32()`, 1},
		{`"math/rand"`, `rand.Int63n(3)`, 1},
		{`random "math/rand/v2"`, `random.Int64N(3)`, 1},
		{`"crypto/rand"`, `rand.Int(rand.Reader, most)`, 0},
	} {
		if found := unseeded(fmt.Sprintf(imports, c.imported, c.code)); len(found) != c.want {
			t.Errorf("import %s: %s: found %q, want %d", c.imported, c.code, found, c.want)
		}
	}
}

// TestSeeds_OfAllTests_AreLogged reads the tests of all modules.
func TestSeeds_OfAllTests_AreLogged(t *testing.T) {
	const top = "../../.."
	files, exempt := 0, map[string]bool{}
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
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
		if err != nil {
			return err
		}
		if path, err = filepath.Rel(top, path); err != nil {
			return err
		}
		found := unseeded(string(text))
		if withoutSeed[filepath.ToSlash(path)] != "" {
			exempt[filepath.ToSlash(path)] = len(found) > 0
		} else if len(found) > 0 {
			t.Errorf("%s: %q: internal/test/testseed logs the seed of a source; each goroutine has its own source", path, found)
		}
		return nil
	})
	if err != nil || files < 100 {
		t.Fatalf("%d files, %v", files, err)
	}
	for path := range withoutSeed {
		if !exempt[path] {
			t.Errorf("withoutSeed has %s, which draws nothing without a seed", path)
		}
	}
}
