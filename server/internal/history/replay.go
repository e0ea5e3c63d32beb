package history

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/yaml"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/server/internal/cli"
)

type replayOptions struct {
	*base
	selection
	output
	since, until moment
	speed        speed
	serve        bool
	address      string
	kubeconfig   string
}

func (b *base) replayCommand() *cobra.Command {
	o := &replayOptions{base: b, speed: 1}
	cmd := &cobra.Command{
		Use:   "replay [TYPE[,TYPE...] [NAME...]]",
		Short: "Replay the events of the window, to the terminal or as a server",
		Long: `Replay the events of the window at their times, or faster. Without types, those of all resources that you may list and watch, except for
events and leases.

With --serve, a server on this machine has the state of the replayed time: GET, LIST and WATCH of all resources, with your rights, and
nothing else: it refuses writes. It prints a kubeconfig for it, with which kubectl, informers and other clients work. The replay stops at
the end of the window, and the server with Ctrl-C.`,
		Example: `  {program} replay pods -A --since 10m --speed 10x
  {program} replay --since 1h --until 30m --speed max -o json
  {program} replay --since 10m --serve
  {program} replay --since 10m --speed 0x --serve       the state of ten minutes ago, standing still`,
		ValidArgsFunction: b.completeResources,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	windowFlags(cmd, &o.since, &o.until)
	o.selection.addFlags(cmd.Flags())
	o.output.addFlag(cmd)
	cmd.Flags().Var(&o.speed, "speed", "how much faster than it happened: 10x, 0.5x, 0x (standing still), or max")
	_ = cmd.RegisterFlagCompletionFunc("speed", cobra.FixedCompletions([]string{"1x", "10x", "100x", "max"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().BoolVar(&o.serve, "serve", false, "serve the state of the replayed time, read-only, on this machine")
	cmd.Flags().StringVar(&o.address, "listen", "127.0.0.1:0", "the loopback address of --serve; port 0 is a free one")
	cmd.Flags().StringVar(&o.kubeconfig, "write-kubeconfig", "", "a new file for the kubeconfig of --serve (a temporary file)")
	return cmd
}

func (o *replayOptions) run(ctx context.Context, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	if o.speed == 0 && !o.serve {
		return cli.Misusef("--speed 0x prints nothing: give a factor such as 10x, or --serve")
	}
	if o.serve {
		if _, err := loopback(o.address); err != nil {
			return err
		}
	}
	c, shown, err := o.begin()
	if err != nil {
		return err
	}
	defer shown.Stop()
	all := len(args) == 0
	var ts []target
	if all {
		ts, err = c.everything(o.selection)
	} else {
		ts, err = c.targets(args, o.selection)
	}
	if err != nil {
		return err
	}
	shown.Next("reading the history of %d resources", len(ts))
	windows, err := c.commonWindows(ctx, ts, &o.since, &o.until, all)
	if err != nil {
		return err
	}
	clock := newClock(windows[0], o.since.time, o.speed)
	if o.serve {
		shown.Stop()
		return o.serveReplay(ctx, c, windows[0], clock)
	}
	events, err := c.collect(ctx, windows, shown)
	if err != nil {
		return err
	}
	shown.Stop()
	return o.printReplay(ctx, windows[0], events, clock)
}

// replayEvent is an event as -o json and -o yaml print it: an event of a watch with its revision
// and its time.
type replayEvent struct {
	Type string `json:"type"`
	stamp
	Object map[string]any `json:"object"`
}

// printReplay prints events at their times.
func (o *replayOptions) printReplay(ctx context.Context, w window, events []recorded, clock *clock) error {
	fmt.Fprintf(o.ErrOut, "%s from %s to %s, at %s.\n", count(len(events), "event"), stampOf(w.times, w.from), stampOf(w.times, w.to), o.speed.String())
	if len(events) == 0 {
		return nil
	}
	// The columns have the widths of all events, because they are printed one by one.
	t := &table{header: []string{"TIME", "REVISION", "EVENT", "NAMESPACE", "OBJECT"}}
	for _, e := range events {
		change := map[string]string{"ADDED": added, "DELETED": deleted}[e.kind]
		t.add(colourOf(change), stampOf(w.times, e.revision).when(), fmt.Sprint(e.revision), e.kind, e.object.GetNamespace(), e.target.kind()+"/"+e.object.GetName())
	}
	lines := t.lines(colours(o.Out))
	if o.format == "" || o.wide() {
		fmt.Fprintln(o.Out, lines[0])
	}
	for i, e := range events {
		if err := clock.wait(ctx, e.revision); err != nil {
			return err
		}
		if err := o.printEvent(e, stampOf(w.times, e.revision), lines[i+1]); err != nil {
			return err
		}
	}
	return nil
}

func (o *replayOptions) printEvent(e recorded, at stamp, line string) error {
	event := replayEvent{e.kind, at, e.object.Object}
	switch o.format {
	case "json":
		return json.NewEncoder(o.Out).Encode(event)
	case "yaml":
		data, err := yaml.Marshal(event)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(o.Out, "---\n%s", data)
		return err
	case "name":
		line = e.target.kind() + "/" + e.object.GetName()
	}
	_, err := fmt.Fprintln(o.Out, line)
	return err
}

// serveReplay serves the state of the replayed time until ctx ends.
func (o *replayOptions) serveReplay(ctx context.Context, c *client, w window, clock *clock) error {
	server, err := newPastServer(c, clock, o.address)
	if err != nil {
		return err
	}
	path, remove, err := server.writeKubeconfig(o.kubeconfig, c.namespace)
	if err != nil {
		server.listener.Close()
		return err
	}
	defer remove()
	fmt.Fprintf(o.ErrOut, "Serving %s, read-only, from %s to %s at %s. Stop it with Ctrl-C. In another terminal:\n\n  export KUBECONFIG=%s\n\n",
		c.config.Host, stampOf(w.times, w.from), stampOf(w.times, w.to), o.speed.String(), path)
	fmt.Fprintln(o.Out, path)
	return server.run(ctx, time.Second)
}

// parallelReads bounds the resources that are read at once. Most reads wait for a bookmark.
const parallelReads = 24

// recorded is an event of a window.
type recorded struct {
	window
	event
	at time.Time // zero if the server does not know it
}

// commonWindows returns the windows of the targets, with the same revisions. With skip, targets
// without history, or that the user may not list, are left out, with a note.
func (c *client) commonWindows(ctx context.Context, ts []target, since, until *moment, skip bool) ([]window, error) {
	found := make([]*window, len(ts))
	forbidden := make([]string, len(ts))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(parallelReads)
	for i, t := range ts {
		group.Go(func() error {
			times, err := c.times(groupCtx, t)
			if skip && apierrors.IsForbidden(err) {
				forbidden[i] = t.resource()
				return nil
			}
			if skip && (errors.Is(err, errNoHistory) || apierrors.IsNotFound(err) || apierrors.IsMethodNotSupported(err)) {
				fmt.Fprintf(c.errOut, "Left out: %s\n", message(err, checkServer))
				return nil
			}
			found[i] = &window{target: t, times: times}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	var all []window
	for _, w := range found {
		if w != nil {
			all = append(all, *w)
		}
	}
	left := slices.Sorted(slices.Values(slices.DeleteFunc(forbidden, func(name string) bool { return name == "" })))
	switch {
	case len(all) == 0 && len(left) > 0:
		return nil, fmt.Errorf("read the history of %d resources: the user may list none of them at %s; name resources that the user may list and watch", len(ts), c.config.Host)
	case len(all) == 0:
		return nil, fmt.Errorf("read the history of %d resources: %w of any of them at %s; use a server of `strata apiserver` or `strata up`", len(ts), errNoHistory, c.config.Host)
	case len(left) > 0:
		fmt.Fprintf(c.errOut, "Left out, because the user may not list them: %s\n", strings.Join(left, ", "))
	}
	named := func(i int) string { // the resource of a message: one that the user has named
		if skip {
			return "the resources"
		}
		return all[i].resource()
	}
	oldest := slices.MaxFunc(all, func(a, b window) int { return int(a.times.Oldest - b.times.Oldest) }).times.Oldest
	from, to, capped, err := span(named(0), all[0].times, oldest, since, until)
	if err != nil {
		return nil, err
	}
	if capped {
		since.noteCapped(c.errOut, "the resources", stampOf(all[0].times, from))
		since.time = time.Time{} // a replay begins with the first time that the server knows
	}
	for i := range all {
		if from < all[i].times.Oldest {
			return nil, fmt.Errorf("read %s from %s: %w", named(i), stampOf(all[0].times, from), all[i].times.Check(from))
		}
		all[i].from, all[i].to = from, to
	}
	return all, nil
}

// collect returns the events of windows with common revisions, in order.
func (c *client) collect(ctx context.Context, windows []window, shown *statusline.Steps) ([]recorded, error) {
	shown.Next("reading the events of %d resources after revision %d", len(windows), windows[0].from)
	events := make([][]recorded, len(windows))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(parallelReads)
	for i, w := range windows {
		group.Go(func() error {
			return c.events(ctx, w.target, w.from, w.to, func(e event) error {
				shown.Add(1)
				r := recorded{window: w, event: e}
				if s := stampOf(windows[0].times, e.revision); s.Time != nil {
					r.at, _ = windows[0].times.TimeOf(e.revision)
					if r.at.IsZero() {
						r.at = windows[0].times.Now
					}
				}
				events[i] = append(events[i], r)
				return nil
			})
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	all := slices.Concat(events...)
	slices.SortStableFunc(all, func(a, b recorded) int { return int(a.revision - b.revision) })
	return all, nil
}
