package main

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// picture is a recording as an image: a window with columns and rows of text, in which all lines
// have their places from the beginning and become visible at their times, while the text moves up.
// It has its own background, so that it can be read on a light page and on a dark one.
type picture struct {
	commands      []command
	loop          time.Duration
	columns, rows int
}

// Sizes in pixels. A character of the usual monospaced fonts has 0.6 of the font's size; textLength
// makes it so for all.
const (
	fontSize   = 14
	charWidth  = 8.4
	lineHeight = 19
	margin     = 14
	titleBar   = 28
)

// colors are those of the foreground, by the number of the escape sequence.
var colors = map[string]string{"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#a5d6ff"}

const style = `text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;fill:#e6edf3;white-space:pre}
.c{font-weight:600}.p{fill:#7ee787}.k{visibility:hidden}
@media (prefers-reduced-motion:reduce){*{animation:none!important}}
`

// drawing collects the elements of an image.
type drawing struct {
	picture
	styles, text bytes.Buffer
	row          int
	scrolled     []string          // frames of the text, which moves up
	names        map[string]string // of animations, by their frames
}

// svg returns the image.
func (p picture) svg() []byte {
	d := &drawing{picture: p, names: map[string]string{}}
	for _, c := range p.commands {
		d.command(c)
		for _, l := range c.output {
			for _, part := range wrap(l.text, p.columns) {
				markup, length := spans(part)
				d.line(markup, length, l.at)
			}
		}
	}
	width, height := float64(p.columns)*charWidth+2*margin, float64(titleBar+p.rows*lineHeight+margin)
	if up := d.row - p.rows; up > 0 {
		fmt.Fprintf(&d.styles, "#s{transform:translateY(-%dpx);animation:s %gs step-end infinite}\n@keyframes s{0%%{transform:none}%s}\n", up*lineHeight, p.loop.Seconds(), strings.Join(d.scrolled, ""))
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" role="img" aria-label="Recording of a terminal">`+"\n", width, height, width, height)
	fmt.Fprintf(&out, "<style>\n%s%s</style>\n", style, d.styles.Bytes())
	fmt.Fprintf(&out, `<rect x=".5" y=".5" width="%g" height="%g" rx="8" fill="#0d1117" stroke="#6e7681"/>`+"\n", width-1, height-1)
	for i, color := range []string{"#ff5f57", "#febc2e", "#28c840"} {
		fmt.Fprintf(&out, `<circle cx="%d" cy="%d" r="5" fill="%s"/>`, margin+6+18*i, titleBar/2, color)
	}
	fmt.Fprintf(&out, "\n"+`<clipPath id="w"><rect x="%d" y="%d" width="%g" height="%d"/></clipPath>`+"\n", margin, titleBar, width-2*margin, p.rows*lineHeight+4)
	fmt.Fprintf(&out, "<g clip-path=\"url(#w)\"><g id=\"s\">\n%s</g></g>\n</svg>\n", d.text.Bytes())
	return out.Bytes()
}

// command draws the prompt and a command that is typed: a cover over it moves right, with the
// cursor at its left edge.
func (d *drawing) command(c command) {
	if d.row > 0 {
		d.row++ // an empty line between the commands
	}
	y := d.row
	n := len(c.text)
	d.line(`<tspan class="p">$ </tspan><tspan class="c">`+escape(c.text)+`</tspan>`, 2+n, c.shown)
	frames := fmt.Sprintf("%s{transform:none;visibility:visible;animation-timing-function:steps(%d)}%s{transform:translateX(%gpx);visibility:hidden}",
		d.percent(c.shown), n, d.percent(c.typed), float64(n)*charWidth)
	name := d.animation("0%{visibility:hidden;animation-timing-function:step-end}"+frames, "linear")
	x, top := margin+2*charWidth, float64(titleBar+y*lineHeight)
	fmt.Fprintf(&d.text, `<g class="k %s"><rect x="%g" y="%g" width="%g" height="%d" fill="#0d1117"/><rect x="%g" y="%g" width="8" height="%d" fill="#e6edf3"/></g>`+"\n",
		name, x, top+1, float64(n)*charWidth+2, lineHeight, x, top+3, lineHeight-4)
}

// line draws a row of markup with a number of characters, which appears at a time.
func (d *drawing) line(markup string, length int, at time.Duration) {
	if length > 0 {
		name := d.animation(fmt.Sprintf("0%%{visibility:hidden}%s{visibility:visible}", d.percent(at)), "step-end")
		fmt.Fprintf(&d.text, `<text class="%s" x="%d" y="%d" textLength="%.1f" xml:space="preserve">%s</text>`+"\n",
			name, margin, titleBar+d.row*lineHeight+fontSize, float64(length)*charWidth, markup)
	}
	d.row++
	if up := d.row - d.rows; up > 0 {
		d.scrolled = append(d.scrolled, fmt.Sprintf("%s{transform:translateY(-%dpx)}", d.percent(at), up*lineHeight))
	}
}

// percent returns a time as a part of the loop.
func (d *drawing) percent(at time.Duration) string {
	return fmt.Sprintf("%.4g%%", 100*at.Seconds()/d.loop.Seconds())
}

// animation returns the class with these frames.
func (d *drawing) animation(frames, timing string) string {
	name := d.names[frames]
	if name == "" {
		name = fmt.Sprintf("a%d", len(d.names))
		d.names[frames] = name
		fmt.Fprintf(&d.styles, ".%s{animation:%s %gs %s infinite}@keyframes %s{%s}\n", name, name, d.loop.Seconds(), timing, name, frames)
	}
	return name
}

var sequence = regexp.MustCompile("\x1b\\[([0-9;]*)([A-Za-z])")

// wrap splits a line into parts of at most n characters, escape sequences aside, as a terminal
// does.
func wrap(text string, n int) (parts []string) {
	color, length := "", 0
	var part strings.Builder
	for len(text) > 0 {
		if m := sequence.FindString(text); m != "" && strings.HasPrefix(text, m) {
			part.WriteString(m)
			color, text = m, text[len(m):]
			continue
		}
		r := []rune(text)[0]
		if length == n {
			parts = append(parts, part.String())
			part.Reset()
			part.WriteString(color)
			length = 0
		}
		part.WriteRune(r)
		text, length = text[len(string(r)):], length+1
	}
	return append(parts, part.String())
}

// spans returns a line with escape sequences as markup, and the number of its characters. Sequences
// other than colors are left out.
func spans(text string) (markup string, length int) {
	var out strings.Builder
	color := ""
	add := func(plain string) {
		length += len([]rune(plain))
		switch {
		case plain == "":
		case color == "":
			out.WriteString(escape(plain))
		default:
			fmt.Fprintf(&out, `<tspan style="fill:%s">%s</tspan>`, color, escape(plain))
		}
	}
	for {
		at := sequence.FindStringSubmatchIndex(text)
		if at == nil {
			add(text)
			return out.String(), length
		}
		add(text[:at[0]])
		if text[at[4]:at[5]] == "m" {
			color = colors[text[at[2]:at[3]]]
		}
		text = text[at[1]:]
	}
}

func escape(text string) string {
	var out bytes.Buffer
	_ = xml.EscapeText(&out, []byte(text)) // a buffer does not fail
	return out.String()
}
