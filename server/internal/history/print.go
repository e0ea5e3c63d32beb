package history

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

// apiVersion is that of the results that -o json and -o yaml print.
const apiVersion = "stratakube.io/v1alpha1"

func typeOf(kind string) metav1.TypeMeta { return metav1.TypeMeta{Kind: kind, APIVersion: apiVersion} }

// Colours of rows, in the order of the terminal's codes.
const (
	plain  = ""
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	reset  = "\x1b[0m"
)

// colourOf is the colour of a change.
func colourOf(change string) string {
	switch change {
	case added, created:
		return green
	case deleted:
		return red
	}
	return yellow
}

// cellWidth bounds the cells of values in a table that is not wide.
const cellWidth = 48

// table is printed with columns that are as wide as their contents.
type table struct {
	header []string
	rows   []row
}

type row struct {
	colour string
	cells  []string
}

func (t *table) add(colour string, cells ...string) { t.rows = append(t.rows, row{colour, cells}) }

// print writes the table. Rows have colours if colours is set.
func (t *table) print(w io.Writer, colours bool) error {
	_, err := io.WriteString(w, strings.Join(t.lines(colours), "\n")+"\n")
	return err
}

// lines returns the lines of the table, of which the first is the header.
func (t *table) lines(colours bool) []string {
	rows := append([]row{{cells: t.header}}, t.rows...)
	widths := make([]int, len(t.header))
	for _, r := range rows {
		for i, cell := range r.cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	lines := make([]string, len(rows))
	for i, r := range rows {
		var line strings.Builder
		for i, cell := range r.cells {
			line.WriteString(cell + strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell)+3))
		}
		lines[i] = strings.TrimRight(line.String(), " ")
		if colours && r.colour != plain {
			lines[i] = r.colour + lines[i] + reset
		}
	}
	return lines
}

// cell returns a text without control characters, shortened to cellWidth unless the table is wide.
func cell(text string, wide bool) string {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, text)
	if runes := []rune(text); !wide && len(runes) > cellWidth {
		return string(runes[:cellWidth-1]) + "…"
	}
	return text
}

// colours reports whether output to w has colours: on a terminal only, and not if the user has
// turned them off.
func colours(w io.Writer) bool {
	return statusline.IsTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// output is the flag -o of commands whose results are not objects.
type output struct{ format string }

var formats = []string{"json", "yaml", "name", "wide"}

func (o *output) addFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&o.format, "output", "o", "", "the form of the output: json, yaml, name or wide")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

func (o *output) check() error {
	if o.format != "" && !slices.Contains(formats, o.format) {
		return cli.Misusef("--output %q does not exist: use one of %s", o.format, strings.Join(formats, ", "))
	}
	return nil
}

func (o *output) wide() bool { return o.format == "wide" }

// print writes a result: as JSON or YAML, the names only, or the table.
func (o *output) print(w io.Writer, result any, names []string, t *table) error {
	switch o.format {
	case "json":
		data, err := json.MarshalIndent(result, "", "    ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s\n", data)
		return err
	case "yaml":
		data, err := yaml.Marshal(result)
		if err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	case "name":
		for _, name := range names {
			if _, err := fmt.Fprintln(w, name); err != nil {
				return err
			}
		}
		return nil
	}
	return t.print(w, colours(w))
}

// completionContext bounds the requests of a completion.
func completionContext() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	context.AfterFunc(ctx, cancel)
	return ctx
}
