package main

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"
)

const committed = "../../docs/images/tour.svg"

// texts returns the texts of the rows of an image, and fails if it is not well-formed or has elements other than these few.
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

// TestRecording_Committed_HasTheSteps fails if the steps have changed since `make recording`.
func TestRecording_Committed_HasTheSteps(t *testing.T) {
	image, err := os.ReadFile(committed)
	if err != nil {
		t.Fatal(err)
	}
	if len(image) > 100<<10 {
		t.Errorf("%s has %d bytes", committed, len(image))
	}
	var commands []string
	for _, row := range texts(t, image) {
		if text, ok := strings.CutPrefix(row, "$ "); ok {
			commands = append(commands, text)
		}
	}
	var want []string
	for _, s := range steps {
		want = append(want, s.line)
	}
	if got, want := strings.Join(commands, "\n"), strings.Join(want, "\n"); got != want {
		t.Errorf("%s has the commands\n%s\nand the steps are\n%s\n(make recording)", committed, got, want)
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
