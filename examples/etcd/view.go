package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
)

// view is a mirror of the keys below a prefix.
type view struct {
	client *clientv3.Client
	prefix string
	mirror *mirror.Mirror
	keys   *mirror.Resource
}

// open mirrors the prefix and returns when it can be read. The caller closes the mirror.
func open(ctx context.Context, client *clientv3.Client, prefix string) (*view, error) {
	if !strings.HasPrefix(prefix, "/") || !strings.HasSuffix(prefix, "/") || len(prefix) < 3 {
		return nil, fmt.Errorf("-prefix %q is not a name between two slashes, such as /app/", prefix)
	}
	// An etcd before 3.4.31 or 3.5.13 may send progress ahead of events. Source.WithoutProgress
	// supports it, with weaker reads.
	if err := etcdsource.CheckVersions(ctx, client); err != nil {
		return nil, err
	}
	// The key "probe" is read to find etcd's revision. It need not exist.
	source := etcdsource.New(client, "example", prefix+"probe")
	// Resources are parts of a mirror, so its own prefix is the directory above. Only key and
	// revision are stored of keys outside of the resource.
	above := path.Dir(strings.TrimSuffix(prefix, "/"))
	m, err := mirror.New(mirror.Options{
		Source:         source,
		Prefix:         strings.TrimSuffix(above, "/") + "/",
		UnclaimedBytes: 1,
		Logger:         slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return nil, err
	}
	keys, err := m.Claim(prefix)
	if err == nil {
		err = keys.WaitReady(ctx)
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return &view{client: client, prefix: prefix, mirror: m, keys: keys}, nil
}

// serve prints every change after the first snapshot once, in the order of revisions, and answers
// requests in between. It returns when requests is closed, or ctx is cancelled.
func (v *view) serve(ctx context.Context, requests <-chan string, out io.Writer) error {
	snapshot, err := v.keys.Latest()
	if err != nil {
		return err
	}
	n, _ := snapshot.Count(v.prefix, "")
	fmt.Fprintf(out, "keys below %s at revision %d: %d\n", v.prefix, snapshot.Rev, n)
	for cursor := snapshot.Cursor(v.prefix, ""); ; {
		changed := cursor.Changed() // before Next, so that no event is missed
		if err := printChanges(cursor, out); err != nil {
			return err
		}
		select {
		case <-changed:
		case request, ok := <-requests:
			current, err := v.current(ctx)
			if err != nil {
				return err
			}
			if err := printChanges(cursor, out); err != nil || !ok {
				return err
			}
			if err := v.answer(ctx, strings.Fields(request), current, out); err != nil {
				fmt.Fprintln(out, "error:", err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// printChanges prints the changes that memory has and the cursor has not returned.
func printChanges(cursor *mirror.Cursor, out io.Writer) error {
	for {
		events, err := cursor.Next(nil, 100)
		if err != nil || len(events) == 0 {
			return err // ErrCompacted: the cursor is behind the retained history
		}
		for _, event := range events {
			if event.Entry == nil {
				fmt.Fprintf(out, "revision %d: deleted %s\n", event.Rev, event.Key())
			} else {
				fmt.Fprintf(out, "revision %d: put %s = %q\n", event.Rev, event.Key(), event.Entry.Value())
			}
		}
	}
}

// current returns etcd's current revision, when memory has it: the beginning of a linearizable
// read.
func (v *view) current(ctx context.Context) (mirror.Revision, error) {
	revision, err := v.mirror.ReadRevision(ctx)
	if err != nil {
		return 0, err
	}
	return revision, v.mirror.Wait(ctx, revision)
}

// answer answers a request when current is etcd's revision.
func (v *view) answer(ctx context.Context, request []string, current mirror.Revision, out io.Writer) error {
	// The fields that a request has without its revision.
	fields := map[string]int{"put": 3, "delete": 2, "get": 2, "range": 1, "compare": 1}
	if len(request) == 0 {
		return nil
	}
	command, n := request[0], fields[request[0]]
	writes := command == "put" || command == "delete"
	if n == 0 || len(request) < n || len(request) > n+1 || writes && len(request) > n {
		return fmt.Errorf("%q is not a request; use put KEY VALUE, delete KEY, get KEY [REVISION], range [REVISION] or compare [REVISION]", strings.Join(request, " "))
	}
	if writes {
		if !strings.HasPrefix(request[1], v.prefix) {
			return fmt.Errorf("key %q is not below %s", request[1], v.prefix)
		}
		if command == "put" {
			_, err := v.client.Put(ctx, request[1], request[2])
			return err
		}
		_, err := v.client.Delete(ctx, request[1])
		return err
	}
	snapshot, err := v.at(ctx, request[n:], current)
	if err != nil {
		return err
	}
	switch command {
	case "get":
		if entry, found := snapshot.Get(request[1]); found {
			fmt.Fprintf(out, "%s = %q at revision %d, written at %d\n", request[1], entry.Value(), snapshot.Rev, entry.ModRevision())
		} else {
			fmt.Fprintf(out, "no key %s at revision %d\n", request[1], snapshot.Rev)
		}
	case "range":
		n, _ := snapshot.Count(v.prefix, "")
		fmt.Fprintf(out, "keys at revision %d: %d\n", snapshot.Rev, n)
		for entry := range snapshot.All(v.prefix, "") {
			fmt.Fprintf(out, "  %s = %q\n", entry.Key(), entry.Value())
		}
	case "compare":
		return v.compare(ctx, snapshot, out)
	}
	return nil
}

// at returns the state at the revision of the argument, if there is one, or at the current
// revision.
func (v *view) at(ctx context.Context, argument []string, current mirror.Revision) (mirror.Snapshot, error) {
	revision := current
	if len(argument) > 0 {
		var err error
		if revision, err = strconv.ParseInt(argument[0], 10, 64); err != nil {
			return mirror.Snapshot{}, fmt.Errorf("%q is not a revision", argument[0])
		}
	}
	if revision > current {
		return mirror.Snapshot{}, fmt.Errorf("revision %d does not exist yet; the latest one is %d", revision, current)
	}
	// After a start, memory has the latest state first; the history before it is read from etcd.
	if err := v.keys.WaitHistory(ctx, revision); err != nil {
		return mirror.Snapshot{}, err
	}
	snapshot, err := v.keys.At(revision)
	if errors.Is(err, mirror.ErrCompacted) {
		if oldest, _, oldestErr := v.keys.Oldest(); oldestErr == nil {
			err = fmt.Errorf("revision %d is not in memory; the oldest one is %d", revision, oldest)
		}
	}
	return snapshot, err
}

// compare reads the range from etcd at the revision of the snapshot, and prints the differences.
func (v *view) compare(ctx context.Context, snapshot mirror.Snapshot, out io.Writer) error {
	response, err := v.client.Get(ctx, v.prefix, clientv3.WithPrefix(), clientv3.WithRev(snapshot.Rev))
	if err != nil {
		return err
	}
	different := 0
	for _, kv := range response.Kvs {
		entry, found := snapshot.Get(string(kv.Key))
		if !found || entry.ModRevision() != kv.ModRevision || !bytes.Equal(entry.Value(), kv.Value) {
			different++
			fmt.Fprintf(out, "  %s is different in memory\n", kv.Key)
		}
	}
	n, _ := snapshot.Count(v.prefix, "")
	if n != len(response.Kvs) || different > 0 {
		return fmt.Errorf("memory has %d keys at revision %d, etcd has %d; %d are different", n, snapshot.Rev, len(response.Kvs), different)
	}
	fmt.Fprintf(out, "memory equals etcd at revision %d: %d keys\n", snapshot.Rev, n)
	return nil
}
