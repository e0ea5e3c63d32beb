package history

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

type topOptions struct {
	*base
	output
	interval time.Duration
	count    int
	all      bool
	sortBy   string
	types    map[string]bool // nil for all
}

// topResult is the result of top.
type topResult struct {
	metav1.TypeMeta
	Items []usage `json:"items"`
}

// topOrders compare resources by a column; the largest is the first.
var topOrders = map[string]func(a, b usage) int{
	"name":     func(a, b usage) int { return 0 },
	"objects":  func(a, b usage) int { return cmp.Compare(b.Objects, a.Objects) },
	"bytes":    func(a, b usage) int { return cmp.Compare(b.Bytes, a.Bytes) },
	"lag":      func(a, b usage) int { return cmp.Compare(b.Lag, a.Lag) },
	"watchers": func(a, b usage) int { return cmp.Compare(b.Watchers, a.Watchers) },
	"reads":    func(a, b usage) int { return cmp.Compare(b.reads(), a.reads()) },
}

func (b *base) topCommand() *cobra.Command {
	o := &topOptions{base: b}
	cmd := &cobra.Command{
		Use:   "top [TYPE...]",
		Short: "Print objects, bytes, watchers and reads of each resource, live",
		Long: `Print the use of each resource in all namespaces, from /metrics of the server, which needs the right to get that path.

OBJECTS and BYTES are those in memory, as stored. LAG is the number of events that the slowest watch has not examined. Reads are GETs and
LISTs since the start of the server: MEMORY of the newest state, PAST of an older one in memory, ETCD of etcd. HIT is the part that
memory answered. READS/S is the rate since the last table. On a terminal, the table is printed again and again, until Ctrl-C.`,
		Example: `  {program} top
  {program} top pods configmaps
  {program} top --sort-by reads --interval 5s
  {program} top --count 1 -o json`,
		ValidArgsFunction: b.completeTypes,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	orders := slices.Sorted(maps.Keys(topOrders))
	cmd.Flags().DurationVar(&o.interval, "interval", 2*time.Second, "the time between two tables")
	cmd.Flags().IntVar(&o.count, "count", 0, "the number of tables; 0 is no limit on a terminal, otherwise 1")
	cmd.Flags().BoolVar(&o.all, "all", false, "print resources without objects and reads too")
	cmd.Flags().StringVar(&o.sortBy, "sort-by", "bytes", "the order: "+strings.Join(orders, ", "))
	_ = cmd.RegisterFlagCompletionFunc("sort-by", cobra.FixedCompletions(orders, cobra.ShellCompDirectiveNoFileComp))
	o.output.addFlag(cmd)
	return cmd
}

func (o *topOptions) run(ctx context.Context, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	order := topOrders[o.sortBy]
	if order == nil {
		return cli.Misusef("--sort-by %q does not exist: use one of %s", o.sortBy, strings.Join(slices.Sorted(maps.Keys(topOrders)), ", "))
	}
	if o.interval <= 0 {
		return cli.Misusef("--interval %v is not positive: give a duration, such as 2s", o.interval)
	}
	if o.flags.Namespace != nil && *o.flags.Namespace != "" {
		return cli.Misusef("--namespace %q: top counts the objects of all namespaces, as the server's metrics do; remove the flag", *o.flags.Namespace)
	}
	c, err := o.connect()
	if err != nil {
		return err
	}
	if len(args) > 0 {
		ts, err := c.targets([]string{strings.Join(args, ",")}, selection{})
		if err != nil {
			return err
		}
		o.types = map[string]bool{}
		for _, t := range ts {
			o.types[t.resource()] = true
		}
	}
	terminal := statusline.IsTerminal(o.Out)
	if o.count == 0 && !terminal {
		o.count = 1
	}
	ticker := time.NewTicker(o.interval)
	defer ticker.Stop()
	var before map[string]*usage
	for i := 1; ; i++ {
		shown := statusline.Start(o.ErrOut)
		shown.Next("reading /metrics of %s", c.config.Host)
		all, err := c.usage(ctx)
		shown.Stop()
		if err != nil {
			return err
		}
		if terminal && o.count != 1 && os.Getenv("TERM") != "dumb" {
			fmt.Fprint(o.Out, "\x1b[H\x1b[2J")
		}
		if err := o.printUsage(all, before, order); err != nil {
			return err
		}
		if before = all; i == o.count {
			return nil
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// usage returns the use of each resource.
func (c *client) usage(ctx context.Context) (map[string]*usage, error) {
	text, err := raw(c.rest.Get().AbsPath("/metrics").SetHeader("Accept", "text/plain").Do(ctx))
	if err != nil {
		return nil, fmt.Errorf("read /metrics of %s: %w", c.config.Host, err)
	}
	all, err := parseUsage(text)
	if err != nil {
		return nil, fmt.Errorf("read /metrics of %s: %w", c.config.Host, err)
	}
	return all, nil
}

// printUsage prints a table. before, if not nil, is the use an interval ago.
func (o *topOptions) printUsage(all, before map[string]*usage, order func(a, b usage) int) error {
	result := topResult{TypeMeta: typeOf("HistoryTop"), Items: []usage{}}
	for _, u := range all {
		if o.types == nil && (o.all || u.Objects+u.reads() > 0) || o.types[u.Resource] {
			result.Items = append(result.Items, *u)
		}
	}
	slices.SortFunc(result.Items, func(a, b usage) int { return cmp.Or(order(a, b), strings.Compare(a.Resource, b.Resource)) })
	t := &table{header: []string{"RESOURCE", "OBJECTS", "BYTES", "LAG", "WATCHERS", "MEMORY", "PAST", "ETCD", "HIT", "READS/S"}}
	var names []string
	for _, u := range result.Items {
		names = append(names, u.Resource)
		rate := "-"
		if last := before[u.Resource]; last != nil {
			rate = fmt.Sprintf("%.1f", float64(u.reads()-last.reads())/o.interval.Seconds())
		}
		colour := plain
		if u.Lag > 0 || u.Etcd > 0 {
			colour = yellow
		}
		size := bytesText(u.Bytes)
		if o.wide() {
			size = fmt.Sprint(u.Bytes)
		}
		t.add(colour, u.Resource, fmt.Sprint(u.Objects), size, fmt.Sprint(u.Lag), fmt.Sprint(u.Watchers),
			fmt.Sprint(u.Memory), fmt.Sprint(u.Past), fmt.Sprint(u.Etcd), u.hitRatio(), rate)
	}
	return o.output.print(o.Out, result, names, t)
}

// bytesText returns a number of bytes with a unit.
func bytesText(n int64) string {
	value, unit := float64(n), "B"
	for _, next := range []string{"KiB", "MiB", "GiB", "TiB"} {
		if value < 1024 {
			break
		}
		value, unit = value/1024, next
	}
	if unit == "B" {
		return fmt.Sprint(n)
	}
	return fmt.Sprintf("%.1f %s", value, unit)
}
