package main

import (
	"strings"
	"testing"
)

// TestGuard_NestedPlaces_AreSelectedByNumber: the code of each mutation and the original are in one
// file, also where a place is within another.
func TestGuard_NestedPlaces_AreSelectedByNumber(t *testing.T) {
	const head, tail = "package p\n\nfunc f(a, b int, ok bool, err error, mu sync.Locker, c chan int) error {\n", "\nreturn nil\n}\n"
	for line, want := range map[string]string{
		"if ok { a++ }": "if (strataMutation == 1) != (ok) { a++ }",
		"mu.Lock()":     "if strataMutation != 1 { mu.Lock() }",
		"return err":    "return strataError(1, err)",
		"a = 1":         "a = 1",
		"<-c":           "<-strataClosed(1, c)",
		"a, ok = <-c":   "a, ok = <-strataClosed(1, c)",
		"switch { case ok: mu.Lock(); default: c <- 1 }": "switch { case (strataMutation == 1) != (ok): " +
			"if strataMutation != 2 { mu.Lock() }; default: if strataMutation != 3 { c <- 1 } }",
		"select { case <-c: close(c); case c <- <-c: }": "select { case <-strataNil(1, c): if strataMutation != 2 { close(c) }; " +
			"case strataNil(3, c) <- <-strataClosed(4, c): }",
		"if a < b { a++ }": "if (strataMutation == 1 && ((a) <= (b)) || strataMutation == 2 && ((a) >= (b)) || " +
			"strataMutation != 1 && strataMutation != 2 && ((a) < (b))) { a++ }",
		"if f(a == b) { mu.Unlock() }": "if (strataMutation == 1) != (f((strataMutation == 2 && ((a) != (b)) || " +
			"strataMutation != 2 && ((a) == (b))))) { if strataMutation != 3 { mu.Unlock() } }",
	} {
		content := head + line + tail
		places, err := placesOf("p.go", content)
		if err != nil {
			t.Fatal(err)
		}
		var all []numbered
		for i, m := range places {
			all = append(all, numbered{m, i + 1})
		}
		got := strings.TrimSuffix(strings.TrimPrefix(guard(content, all), head), tail)
		if got != want {
			t.Errorf("%s becomes\n%s\nwant\n%s", line, got, want)
		}
	}
}
