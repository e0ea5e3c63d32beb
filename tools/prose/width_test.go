package main

import (
	"slices"
	"strings"
	"testing"
)

func TestWideComments_Lines_AreMeasuredInColumns(t *testing.T) {
	text := strings.Repeat("x", 97)
	for src, want := range map[string]int{
		"// " + text + "\npackage p\n":                                        0,
		"// " + text + "x\npackage p\n":                                       1,
		"package p\n\nfunc f() {\n\t// " + text[4:] + "\n}\n":                 0,
		"package p\n\nfunc f() {\n\t// " + text[3:] + "\n}\n":                 1,
		"package p\n\nvar v = 1 // " + text + "\n":                            1,
		"//go:generate " + text + "\n//\t" + text + "\npackage p\n":           0,
		"package p\n\nvar v = \"" + text + text + "\"\n":                      0,
		"package p\n\n/*\n" + text + "\n" + text + text + "\n*/\nvar v int\n": 1,
	} {
		wide, err := wideComments("f.go", []byte(src))
		if err != nil || len(wide) != want {
			t.Errorf("%q: %v, %v; want %d", src, wide, err, want)
		}
		if slices.ContainsFunc(wide, func(line string) bool { return !strings.HasPrefix(line, "f.go:") }) {
			t.Errorf("%v", wide)
		}
	}
}
