// Package contract runs the tests of etcdsource/contracttest on each store that Strata is tested
// with, and compares the answers with the matrix in docs/etcd-contract.md. With -update it writes
// the columns of the stores that are present.
package contract

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/etcdsource/contracttest"
	"github.com/stratakube/strata/test/harness"
)

const testTimeout = 10 * time.Minute

var update = flag.Bool("update", false, "write the matrix of docs/etcd-contract.md")

// stores are the columns of the matrix. kine and the etcd with the bug of progress are skipped
// where they are missing; make etcd-contract requires them. Stock etcds are built if needed: half a
// minute.
var stores = []struct {
	name string
	open func(*testing.T, *harness.Env) *harness.Etcd
}{
	{"etcd 3.4", func(t *testing.T, e *harness.Env) *harness.Etcd {
		path, _ := harness.OldEtcd(t)
		return e.ProgramEtcd(path)
	}},
	{"etcd 3.5", func(t *testing.T, e *harness.Env) *harness.Etcd { return e.StockEtcd(t, "3.5") }},
	{"etcd 3.6", func(t *testing.T, e *harness.Env) *harness.Etcd { return e.StockEtcd(t, "3.6") }},
	{"etcd 3.7", func(_ *testing.T, e *harness.Env) *harness.Etcd { return e.Etcd() }},
	{"kine", func(t *testing.T, e *harness.Env) *harness.Etcd { return e.Kine(t) }},
}

const document = "../../../../docs/etcd-contract.md"

// TestStores_Answers_EqualMatrix: each store answers each requirement as the matrix says.
func TestStores_Answers_EqualMatrix(t *testing.T) {
	text, err := os.ReadFile(document)
	harness.Check(t, err)
	m, err := parse(string(text))
	harness.Check(t, err)
	checkRequirements(t, string(text), m)
	answered := map[string]map[string]string{} // by store and requirement
	t.Run("stores", func(t *testing.T) {
		for _, store := range stores {
			answers := map[string]string{}
			answered[store.name] = answers
			t.Run(store.name, func(t *testing.T) {
				env := harness.New(t)
				etcd := store.open(t, env)
				s := &contracttest.Store{Client: etcd.Client(), Other: etcd.Client(), Prefix: "/registry/contract/"}
				for _, r := range contracttest.Requirements() {
					t.Run(r.ID, func(t *testing.T) {
						answer, err := r.Test(harness.Context(t, testTimeout), s)
						if err != nil {
							t.Fatalf("%s, %s: %v", r.ID, r.Name, err)
						}
						answers[r.ID] = string(answer)
						if want := m.cell(r.ID, store.name); !*update && string(answer) != want {
							t.Errorf("%s, %s: %q; docs/etcd-contract.md says %q", r.ID, r.Name, answer, want)
						}
					})
				}
			})
		}
	})
	if *update && !t.Failed() {
		harness.Check(t, os.WriteFile(document, []byte(m.with(string(text), answered)), 0o644))
	}
}

// checkRequirements fails unless the document has a row for every requirement, in both tables, with
// its name.
func checkRequirements(t *testing.T, text string, m *matrix) {
	t.Helper()
	var ids []string
	for _, r := range contracttest.Requirements() {
		ids = append(ids, r.ID)
		if row := fmt.Sprintf("\n| **%s** | %s |", r.ID, r.Name); !strings.Contains(text, row) {
			t.Errorf("docs/etcd-contract.md has no row %q", strings.TrimSpace(row))
		}
	}
	if !slices.Equal(m.ids, ids) {
		t.Errorf("the matrix has the rows %v, want %v", m.ids, ids)
	}
	var names []string
	for _, s := range stores {
		names = append(names, s.name)
	}
	if !slices.Equal(m.stores, names) {
		t.Errorf("the matrix has the columns %v, want %v", m.stores, names)
	}
}

// matrix is the table of the document between its two marks.
type matrix struct {
	stores, ids []string
	cells       map[string][]string // by requirement, in the order of the stores
}

const begin, end = "<!-- tested: answers of the stores -->\n", "<!-- end of answers -->"

// parse reads the matrix.
func parse(text string) (*matrix, error) {
	_, table, ok := strings.Cut(text, begin)
	table, _, closed := strings.Cut(table, end)
	lines := strings.Split(strings.TrimSpace(table), "\n")
	if !ok || !closed || len(lines) < 3 {
		return nil, fmt.Errorf("docs/etcd-contract.md has no table between %q and %q", strings.TrimSpace(begin), end)
	}
	m := &matrix{stores: cells(lines[0])[1:], cells: map[string][]string{}}
	for _, line := range lines[2:] {
		row := cells(line)
		if len(row) != len(m.stores)+1 {
			return nil, fmt.Errorf("row %q has %d cells, want %d", line, len(row), len(m.stores)+1)
		}
		m.ids = append(m.ids, row[0])
		m.cells[row[0]] = row[1:]
	}
	return m, nil
}

// cells returns the cells of a row.
func cells(line string) (row []string) {
	for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
		row = append(row, strings.TrimSpace(cell))
	}
	return row
}

// cell returns the answer of a store, "" if there is none.
func (m *matrix) cell(id, store string) string {
	if i := slices.Index(m.stores, store); i >= 0 && i < len(m.cells[id]) {
		return m.cells[id][i]
	}
	return ""
}

// with returns the text with the answers in place of those of the matrix.
func (m *matrix) with(text string, answered map[string]map[string]string) string {
	table := "| | " + strings.Join(m.stores, " | ") + " |\n|" + strings.Repeat(" --- |", len(m.stores)+1) + "\n"
	for _, r := range contracttest.Requirements() {
		row := []string{r.ID}
		for _, store := range m.stores {
			answer, ok := answered[store][r.ID]
			if !ok {
				answer = m.cell(r.ID, store)
			}
			row = append(row, answer)
		}
		table += "| " + strings.Join(row, " | ") + " |\n"
	}
	before, rest, _ := strings.Cut(text, begin)
	_, after, _ := strings.Cut(rest, end)
	return before + begin + table + end + after
}

func TestMain(m *testing.M) { harness.Main(m, func(*harness.Env) {}) }
