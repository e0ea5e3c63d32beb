// Package transcript keeps the sessions of a document true: it runs their commands, and compares
// the output with that of the document or writes it there.
//
// A session is a code block of the language console. Its commands are the lines that begin with "$
// ", and the lines up to the next command are the output of each. A word after the language names
// the terminal: "```console server".
package transcript

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

var (
	block   = regexp.MustCompile("(?s)```console ?([a-z]*)\n(.*?)```")
	command = regexp.MustCompile(`(?m)^\$ (.*)\n((?:[^$].*\n|\n)*)`)
)

// Command is a command of a document.
type Command struct {
	Terminal string // "" is the terminal without a name
	Line     string // without the prompt
	Want     string // its output in the document
}

// Document is a file with sessions, and the way to run them.
type Document struct {
	Path   string
	Update bool // write the output into the file, in place of a comparison

	// Run runs a command and returns its output. Commands run one after another, in the order of
	// the document.
	Run func(Command) string

	// Same reports whether an output differs from Command.Want in its variable parts only.
	Same func(c Command, got string) bool
}

// Check runs the commands of the document, of which there are at least atLeast. Each difference is
// an error, with the command that writes the document. An update leaves the document as it is if
// all outputs differ in variable parts only, and writes all of them otherwise: the outputs of a
// document are those of one run.
func (d Document) Check(t *testing.T, atLeast int) {
	t.Helper()
	text, err := os.ReadFile(d.Path)
	if err != nil {
		t.Fatal(err)
	}
	commands, differs := 0, false
	result := block.ReplaceAllFunc(text, func(session []byte) []byte {
		terminal := string(block.FindSubmatch(session)[1])
		return command.ReplaceAllFunc(session, func(part []byte) []byte {
			match := command.FindSubmatch(part)
			c := Command{Terminal: terminal, Line: string(match[1]), Want: string(match[2])}
			commands++
			out := d.Run(c)
			if out != "" && !strings.HasSuffix(out, "\n") {
				out += "\n" // as the prompt of a terminal
			}
			same := d.Same(c, out)
			differs = differs || !same
			if !same && !d.Update {
				t.Errorf("%s prints\n%s\nand %s has\n%s\n(go test -run %s -update writes it)", c.Line, out, d.Path, c.Want, t.Name())
			}
			return []byte("$ " + c.Line + "\n" + out)
		})
	})
	if commands < atLeast {
		t.Errorf("%s has %d commands only", d.Path, commands)
	}
	if d.Update && differs && !t.Failed() {
		if err := os.WriteFile(d.Path, result, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// variable are the parts of an output that differ between two runs, with their replacements.
var variable = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`), "TIME"},
	{regexp.MustCompile(`https://127\.0\.0\.1:\d+`), "URL"},
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}`), "UID"},
	{regexp.MustCompile(`\b\d+(ms|s|m\d+s|m|h)\b`), "AGE"},
	{regexp.MustCompile(`\b(revision|to) \d+\b`), "$1 N"},
	{regexp.MustCompile(`\b\d{2,}\b`), "N"},
	{regexp.MustCompile(` +`), " "},
}

// progress are the status lines of strata history, which work of two seconds shows.
var progress = regexp.MustCompile(`(?m)^((discovering|reading) .*|.* so far), (\d+h)?(\d+m)?\d+s\n`)

// WithoutProgress removes the status lines that a command shows on a slow machine.
func WithoutProgress(text string) string { return progress.ReplaceAllString(text, "") }

// Invariable removes status lines, replaces times, URLs of loopback, UIDs, ages, revisions and
// numbers of two or more digits by their names, and columns of spaces by one.
func Invariable(text string) string {
	text = WithoutProgress(text)
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.with)
	}
	return text
}

// numbers are those of a table of figures, with their units.
var numbers = regexp.MustCompile(`[0-9N.]+( [KM]iB|%)?`)

// WithoutNumbers is Invariable that replaces every number, with its unit.
func WithoutNumbers(text string) string {
	return strings.Join(strings.Fields(numbers.ReplaceAllString(Invariable(text), "N")), " ")
}
