package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const committed = "../../docs/images/tour.svg"

// texts returns the texts of the rows of an image, and fails if it is not well-formed or has
// elements other than these few.
func texts(t *testing.T, image []byte) (rows []string) {
	t.Helper()
	known := map[string]bool{"svg": true, "style": true, "rect": true, "circle": true, "clipPath": true, "g": true, "text": true, "tspan": true}
	in := false
	for decoder := xml.NewDecoder(bytes.NewReader(image)); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return rows
		} else if err != nil {
			t.Fatal(err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			if !known[token.Name.Local] {
				t.Fatalf("element %s", token.Name.Local)
			}
			if token.Name.Local == "text" {
				rows, in = append(rows, ""), true
			}
		case xml.EndElement:
			in = in && token.Name.Local != "text"
		case xml.CharData:
			if in {
				rows[len(rows)-1] += string(token)
			}
		}
	}
}

// recorded are the commands of the committed recording, with the lines of their output that are not
// empty.
func recorded(t *testing.T) (commands []string, output [][]string) {
	t.Helper()
	image, err := os.ReadFile(committed)
	if err != nil {
		t.Fatal(err)
	}
	if len(image) > 100<<10 {
		t.Errorf("%s has %d bytes", committed, len(image))
	}
	full := false // the row before has all columns: its line continues in the next row
	for _, row := range texts(t, image) {
		if text, ok := strings.CutPrefix(row, "$ "); ok {
			commands, output = append(commands, text), append(output, nil)
			full = false
			continue
		}
		if len(output) == 0 {
			t.Fatalf("%s begins with output: %s", committed, row)
		}
		lines := &output[len(output)-1]
		if full {
			(*lines)[len(*lines)-1] += row
		} else {
			*lines = append(*lines, row)
		}
		full = len([]rune(row)) == columns
	}
	return commands, output
}

// TestRecording_Committed_HasTheSteps fails if the steps have changed since `make recording`.
func TestRecording_Committed_HasTheSteps(t *testing.T) {
	commands, _ := recorded(t)
	var want []string
	for _, s := range steps {
		want = append(want, s.line)
	}
	if got, want := strings.Join(commands, "\n"), strings.Join(want, "\n"); got != want {
		t.Errorf("%s has the commands\n%s\nand the steps are\n%s\n(make recording)", committed, got, want)
	}
}

// shapes are the lines of the output of each step but the first, whose shape is in the tour.
var shapes = map[string][]string{
	"strata kubectl create deployment hello --image=hello --replicas=3": {`deployment\.apps/hello created`},
	"strata kubectl get pods":                    {`NAME +READY +STATUS +RESTARTS +AGE`, pod, pod, pod},
	"strata kubectl delete deployment hello":     {`deployment\.apps "hello" deleted from default namespace`},
	"strata history get pods --at 5s":            {`NAME +READY +STATUS +RESTARTS +AGE`, pod, pod, pod},
	"strata history diff deployments --since 7s": {`CHANGE +NAMESPACE +OBJECT +REVISION +TIME +FIELD +BEFORE +AFTER`, `deleted +default +deployment\.apps/hello +\d+ +\S+Z`},
}

const pod = `hello-[0-9a-z]+-[0-9a-z]{5} +1/1 +Running +0 +\d+s`

// variable are the parts of the first output that differ between two runs.
var variable = []struct{ pattern, with string }{
	{`^ +\d+\.\d\ds`, "SECONDS"}, {`https://127\.0\.0\.1:\d+`, "URL"}, {`#token=[\w-]{43}`, "#token=TOKEN"},
}

// shapeOf returns lines without empty lines, progress and variable parts, sorted: the parts of
// strata up get ready in any order.
func shapeOf(lines []string) (shape []string) {
	for _, line := range lines {
		for _, v := range variable {
			line = regexp.MustCompile(v.pattern).ReplaceAllString(line, v.with)
		}
		if line = strings.TrimRight(line, " "); line != "" && !strings.Contains(line, "not ready yet") {
			shape = append(shape, line)
		}
	}
	slices.Sort(shape)
	return shape
}

// TestRecording_Committed_HasTheOutputOfTour fails if the output of the steps has changed since
// `make recording`. The first start in docs/tour.md, which a test of the server compares with a
// run, is the shape of the recorded one.
func TestRecording_Committed_HasTheOutputOfTour(t *testing.T) {
	tour, err := os.ReadFile("../../docs/tour.md")
	if err != nil {
		t.Fatal(err)
	}
	start := regexp.MustCompile("(?s)```console server\n\\$ strata up [^\n]*--nodes=2\n(.*?)```").FindSubmatch(tour)
	if start == nil {
		t.Fatal("docs/tour.md has no start of strata up")
	}
	commands, output := recorded(t)
	gone := false // the deployment was deleted: there are no pods
	for i, command := range commands {
		want, ok := shapes[command]
		switch {
		case strings.HasPrefix(command, "strata up "):
			if got, want := strings.Join(shapeOf(output[i]), "\n"), strings.Join(shapeOf(strings.Split(string(start[1]), "\n")), "\n"); got != want {
				t.Errorf("%s of the recording prints\n%s\nand of the tour\n%s\n(make recording)", command, got, want)
			}
			continue
		case !ok:
			t.Errorf("%s has no shape", command)
			continue
		case gone && command == "strata kubectl get pods":
			want = []string{`No resources found in default namespace\.`}
		}
		gone = gone || strings.Contains(command, " delete ")
		pattern := `^` + strings.Join(want, ` *\n`) + ` *$`
		if got := strings.Join(output[i], "\n"); !regexp.MustCompile(pattern).MatchString(got) {
			t.Errorf("%s of the recording prints\n%s\nwant\n%s\n(make recording)", command, got, pattern)
		}
	}
}

func TestTerminal_RedrawnLine_HasItsLastText(t *testing.T) {
	terminal := &terminal{changed: make(chan struct{}), lines: []line{{}}}
	for _, part := range []string{"first\r", "\nloading 1", "\r\x1b[Kloading 2", "\r", "\x1b[Kready\r\n", "last\r\n"} {
		if _, err := terminal.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for _, l := range terminal.lines {
		got = append(got, strings.TrimRight(l.text, "\r"))
	}
	if got, want := strings.Join(got, "|"), "first|\x1b[Kready|last|"; got != want {
		t.Errorf("lines %q, want %q", got, want)
	}
}

func TestPicture_LongColoredOutput_IsWrappedAndScrolled(t *testing.T) {
	p := picture{loop: 10 * time.Second, columns: 10, rows: 3, commands: []command{{
		text: "a <b", shown: time.Second, typed: 2 * time.Second,
		output: []line{{at: 3 * time.Second, text: "\x1b[32m0123456789é\x1b[0m&"}, {at: 4 * time.Second, text: "end\x1b[K"}, {at: 5 * time.Second}},
	}}}
	image := p.svg()
	if got, want := strings.Join(texts(t, image), "|"), "$ a <b|0123456789|é&|end"; got != want {
		t.Errorf("rows %q, want %q", got, want)
	}
	for _, want := range []string{
		`<tspan style="fill:#7ee787">é</tspan>&amp;`,
		"40%{transform:translateY(-19px)}50%{transform:translateY(-38px)}",
		"0%{visibility:hidden}30%{visibility:visible}",
	} {
		if !bytes.Contains(image, []byte(want)) {
			t.Errorf("no %s in\n%s", want, image)
		}
	}
}
