package history

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/printers"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/revisiontimes"
	"github.com/stratakube/strata/server/internal/cli"
)

type getOptions struct {
	*base
	selection
	at         moment
	print      *genericclioptions.PrintFlags
	noHeaders  bool
	showLabels bool
}

func (b *base) getCommand() *cobra.Command {
	o := &getOptions{base: b, print: genericclioptions.NewPrintFlags("")}
	cmd := &cobra.Command{
		Use:   "get TYPE[,TYPE...] [NAME...] | TYPE/NAME...",
		Short: "Print objects as they were",
		Long: `Print objects as they were at a time or a revision. Tables are made by the server; the column AGE is the age at that time.
Without --at and --at-revision, the objects are those of the newest revision.`,
		Example: `  {program} get pods -A --at 5m
  {program} get deployment/web --at 2026-01-02T15:04:05Z -o yaml
  {program} get configmaps -l app=web --at-revision 5310`,
		ValidArgsFunction: b.completeResources,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	momentFlags(cmd.Flags(), &o.at, "at", "read the state of the past")
	cmd.MarkFlagsMutuallyExclusive("at", "at-revision")
	o.selection.addFlags(cmd.Flags())
	o.print.AddFlags(cmd)
	cmd.Flags().BoolVar(&o.noHeaders, "no-headers", false, "print tables without headers")
	cmd.Flags().BoolVar(&o.showLabels, "show-labels", false, "print the labels as the last column of tables")
	if f := cmd.Flags().Lookup("output"); f != nil {
		f.Usage = "the form of the output: json, yaml, name, wide, jsonpath=..., go-template=..."
	}
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// snapshot is a target at one of its revisions.
type snapshot struct {
	target
	times    *revisiontimes.RevisionTimes
	revision int64
}

// at returns the targets at the revisions of a moment. Targets at a time have the same time.
func (c *client) at(ctx context.Context, ts []target, m *moment) ([]snapshot, error) {
	var all []snapshot
	for _, t := range ts {
		times, err := c.times(ctx, t)
		if err != nil {
			return nil, err
		}
		m.fix(times.Now)
		revision, err := m.in(t.resource(), times, times.Latest)
		if err != nil {
			return nil, err
		}
		all = append(all, snapshot{t, times, revision})
	}
	return all, nil
}

func (o *getOptions) run(ctx context.Context, args []string) error {
	format := *o.print.OutputFormat
	isTable := format == "" || format == "wide"
	var printer printers.ResourcePrinter
	if !isTable {
		var err error
		if printer, err = o.print.ToPrinter(); err != nil {
			return cli.Misusef("--output %q: %w", format, err)
		}
	}
	c, shown, err := o.begin()
	if err != nil {
		return err
	}
	defer shown.Stop()
	ts, err := c.targets(args, o.selection)
	if err != nil {
		return err
	}
	shown.Next("reading the history of %d resources", len(ts))
	snapshots, err := c.at(ctx, ts, &o.at)
	if err != nil {
		return err
	}
	if isTable {
		return o.printTables(ctx, c, snapshots, shown)
	}
	return o.printObjects(ctx, c, snapshots, shown, printer)
}

// notFound is the error of a name that did not exist.
func (s snapshot) notFound() error {
	return fmt.Errorf("%s not found%s at %s; `log %s` prints the revisions at which it existed",
		s.target, s.where(), stampOf(s.times, s.revision), s.target)
}

func (o *getOptions) printObjects(ctx context.Context, c *client, all []snapshot, shown *statusline.Steps, printer printers.ResourcePrinter) error {
	list := &unstructured.UnstructuredList{Object: map[string]any{"apiVersion": "v1", "kind": "List", "metadata": map[string]any{}}}
	for _, s := range all {
		shown.Next("reading %s at revision %d", s.target, s.revision)
		objects, err := c.objects(ctx, s.target, s.revision, shown)
		if err != nil {
			return err
		}
		if s.name != "" && len(objects) == 0 {
			return s.notFound()
		}
		for _, object := range objects {
			list.Items = append(list.Items, *object)
		}
	}
	shown.Stop()
	if len(all) == 1 {
		list.SetResourceVersion(fmt.Sprint(all[0].revision))
		if all[0].name != "" {
			return printer.PrintObj(&list.Items[0], o.Out)
		}
	}
	return printer.PrintObj(list, o.Out)
}

func (o *getOptions) printTables(ctx context.Context, c *client, all []snapshot, shown *statusline.Steps) error {
	// Several types are printed one after another; several names of a type, in one table.
	printed := 0
	for len(all) > 0 {
		n := 1
		for n < len(all) && all[n].resource() == all[0].resource() {
			n++
		}
		table, err := c.table(ctx, all[:n], shown)
		if err != nil {
			return err
		}
		several := n < len(all) || printed > 0
		if len(table.Rows) > 0 {
			shown.Stop()
			if printed > 0 {
				fmt.Fprintln(o.Out)
			}
			printer := printers.NewTablePrinter(printers.PrintOptions{
				Wide: *o.print.OutputFormat == "wide", NoHeaders: o.noHeaders, ShowLabels: o.showLabels,
				WithNamespace: all[0].namespace == "" && all[0].mapping.Scope.Name() == "namespace",
				WithKind:      several, Kind: all[0].mapping.GroupVersionKind.GroupKind(),
			})
			w := printers.GetNewTabWriter(o.Out)
			if err := printer.PrintObj(table, w); err != nil {
				return err
			}
			if err := w.Flush(); err != nil {
				return err
			}
			printed++
		}
		if len(all) == n && printed == 0 {
			_, err := fmt.Fprintf(o.ErrOut, "No resources found%s at %s.\n", all[0].where(), stampOf(all[0].times, all[0].revision))
			return err
		}
		all = all[n:]
	}
	return nil
}

// table returns the table of snapshots of one resource.
func (c *client) table(ctx context.Context, all []snapshot, shown *statusline.Steps) (*metav1.Table, error) {
	result := &metav1.Table{}
	for _, s := range all {
		shown.Next("reading %s at revision %d", s.target, s.revision)
		rows := 0
		err := c.list(ctx, s.target, s.revision, tableMedia+","+jsonMedia, func(data []byte) error {
			page := &metav1.Table{}
			if err := json.Unmarshal(data, page); err != nil || page.Kind != "Table" {
				return fmt.Errorf("list %s at revision %d: the server has no table of it; use -o json", s.target, s.revision)
			}
			if err := decodeRows(page); err != nil {
				return err
			}
			if len(result.ColumnDefinitions) == 0 {
				result.ColumnDefinitions = page.ColumnDefinitions
			}
			if t, ok := s.time(); ok {
				setAges(page, result.ColumnDefinitions, t)
			}
			result.Rows = append(result.Rows, page.Rows...)
			rows += len(page.Rows)
			countPage(shown, rows, page.RemainingItemCount)
			return nil
		})
		if err != nil {
			return nil, err
		}
		if s.name != "" && rows == 0 {
			return nil, s.notFound()
		}
	}
	return result, nil
}

// time returns the time of the snapshot, if it is known: for the newest revision it is now.
func (s snapshot) time() (time.Time, bool) {
	if s.revision == s.times.Latest {
		return s.times.Now, true
	}
	return s.times.TimeOf(s.revision)
}

// decodeRows decodes the metadata of the rows' objects.
func decodeRows(t *metav1.Table) error {
	for i := range t.Rows {
		if t.Rows[i].Object.Raw == nil {
			continue
		}
		object := &metav1.PartialObjectMetadata{}
		if err := json.Unmarshal(t.Rows[i].Object.Raw, object); err != nil {
			return fmt.Errorf("decode a row of a table: %w", err)
		}
		t.Rows[i].Object = runtime.RawExtension{Object: object}
	}
	return nil
}

// setAges replaces the ages of objects, which the server computes with the present time, by those
// at the time t.
func setAges(t *metav1.Table, columns []metav1.TableColumnDefinition, at time.Time) {
	age := slices.IndexFunc(columns, func(c metav1.TableColumnDefinition) bool { return strings.EqualFold(c.Name, "Age") })
	if age < 0 {
		return
	}
	for _, row := range t.Rows {
		object, ok := row.Object.Object.(*metav1.PartialObjectMetadata)
		if ok && age < len(row.Cells) && !object.CreationTimestamp.IsZero() {
			row.Cells[age] = duration.HumanDuration(max(0, at.Sub(object.CreationTimestamp.Time)))
		}
	}
}
