package history

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/internal/statusline"
)

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
