package history

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stratakube/strata/internal/progress"
)

type exportOptions struct {
	*base
	selection
	since, until moment
	file         string
}

func (b *base) exportCommand() *cobra.Command {
	o := &exportOptions{base: b}
	cmd := &cobra.Command{
		Use:   "export [TYPE[,TYPE...]] -f FILE",
		Short: "Write the window to a file that kwok replays",
		Long: `Write the objects at the beginning of the window, and then every change with its time, to a file in the recording format of kwok, for
"kwokctl kectl snapshot replay --path FILE" (kwok up to v0.7: "kwokctl snapshot replay --path FILE"). Without types, all resources that you may list are written, except for events and leases. The
file contains Secrets, unless other types are given; only you may read it. A name that ends in .gz is compressed.`,
		Example: `  {program} export --since 10m -f window.yaml
  {program} export pods,nodes --since 1h --until 30m -f window.yaml.gz
  {program} export -n web -f -`,
		ValidArgsFunction: b.completeResources,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd.Context(), args) },
	}
	windowFlags(cmd, &o.since, &o.until)
	o.selection.addFlags(cmd.Flags())
	cmd.Flags().StringVarP(&o.file, "file", "f", "", "the file, which must not exist; - is the standard output")
	_ = cmd.MarkFlagRequired("file")
	return cmd
}

// loadOrder is the order of the objects at the beginning: kinds that others need are the first.
var loadOrder = []string{"customresourcedefinitions.apiextensions.k8s.io", "namespaces", "nodes", "serviceaccounts", "configmaps", "secrets",
	"priorityclasses.scheduling.k8s.io", "persistentvolumes", "persistentvolumeclaims", "deployments.apps", "statefulsets.apps", "daemonsets.apps",
	"replicasets.apps", "cronjobs.batch", "jobs.batch", "services", "pods"}

func (o *exportOptions) run(ctx context.Context, args []string) (err error) {
	c, err := o.connect()
	if err != nil {
		return err
	}
	shown := progress.Start(o.ErrOut)
	defer shown.Stop()
	shown.Next("discovering the resources of %s", c.config.Host)
	ts, all, err := c.selected(args, o.selection)
	if err != nil {
		return err
	}
	shown.Next("reading the history of %d resources", len(ts))
	windows, err := c.commonWindows(ctx, ts, &o.since, &o.until, all)
	if err != nil {
		return err
	}
	rank := func(w window) int {
		return (slices.Index(loadOrder, w.resource()) + 1 + len(loadOrder)) % (len(loadOrder) + 1)
	}
	slices.SortStableFunc(windows, func(a, b window) int { return rank(a) - rank(b) })
	out := o.Out
	if o.file != "-" {
		file, err := os.OpenFile(o.file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			if errors.Is(err, os.ErrExist) {
				return fmt.Errorf("create the recording: %w; choose a name that does not exist with --file", err)
			}
			return fmt.Errorf("create the recording: %w; choose another file with --file", err)
		}
		ours, err := file.Stat()
		if err != nil {
			file.Close()
			return fmt.Errorf("create the recording: %w", err)
		}
		defer func() {
			if closeErr := file.Close(); err == nil {
				err = closeErr
			}
			if err != nil {
				removeSame(o.file, ours)
			}
		}()
		out = file
	}
	objects, events, err := c.export(ctx, windows, o.since.time, out, strings.HasSuffix(o.file, ".gz"), shown)
	if err != nil {
		return err
	}
	shown.Stop()
	fmt.Fprintf(o.ErrOut, "Wrote %s at %s, and %s until %s.\n", count(objects, "object"),
		stampOf(windows[0].times, windows[0].from), count(events, "event"), stampOf(windows[0].times, windows[0].to))
	return nil
}

// export writes windows with common revisions. A time since that is zero is that of the first revision.
func (c *client) export(ctx context.Context, windows []window, since time.Time, out io.Writer, compressed bool, shown *progress.Steps) (objects, events int, err error) {
	buffer := bufio.NewWriter(out)
	var w io.Writer = buffer
	if compressed {
		zip := gzip.NewWriter(buffer)
		defer func() {
			if closeErr := zip.Close(); err == nil {
				err = closeErr
			}
			if flushErr := buffer.Flush(); err == nil {
				err = flushErr
			}
		}()
		w = zip
	} else {
		defer func() {
			if flushErr := buffer.Flush(); err == nil {
				err = flushErr
			}
		}()
	}
	// The events are read first: the beginning of the window is about to leave the history.
	all, err := c.collect(ctx, windows, shown)
	if err != nil {
		return 0, 0, err
	}
	if since.IsZero() {
		since = windows[0].base(all)
	}
	r := newRecorder(w, since)
	for _, win := range windows {
		shown.Next("writing %s at revision %d", win.target, win.from)
		list, err := c.objects(ctx, win.target, win.from, shown)
		if err != nil {
			return 0, 0, err
		}
		for _, object := range list {
			if err := r.object(win.target, object); err != nil {
				return 0, 0, err
			}
			objects++
		}
	}
	shown.Next("writing the events")
	shown.Of(len(all))
	for _, e := range all {
		if err := r.event(e); err != nil {
			return 0, 0, err
		}
		shown.Add(1)
	}
	return objects, len(all), nil
}

// base is the time of the window's beginning, or of the first event with a known time.
func (w window) base(events []recorded) time.Time {
	if t, ok := w.times.TimeOf(w.from); ok {
		return t
	}
	for _, e := range events {
		if !e.at.IsZero() {
			return e.at
		}
	}
	return w.times.Now
}
