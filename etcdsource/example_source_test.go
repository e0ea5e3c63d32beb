package etcdsource_test

import (
	"os"
	"strings"
	"testing"
)

// TestExample_Source_EqualsTestedOne: the documentation shows the function that test/engine runs.
// go test notices a change of that file, which is below the top of this module.
func TestExample_Source_EqualsTestedOne(t *testing.T) {
	source := func(path string) string {
		file, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		_, function, _ := strings.Cut(string(file), "\nfunc listAndFollow(")
		function, _, found := strings.Cut(function, "\n}\n")
		if !found {
			t.Fatalf("%s has no function listAndFollow", path)
		}
		return function
	}
	if here, tested := source("example_test.go"), source("../test/engine/example_test.go"); here != tested {
		t.Errorf("listAndFollow here:\n%s\nin test/engine:\n%s", here, tested)
	}
}
